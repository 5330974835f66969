"""`memoro lab bench gpu`: what one device does, by backbone and precision, and by number of images and classes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from memoro.backbones import load_backbone
from memoro.backbones.precision import Precision
from memoro.console import bar
from memoro.engine.composition import compose
from memoro.lab.bench.models import MODELS, Row, new_tasks, time_candidates
from memoro.tasks.calibration import fit_calibration
from memoro.tasks.readout import solve_readout
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.spec import ReadOut

CELLS = 5
"""Of each task."""


def bench_passes(
    models: Sequence[str],
    precisions: Sequence[Precision],
    device: torch.device,
    *,
    counts: Sequence[int],
    batch: int,
    rounds: int,
) -> list[Row]:
    """Images per second of each backbone in each precision, alone (`plain`) and by number of `tasks`; `bytes`: the most
    memory of the GPU that was in use, None on other devices."""
    rows = []
    for name in models:
        build, side = MODELS[name]
        whole = load_backbone(build(), device=device)
        for precision in precisions:
            backbone = load_backbone(whole, precision=precision)
            pixels = torch.randn(batch, backbone.channels, side, side, device="cpu").to(device, backbone.dtype)
            tasks = new_tasks(backbone, max(counts), cells=CELLS)
            candidates: dict[str, Callable[[], object]] = {"plain": lambda b=backbone, x=pixels: b.original(x)}  # type: ignore[misc]
            for count in counts:
                model = compose(backbone, tasks[:count])
                candidates[str(count)] = lambda m=model, x=pixels: m(x)  # type: ignore[misc]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with torch.no_grad():
                best = time_candidates(f"{name}, {precision}", candidates, rounds, quiet=False)
            most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            speeds = {count: batch / best[str(count)] for count in counts}
            row = {"model": name, "side": side, "precision": precision, "batch": batch, "plain": batch / best["plain"]}
            rows.append({**row, "tasks": speeds, "bytes": most})
    return rows


def bench_solving(images: Sequence[int], classes: Sequence[int], features: int) -> list[Row]:
    """Seconds of read-outs of synthetic statistics, which take no memory: only what is made of them does.

    `exponent`: how the time grows from the smallest number of images of the same classes. `bytes`: what the statistics
    would take on disk.
    """
    rows = []
    with bar("read-outs", len(images) * len(classes)) as tick:
        for labels in classes:
            first = None
            for count in images:
                solve, calibrate = _solve(count, labels, features)
                first = first or (count, solve + calibrate)
                grown = count / first[0]
                exponent = math.log((solve + calibrate) / first[1]) / math.log(grown) if grown > 1 else None
                row = {"images": count, "classes": labels, "features": features, "solve": solve}
                rows.append({**row, "calibrate": calibrate, "exponent": exponent, "bytes": 2 * count * features})
                tick()
    return rows


def _solve(count: int, labels: int, features: int) -> tuple[float, float]:
    """Seconds of solving and of calibrating one read-out."""
    middles = torch.randn(labels, features, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    targets = torch.arange(count, device="cpu") % labels

    def read(index: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(int(index[0]))
        noise = torch.randn(len(index), features, generator=generator, device="cpu")
        return middles[index % labels] + 3.0 * noise

    start = time.perf_counter()
    system = RidgeSystem(count, read)
    solved = solve_readout("softmax", ReadOut(0, 3, 1.0), lambda _: system, targets, labels)
    middle = time.perf_counter()
    fit_calibration("softmax", solved.held_out, targets[solved.answered], "left out")
    return middle - start, time.perf_counter() - middle
