# memoro serve as an ordinary user, on a file system that cannot be written to. Tasks and weights are mounted:
#
#   docker build -t memoro .
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges -p 8000:8000 \
#     -e MEMORO_TOKEN -e MEMORO_READ_TOKEN -v "$PWD/tasks:/tasks:ro" -v "$PWD/backbones:/backbones:ro" memoro
#
# /tasks has task files, /backbones a folder for each backbone (memoro-tiny needs none). To attach tasks over HTTP, mount
# /tasks without :ro, writable for user 10001.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src src
RUN python -m venv /opt/memoro && /opt/memoro/bin/pip install --no-cache-dir -c constraints.txt '.[serve]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/memoro /opt/memoro
ENV PATH=/opt/memoro/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    MEMORO_BACKBONES=/backbones
RUN mkdir /tasks /backbones
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["memoro", "serve"]
CMD ["--tasks", "/tasks", "--host", "0.0.0.0", "--port", "8000"]
