"""`memoro lab bench serve`: throughput and latency through HTTP, against the engine's own.

The clients are a process of their own: python -m memoro.lab.bench.serve URL CLIENTS REQUESTS SECONDS < IMAGE.
"""

from __future__ import annotations

import asyncio
import io
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import torch
from PIL import Image

from memoro.backbones import Backbone
from memoro.clock import read_clock
from memoro.console import bar
from memoro.engine.composition import Composition, compose
from memoro.errors import ServeError
from memoro.lab.bench.models import new_tasks
from memoro.serve.options import ServeOptions
from memoro.serve.server import address_of, listen, make_server
from memoro.serve.store import TaskStore

SEPARATE = 5
"""Separate models that are timed; the cost of more is extrapolated from them."""


@dataclass(frozen=True)
class ServeRow:
    """What one model achieved, in images per second and milliseconds."""

    model: str
    tasks: int
    batch: int
    clients: int
    requests: int
    engine: float
    """The engine alone: passes over pixels that are ready, at the same batch size."""
    http: float
    ratio: float
    """HTTP to engine."""
    p50_ms: float
    p99_ms: float
    mean_batch: float
    separate: float
    """One model per task, extrapolated from five: images per second for all tasks' answers."""


def bench_serve(
    name: str,
    backbone: Backbone,
    side: int,
    *,
    tasks: int,
    batch: int,
    clients: int,
    requests: int,
    seconds: float,
    quiet: bool = True,
) -> ServeRow:
    """Measures engine, server, engine again (their mean counts, against drift), and separate models.

    The server stops after `requests`, or after `seconds`. Each client has one connection, sends one JPEG per request,
    and a new request as soon as the last one is answered.
    """
    steps = backbone.preprocessing.at(side)
    untrained = new_tasks(backbone, tasks)
    for task in untrained:
        task.update_spec(preprocessing=steps)
    model = compose(backbone, untrained)
    pixels = torch.randn(batch, backbone.channels, *(steps.size or (side, side))).to(backbone.device, backbone.dtype)
    with bar(name, 4, quiet=quiet) as tick:
        first = _throughput(lambda: model(pixels), batch, seconds / 6)
        tick()
        times, wall, mean_batch = _run_http(model, batch, clients, requests, seconds, _jpeg(side))
        tick()
        second = _throughput(lambda: model(pixels), batch, seconds / 6)
        tick()
        own = [compose(backbone, [task]) for task in untrained[:SEPARATE]]
        single = _throughput(lambda: [one(pixels) for one in own], batch, seconds / 6) * len(own)
        tick()
    engine, http = (first + second) / 2, len(times) / wall
    return ServeRow(
        model=name,
        tasks=tasks,
        batch=batch,
        clients=clients,
        requests=len(times),
        engine=engine,
        http=http,
        ratio=http / engine,
        p50_ms=1000 * statistics.median(times),
        p99_ms=1000 * sorted(times)[int(0.99 * len(times))],
        mean_batch=mean_batch,
        separate=single / tasks,
    )


def _jpeg(side: int) -> bytes:
    """A photograph-like image, twice the size that the model takes."""
    noise = Image.effect_noise((2 * side, 2 * side), 60).resize((side // 4, side // 4)).resize((2 * side, 2 * side))
    buffer = io.BytesIO()
    Image.merge("RGB", [noise, noise.rotate(90), noise.rotate(180)]).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _throughput(run: Callable[[], object], images: int, seconds: float) -> float:
    """Images per second over at least `seconds`, after one run to warm up."""
    with torch.no_grad():
        run()
        start, runs = read_clock(), 0
        while read_clock() - start < seconds or runs < 3:
            run()
            runs += 1
    return images * runs / (read_clock() - start)


def _run_http(
    model: Composition, batch: int, clients: int, requests: int, seconds: float, image: bytes
) -> tuple[list[float], float, float]:
    """What `send_requests` returns, by a process of its own: here, it would share Python's lock with the server."""
    options = ServeOptions(port=0, max_batch=batch, timeout=600, max_queue=max(256, 2 * clients))
    with _server(model, options) as url:
        command = [sys.executable, "-m", "memoro.lab.bench.serve", url, str(clients), str(requests), str(seconds)]
        found = subprocess.run(command, input=image, stdout=subprocess.PIPE, check=False)
    if found.returncode:
        raise ServeError("the benchmark's clients failed; see above.")
    times, wall, mean_batch = json.loads(found.stdout)
    return times, wall, mean_batch


@contextmanager
def _server(model: Composition, options: ServeOptions) -> Iterator[str]:
    store = TaskStore(model.backbone, {Path(): list(model.tasks.values())})
    server, listening = make_server(store, options), listen(options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield address_of(listening)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


async def send_requests(
    url: str, image: bytes, clients: int, requests: int, seconds: float
) -> tuple[list[float], float, float]:
    """Seconds of each request, seconds in all, and the server's mean batch."""
    host, port = str(urlsplit(url).hostname), int(urlsplit(url).port or 80)
    head = f"POST /v1/predict HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(image)}\r\n\r\n".encode()
    times: list[float] = []
    left = requests + clients  # the first of each client warms up
    begin = 0.0

    async def client() -> None:
        nonlocal left, begin
        reader, writer = await asyncio.open_connection(host, port)
        sent = 0
        while left > 0 and (sent < 2 or perf_counter() - begin < seconds):
            left -= 1
            start = perf_counter()
            writer.write(head + image)
            await _read_answer(reader)
            if sent:
                times.append(perf_counter() - start)
            begin = begin or perf_counter()
            sent += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    wall = perf_counter() - begin
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n".encode())
    lines = (await _read_answer(reader)).decode().splitlines()
    writer.close()
    value = {row.rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in lines if not row.startswith("#")}
    return times, wall, value["memoro_batch_size_sum"] / value["memoro_batch_size_count"]


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(" ", 2)[1]
    length = next(int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length:"))
    body = await reader.readexactly(length)
    if status != "200":
        raise RuntimeError(f"status {status}: {body[:200].decode(errors='replace')}")
    return body


if __name__ == "__main__":
    where, clients, requests, seconds = sys.argv[1:]
    found = asyncio.run(send_requests(where, sys.stdin.buffer.read(), int(clients), int(requests), float(seconds)))
    sys.stdout.write(json.dumps(found))
