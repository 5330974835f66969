"""`memoro lab bench serve`: throughput and latency through HTTP, against the engine's own."""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from memoro.backbones import Backbone
from memoro.clock import read_clock
from memoro.console import make_table
from memoro.engine.composition import Composition, compose
from memoro.errors import ServeError
from memoro.images import Preprocessing
from memoro.lab.bench.models import CLASSES
from memoro.serve.options import ServeOptions
from memoro.serve.server import address_of, listen, make_server
from memoro.serve.store import TaskFiles, TaskStore
from memoro.tasks.task import new_task

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
    p50_ms: float
    p99_ms: float
    mean_batch: float
    separate: float
    """One model per task, extrapolated from five: images per second for all tasks' answers."""

    @property
    def ratio(self) -> float:
        return self.http / self.engine


def bench_serve(
    name: str,
    backbone: Backbone,
    side: int,
    *,
    tasks: int = 100,
    batch: int = 16,
    clients: int = 32,
    requests: int = 600,
    seconds: float = 60.0,
    tick: Callable[[], None] = lambda: None,
) -> ServeRow:
    """Measures engine, server, engine again (their mean counts, against drift), and separate models.

    The server stops after `requests`, or after `seconds`. Clients are one process of their own, each with one
    connection, one JPEG per request, and a new request as soon as the last one is answered.
    """
    steps = backbone.preprocessing.at(side)
    model = compose(backbone, [_task(backbone, f"task {i}", steps) for i in range(tasks)])
    pixels = torch.randn(batch, backbone.channels, *(steps.size or (side, side))).to(backbone.device, backbone.dtype)
    first = _throughput(lambda: model(pixels), batch, seconds / 6)
    tick()
    times, wall, mean_batch = _run_http(model, batch, clients, requests, seconds, _jpeg(side))
    tick()
    second = _throughput(lambda: model(pixels), batch, seconds / 6)
    tick()
    own = [compose(backbone, [_task(backbone, "task", steps)]) for _ in range(min(tasks, SEPARATE))]
    single = _throughput(lambda: [one(pixels) for one in own], batch, seconds / 6) * len(own)
    tick()
    ordered = sorted(times)
    return ServeRow(
        model=name,
        tasks=tasks,
        batch=batch,
        clients=clients,
        requests=len(times),
        engine=(first + second) / 2,
        http=len(times) / wall,
        p50_ms=1000 * statistics.median(ordered),
        p99_ms=1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        mean_batch=mean_batch,
        separate=single / tasks,
    )


TICKS = 4


def _task(backbone: Backbone, name: str, steps: Preprocessing) -> Any:
    task = new_task(backbone, name, [str(i) for i in range(CLASSES)])
    task.update_spec(preprocessing=steps)
    return task


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
    """Seconds of each request, seconds in all, and the mean size of a batch."""
    options = ServeOptions(port=0, max_batch=batch, timeout=600, max_queue=max(256, 2 * clients))
    with _server(model, options) as url:
        # A process of its own: clients in this one would share Python's lock with the server.
        command = [sys.executable, "-m", "memoro.lab.bench.load", url, str(clients), str(requests), str(seconds)]
        found = subprocess.run(command, input=image, stdout=subprocess.PIPE, check=False)
    if found.returncode:
        raise ServeError("the benchmark's clients failed; see above.")
    times, wall, mean_batch = json.loads(found.stdout)
    return times, wall, mean_batch


@contextmanager
def _server(model: Composition, options: ServeOptions) -> Iterator[str]:
    store = TaskStore(model.backbone, TaskFiles({Path(): list(model.tasks.values())}))
    server, listening = make_server(store, options), listen(options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield address_of(listening)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def serve_table(rows: Sequence[ServeRow]) -> Table:
    """A column for each model."""
    lines: dict[str, Callable[[ServeRow], str]] = {
        "tasks, all asked": lambda row: str(row.tasks),
        "images in a pass": lambda row: str(row.batch),
        "clients": lambda row: str(row.clients),
        "requests": lambda row: str(row.requests),
        "engine alone, images per second": lambda row: f"{row.engine:.1f}",
        "through HTTP, images per second": lambda row: f"{row.http:.1f}",
        "ratio": lambda row: f"{row.ratio:.2f}",
        "latency, median in ms": lambda row: f"{row.p50_ms:.0f}",
        "latency, 99 % in ms": lambda row: f"{row.p99_ms:.0f}",
        "mean images in a pass": lambda row: f"{row.mean_batch:.1f}",
        f"separate models, extrapolated from {SEPARATE}": lambda row: f"{row.separate:.2f}",
    }
    cells = [[name, *(show(row) for row in rows)] for name, show in lines.items()]
    return make_table(["", *(row.model for row in rows)], cells, "Through HTTP on loopback")
