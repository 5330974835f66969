"""`memoro lab bench gpu`: what one device does, by backbone and precision, and by number of images and classes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from memoro.backbones import load_backbone
from memoro.backbones.precision import Precision
from memoro.clock import best_times
from memoro.console import format_bytes, make_table
from memoro.engine.composition import compose
from memoro.lab.bench.models import CLASSES, MODELS
from memoro.tasks.calibration import fit_calibration
from memoro.tasks.readout import solve_readout
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import new_task

CELLS = 5
"""Of each task."""


@dataclass(frozen=True)
class PassRow:
    """Images per second of one backbone in one precision."""

    model: str
    side: int
    precision: str
    batch: int
    plain: float
    tasks: dict[int, float]
    """By number of tasks."""
    bytes: int | None
    """The most memory of the GPU that was in use; None on other devices."""


@dataclass(frozen=True)
class SolveRow:
    """Seconds that a read-out takes, from statistics that are there."""

    images: int
    classes: int
    features: int
    solve: float
    calibrate: float
    bytes: int
    """Of the statistics on disk."""


def bench_passes(
    models: Sequence[str],
    precisions: Sequence[Precision],
    device: torch.device,
    *,
    counts: Sequence[int],
    batch: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> list[PassRow]:
    """The passes of each backbone in each precision, in turn."""
    rows = []
    for name in models:
        build, side = MODELS[name]
        whole = load_backbone(build(), device=device)
        for precision in precisions:
            backbone = load_backbone(whole, precision=precision)
            pixels = torch.randn(batch, backbone.channels, side, side, device="cpu").to(device, backbone.dtype)
            labels = [str(number) for number in range(CLASSES)]
            tasks = [new_task(backbone, f"task {number}", labels, cells=CELLS) for number in range(max(counts))]
            candidates: dict[str, Callable[[], object]] = {"plain": lambda b=backbone, x=pixels: b.original(x)}  # type: ignore[misc]
            for count in counts:
                model = compose(backbone, tasks[:count])
                candidates[str(count)] = lambda m=model, x=pixels: m(x)  # type: ignore[misc]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with torch.no_grad():
                best = best_times(candidates, rounds, tick)
            most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            speeds = {key: batch / seconds for key, seconds in best.items()}
            own = {count: speeds[str(count)] for count in counts}
            rows.append(PassRow(name, side, precision, batch, speeds["plain"], own, most))
    return rows


def bench_solving(
    images: Sequence[int], classes: Sequence[int], features: int, tick: Callable[[], None] = lambda: None
) -> list[SolveRow]:
    """Read-outs of synthetic statistics, which take no memory: only what is made of them does."""
    rows = []
    for labels in classes:
        middles = torch.randn(labels, features, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        for count in images:
            targets = torch.arange(count, device="cpu") % labels

            def read(index: torch.Tensor, labels: int = labels, middles: torch.Tensor = middles) -> torch.Tensor:
                generator = torch.Generator("cpu").manual_seed(int(index[0]))
                return middles[index % labels] + 3.0 * torch.randn(
                    len(index), features, generator=generator, device="cpu"
                )

            start = time.perf_counter()
            system = RidgeSystem(count, read)
            solved = solve_readout("softmax", ReadOut(0, 3, 1.0), lambda _, own=system: own, targets, labels)  # type: ignore[misc]
            middle = time.perf_counter()
            fit_calibration("softmax", solved.held_out, targets[solved.answered], "left out")
            end = time.perf_counter()
            rows.append(SolveRow(count, labels, features, middle - start, end - middle, count * features * 2))
            tick()
    return rows


def pass_table(rows: Sequence[PassRow]) -> Table:
    counts = list(rows[0].tasks)
    columns = ["backbone", "pixels", "precision", "batch", "plain", *(f"{count} tasks" for count in counts), "memory"]
    cells = [
        [
            row.model, str(row.side), row.precision, str(row.batch), f"{row.plain:,.1f}",
            *(f"{row.tasks[count]:,.1f}" for count in counts), "" if row.bytes is None else format_bytes(row.bytes),
        ]
        for row in rows
    ]  # fmt: skip
    return make_table(columns, cells, f"Images per second ({CELLS} cells a task)", left=3)


def solve_table(rows: Sequence[SolveRow]) -> Table:
    """With the exponent of growth from the smallest to the largest number of images of the same classes."""
    cells = []
    for row in rows:
        first = next(one for one in rows if one.classes == row.classes)
        grown = ""
        if row.images > first.images:
            ratio = (row.solve + row.calibrate) / (first.solve + first.calibrate)
            grown = f"{math.log(ratio) / math.log(row.images / first.images):.2f}"
        cells.append(
            [
                f"{row.images:,}", f"{row.classes:,}", f"{row.features:,}", f"{row.solve:.1f}",
                f"{row.calibrate:.1f}", grown, format_bytes(row.bytes),
            ]
        )  # fmt: skip
    columns = ["images", "classes", "features", "solve (s)", "calibrate (s)", "exponent", "statistics"]
    return make_table(columns, cells, "Read-outs from kept statistics", left=0)
