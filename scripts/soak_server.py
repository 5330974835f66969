"""Sends many requests to `memoro serve` while tasks are attached and detached, and checks every answer.

    python scripts/soak_server.py --requests 10000 --out results/soak.md

It starts a server with memoro-tiny and six tasks of random weights in a folder of its own. Clients send one of 32
images at a time and compare each answer with the library's own; meanwhile one task is attached, replaced or detached
every second. The report says how many requests failed, how many answers were wrong, and how much memory the server
held over time. Between two batch sizes a probability moved by less than 1e-4 in float32: that is the tolerance.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image

import memoro
from reports import table, write_report

TOLERANCE = 1e-4
LABELS = [f"label {i}" for i in range(10)]
COMING = ("guest", "visitor")
"""Tasks that are attached and detached; `visitor` extends `guest`."""


def random_task(backbone: memoro.Backbone, name: str, seed: int, **options: Any) -> memoro.Task:
    task = memoro.new_task(backbone, name, LABELS, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    task.update_spec(preprocessing=backbone.preprocessing)
    return task


def draw(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((96 + seed, 80), 40 + 5 * seed).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


class Soak:
    """One run: counts, problems, and memory over time."""

    def __init__(self, url: str, images: list[bytes], right: list[dict[str, dict[str, Any]]], requests: int) -> None:
        self.url, self.images, self.right = url, images, right
        self.left, self.lock = requests, threading.Lock()
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.worst = 0.0
        self.changes = 0
        self.memory: list[tuple[int, float]] = []
        self.seen: dict[str, int] = dict.fromkeys(COMING, 0)
        self.done = 0

    def ask(self) -> None:
        with memoro.Client(self.url) as client:
            while True:
                with self.lock:
                    self.left -= 1
                    number = self.left
                if number < 0:
                    return
                at = number % len(self.images)
                try:
                    (found,) = client.predict(self.images[at], top=len(LABELS))
                except memoro.MemoroError as error:
                    with self.lock:
                        self.failed.append(str(error))
                    continue
                self.check(at, found)

    def check(self, at: int, found: dict[str, dict[str, Any]]) -> None:
        right = self.right[at]
        worst, wrong = 0.0, [name for name in right if name not in found and name not in COMING]
        for name, answer in found.items():
            for label, value in answer["probabilities"].items():
                worst = max(worst, abs(value - right[name]["probabilities"][label]))
        if "visitor" in found and "guest" not in found:
            wrong.append("visitor without guest")
        with self.lock:
            self.done += 1
            self.worst = max(self.worst, worst)
            for name in COMING:
                self.seen[name] += name in found
            if wrong or worst > TOLERANCE:
                self.wrong.append(f"image {at}: {wrong or worst}")

    def change(self, files: dict[str, Path], stop: threading.Event) -> None:
        """Attaches guest, then visitor, detaches visitor, then guest, and so on: one change every second."""
        with memoro.Client(self.url) as client:
            while True:
                for name, attach in (("guest", 1), ("visitor", 1), ("visitor", 0), ("guest", 0)):
                    if stop.wait(1):
                        return
                    client.attach(files[name]) if attach else client.detach(name)
                    self.changes += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True, help="the report; figures are written as JSON beside it")
    options = parser.parse_args()
    backbone = memoro.load_backbone("memoro-tiny")
    stay = [random_task(backbone, f"task {i}", i) for i in range(6)]
    guest = random_task(backbone, "guest", 20)
    visitor = random_task(backbone, "visitor", 21, extends=[guest])
    images = [draw(seed) for seed in range(32)]
    right = memoro.compose(backbone, [*stay, guest, visitor]).predict(images, batch_size=8)
    for name in right[0]:  # else a wrong image's answer would pass
        spread = [answers[name]["probabilities"]["label 0"] for answers in right]
        assert max(spread) - min(spread) > 10 * TOLERANCE, name
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for task in stay:
            memoro.save_task(task, folder / "tasks" / f"{task.name}.safetensors")
        files = {task.name: memoro.save_task(task, folder / f"{task.name}.safetensors") for task in (guest, visitor)}
        command = [sys.executable, "-m", "memoro", "serve", "--tasks", str(folder / "tasks")]
        command += ["--port", "0", "--precision", "float32"]  # as what is expected
        log = folder / "log.txt"
        with log.open("wb") as file:
            server = subprocess.Popen(command, stderr=file)
        try:
            while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                time.sleep(0.2)
            soak = Soak(found[1], images, right, options.requests)
            seconds = run(soak, options, files, psutil.Process(server.pid))
        finally:
            server.terminate()
            code = server.wait()
    report(soak, options, seconds, code)


def run(soak: Soak, options: argparse.Namespace, files: dict[str, Path], process: psutil.Process) -> float:
    """Sends all requests; the seconds that took."""
    stop, start = threading.Event(), time.monotonic()
    changing = threading.Thread(target=soak.change, args=(files, stop))
    clients = [threading.Thread(target=soak.ask) for _ in range(options.clients)]
    for thread in (changing, *clients):
        thread.start()
    step = max(1, options.requests // 20)
    while any(thread.is_alive() for thread in clients):
        if soak.done >= step * (len(soak.memory) + 1):
            soak.memory.append((soak.done, process.memory_info().rss / 1e6))
            print(f"{soak.done} requests, {soak.memory[-1][1]:.0f} MB", file=sys.stderr)
        time.sleep(0.1)
    soak.memory.append((soak.done, process.memory_info().rss / 1e6))
    stop.set()
    changing.join()
    return time.monotonic() - start


def report(soak: Soak, options: argparse.Namespace, seconds: float, code: int) -> None:
    settled = [size for done, size in soak.memory if done >= options.requests * 0.25] or [soak.memory[-1][1]]
    results = {
        "requests": soak.done, "failed": len(soak.failed), "wrong": len(soak.wrong), "largest_difference": soak.worst,
        "changes": soak.changes, "with_guest": soak.seen["guest"], "with_visitor": soak.seen["visitor"],
        "seconds": round(seconds, 1), "clients": options.clients, "cores": os.cpu_count(), "exit_code": code,
        "memory_mb": soak.memory, "memory_growth_mb": round(settled[-1] - settled[0], 1),
        "first_failures": soak.failed[:3], "first_wrong": soak.wrong[:3],
    }  # fmt: skip
    lines = [
        "# Requests while tasks are attached and detached",
        "",
        f"Made by `python scripts/soak_server.py --requests {options.requests} --clients {options.clients} --out …`: "
        "memoro-tiny, six tasks that stay, two that are attached and detached (one extends the other), a change every "
        "second.",
        "",
        *table(
            ["", ""],
            [
                ["requests", f"{soak.done:,} in {seconds:.0f} s"],
                ["failed", len(soak.failed)],
                [f"wrong (a probability off by more than {TOLERANCE:g})", len(soak.wrong)],
                ["largest difference of a probability", f"{soak.worst:.1e}"],
                ["changes of the set of tasks", soak.changes],
                ["answers with `guest`, with `visitor`", f"{soak.seen['guest']:,}, {soak.seen['visitor']:,}"],
                ["memory of the server after a quarter, at the end", f"{settled[0]:.0f} MB, {settled[-1]:.0f} MB"],
            ],
        ),
    ]
    write_report(options.out, results, lines)
    print(json.dumps(results, indent=1))
    if soak.failed or soak.wrong or code:
        sys.exit(1)


if __name__ == "__main__":
    main()
