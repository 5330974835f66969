"""`memoro lab bench serve`: throughput and latency through HTTP, against the engine's own.

The clients are a process of their own: python -m memoro.lab.bench.serve URL CLIENTS REQUESTS SECONDS < IMAGE.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit
from urllib.request import urlopen

import torch
from PIL import Image

from memoro.backbones import Backbone
from memoro.clock import read_clock
from memoro.console import bar
from memoro.engine.composition import Composition, compose
from memoro.errors import ServeError
from memoro.lab.bench.models import Row, new_tasks
from memoro.serve.options import ServeOptions
from memoro.serve.server import address_of, listen, make_server
from memoro.serve.store import TaskStore

SEPARATE = 5
"""Separate models that are timed; the cost of more is extrapolated from them."""


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
) -> Row:
    """Measures engine, server, engine again (their mean counts, against drift), and separate models.

    The server stops after `requests`, or after `seconds`. Each client has one connection, sends one JPEG per request,
    and a new request as soon as the last one is answered. Speeds are in images per second: of the engine alone on
    pixels that are ready, at the same batch size; through HTTP; and of one model per task, extrapolated from five.
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
    return {
        "model": name,
        "tasks": tasks,
        "batch": batch,
        "clients": clients,
        "requests": len(times),
        "engine": engine,
        "http": http,
        "ratio": http / engine,
        "p50_ms": 1000 * statistics.median(times),
        "p99_ms": 1000 * sorted(times)[int(0.99 * len(times))],
        "mean_batch": mean_batch,
        "separate": single / tasks,
    }


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


def send_requests(
    url: str, image: bytes, clients: int, requests: int, seconds: float
) -> tuple[list[float], float, float]:
    """Seconds of each request, seconds in all, and the server's mean batch."""
    connections = [HTTPConnection(urlsplit(url).netloc) for _ in range(clients)]
    left = iter(range(requests))

    def run_client(connection: HTTPConnection) -> list[float]:
        times: list[float] = []
        while next(left, None) is not None and (not times or perf_counter() - begin < seconds):
            start = perf_counter()
            _send(connection, image)
            times.append(perf_counter() - start)
        return times

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda connection: _send(connection, image), connections))  # warms up
        begin = perf_counter()
        times = [one for some in pool.map(run_client, connections) for one in some]
        wall = perf_counter() - begin
    lines = urlopen(f"{url}/metrics").read().decode().splitlines()
    value = {row.rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in lines if not row.startswith("#")}
    return times, wall, value["memoro_batch_size_sum"] / value["memoro_batch_size_count"]


def _send(connection: HTTPConnection, image: bytes) -> None:
    connection.request("POST", "/v1/predict", image)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {body[:200].decode(errors='replace')}")


if __name__ == "__main__":
    where, clients, requests, seconds = sys.argv[1:]
    found = send_requests(where, sys.stdin.buffer.read(), int(clients), int(requests), float(seconds))
    sys.stdout.write(json.dumps(found))
