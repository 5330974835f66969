"""A real server on loopback, in a thread of the test process, and raw requests to it."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from PIL import Image
from random_tasks import random_task
from trust import fit

import memoro
from memoro.backbones import Backbone
from memoro.engine import composition as composition_module
from memoro.serve.options import ServeOptions
from memoro.serve.server import address_of, listen, make_server
from memoro.serve.store import TaskStore, open_store
from memoro.tasks.taskfile import load_tasks


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    store: TaskStore
    server: Any
    thread: threading.Thread = field(repr=False)

    def request(
        self, method: str, target: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON (or bytes) of one request; underscores in the names of headers become dashes."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        connection.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        readable = is_json and data and "content-encoding" not in found
        return response.status, found, json.loads(data) if readable else data

    def predict(self, body: bytes, query: str = "", **headers: str) -> Any:
        status, _, found = self.request("POST", f"/v1/predict{query}", body, **headers)
        assert status == 200, found
        return found

    def metric(self, line: str) -> float:
        """The value of a line of /metrics, 0 where there is none."""
        _, _, text = self.request("GET", "/metrics")
        values = [row.rpartition(" ")[2] for row in text.decode().splitlines() if row.rpartition(" ")[0] == line]
        return float(values[0]) if values else 0.0


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def serving(backbone: Backbone, *places: Path, **options: Any) -> Iterator[Running]:
    """Starts a server with these tasks and stops it gracefully."""
    chosen = ServeOptions(**{"port": 0, "decoders": 2, **options})
    store = open_store(places, lambda _: backbone)
    with in_thread(make_server(store, chosen), store, chosen) as running:
        yield running


@contextmanager
def in_thread(server: Any, store: TaskStore, options: ServeOptions) -> Iterator[Running]:
    """Runs a server until the end of the block, where it stops gracefully."""
    listening = listen(options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Running(address_of(listening), store, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


def picture(seed: int = 0, size: tuple[int, int] = (33, 27), form: str = "PNG") -> bytes:
    """An encoded image, another one for each seed."""
    noise = Image.effect_noise(size, 60 + seed)
    image = Image.merge("RGB", [noise.point(lambda v, k=k: (v * (k + 1) + 40 * seed) % 256) for k in range(3)])
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def multipart(*files: bytes) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a form with these files."""
    parts = [
        f'--B\r\ncontent-disposition: form-data; name="images"; filename="{n}.png"\r\n\r\n'.encode() + data + b"\r\n"
        for n, data in enumerate(files)
    ]
    return b"".join([*parts, b"--B--\r\n"]), {"content_type": "multipart/form-data; boundary=B"}


def fill(folder: Path, backbone: Backbone) -> dict[str, memoro.Task]:
    """A folder of tasks of every kind: `pets` and `breeds`, which extends it, in one bundle, and four others."""
    size = backbone.preprocessing.at(20)
    pets = random_task(backbone, "pets", labels=["cat", "dog"], seed=1, cells=2)
    breeds = random_task(backbone, "breeds", seed=2, cells=1, extends=[pets])
    tags = random_task(backbone, "tags", seed=3, head="multilabel", labels=["a", "b", "c", "d"], from_layer=2)
    weight = random_task(backbone, "weight", seed=4, head="regression", labels=["kg"])
    top = random_task(backbone, "top", seed=5, from_layer=backbone.depth, cells=0)
    for task in (pets, breeds, tags, weight, top):
        task.update_spec(preprocessing=size)
    large = random_task(backbone, "large", seed=6)
    large.update_spec(preprocessing=backbone.preprocessing.at(28))
    folder.mkdir(parents=True, exist_ok=True)
    memoro.save_tasks([pets, breeds], folder / "both.safetensors")
    for task in (tags, weight, top, large):
        memoro.save_task(task, folder / f"{task.name}.safetensors")
    return {task.name: task for task in (pets, breeds, tags, weight, top, large)}


def know(task: memoro.Task, limit: float) -> memoro.Task:
    """Makes a task call every image familiar whose strangeness is at most this."""
    known = fit(torch.randn(60, task.spec.backbone.dim, generator=torch.Generator().manual_seed(0)), None)
    assert known is not None
    task.update_spec(familiarity=replace(known, held_out=torch.full((5,), limit), images=100))
    return task


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return memoro.load_backbone(CASES[0].model())


@pytest.fixture(scope="module")
def folder(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks of every kind, for all tests of a module."""
    path = tmp_path_factory.mktemp("served") / "tasks"
    fill(path, backbone)
    return path


def file_of(tmp_path: Path, *tasks: memoro.Task) -> bytes:
    return memoro.save_tasks(tasks, tmp_path / "upload.safetensors").read_bytes()


def in_folder(folder: Path) -> dict[str, str]:
    """Name and content of all tasks that a server would find there."""
    return {task.name: task.content_hash() for file in folder.glob("*.safetensors") for task in load_tasks(file)}


def contents(store: TaskStore) -> dict[str, str]:
    """The same of what a server has attached."""
    return {name: info["content"] for name, info in store.current.info.items()}


class Gate:
    """Holds passes back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened, self.images = threading.Event(), threading.Event(), list[int]()
        own = composition_module.run_streams

        def run(anatomy: Any, pixels: Any, *rest: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.opened.wait(60)
            self.images.append(len(pixels[0]))
            return own(anatomy, pixels, *rest, **options)

        monkeypatch.setattr(composition_module, "run_streams", run)
