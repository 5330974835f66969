"""`memoro lab bench train`: the cost of a training step of every regime relative to one plain pass."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from memoro.clock import best_times
from memoro.console import make_table
from memoro.lab.bench.step import Candidate, Setting, build_step
from memoro.pages.plots import save_figure


@dataclass(frozen=True, kw_only=True)
class TrainRow(Candidate):
    """One training step of one candidate."""

    step: float
    """In plain base passes without gradients."""
    steps_per_second: float
    megabytes: float | None
    """Peak memory above that of the loaded model."""
    trained: int
    """Trainable parameters of one run."""


def bench_train(
    setting: Setting,
    candidates: Sequence[Candidate],
    *,
    rounds: int = 5,
    memory: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> list[TrainRow]:
    """Times each candidate in this process, alternating with the base pass, which is the first candidate.

    Peak memory is measured in a process of its own for each. `tick` is called `tick_count` times.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base, _ = build_step(setting, candidates[0], Path(folder))
        for one in candidates:
            step, trained = build_step(setting, one, Path(folder))
            best = best_times({"base": base, "step": step}, rounds, tick)
            peak = None
            if memory:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    peak = pool.apply(_peak_megabytes, (setting, one))
            cost, speed = best["step"] / best["base"], 1 / best["step"]
            rows.append(TrainRow(**vars(one), step=cost, steps_per_second=speed, megabytes=peak, trained=trained))
    return rows


def tick_count(candidates: Sequence[Candidate], rounds: int) -> int:
    """How often `bench_train` calls `tick`."""
    return 2 * rounds * len(candidates)


def _peak_megabytes(setting: Setting, candidate: Candidate) -> float | None:
    """By how much two steps raise the memory use of a new process above that of the built model (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        step, _ = build_step(setting, candidate, Path(folder))
        status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
        if not (status.exists() and reset.exists()):
            return None
        # Resets the high-water mark, which a new process inherits from its parent.
        reset.write_text("5")
        before = _kilobytes(status, "VmRSS")
        step()
        step()
        return (_kilobytes(status, "VmHWM") - before) / 1000


def _kilobytes(status: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{field}:"))


def bench_loader(workers: Sequence[int] = (0, 1, 2), count: int = 384, side: int = 224) -> dict[str, float]:
    """Images per second that the loader decodes, augments and normalises, from JPEGs of 500 x 375 pixels to `side`."""
    import numpy as np
    from PIL import Image

    from memoro.data import Augment, Loader, load_data
    from memoro.images import Preprocessing

    generator = np.random.default_rng(0)
    speeds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            small = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            path = Path(folder) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            small.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
        images = load_data(folder, val_fraction=0, screen=False, quiet=True).train
        assert images is not None
        for number in workers:
            size = Preprocessing(resize=(side, side))
            loader = Loader(images, size, batch_size=32, augment=Augment(), shuffle=True, workers=number)
            for _ in loader.epoch(0):  # starts the processes
                pass
            start = time.perf_counter()
            done = sum(len(batch.targets) for batch in loader.epoch(1))
            speeds[f"{number} workers"] = done / (time.perf_counter() - start)
            loader.close()
    return speeds


def train_table(title: str, rows: Sequence[TrainRow]) -> Table:
    columns = ("method", "base passes", "steps per second", "peak memory, MB", "parameters trained")
    cells = []
    for row in rows:
        peak = "" if row.megabytes is None else f"{row.megabytes:,.0f}"
        cells.append((row.name, f"{row.step:.2f}", f"{row.steps_per_second:.2f}", peak, f"{row.trained:,}"))
    return make_table(columns, cells, f"{title}: one training step")


def draw_growth(path: Path, results: Mapping[str, Sequence[TrainRow]]) -> Path:
    """Plots a step's cost over the number of runs in one pass: a panel per model, a line per fork and source."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 3.8), layout="constrained")
    for axes, (model, rows) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        lines: dict[tuple[int, bool], list[TrainRow]] = {}
        for row in rows:
            if row.name.startswith("memory,"):
                lines.setdefault((row.fork, row.cached), []).append(row)
        for (fork, cached), some in lines.items():
            label = f"from layer {fork}" + (", from cache" if cached else "")
            axes.plot([row.runs for row in some], [row.step for row in some], "o--" if cached else "o-", label=label)
        for name, shade in (("lora", "#b06000"), ("full", "#b3261e")):
            for row in rows:
                if row.name == name:
                    axes.axhline(row.step, color=shade, linewidth=1, linestyle=":")
                    axes.annotate(f"one {name} run", (1, row.step), color=shade, va="bottom", fontsize=8)
        top = 1.25 * max((row.step for row in rows), default=1.0)  # space for the legend above the lines
        axes.set(title=model, xlabel="runs in one pass", ylabel="base passes per step", ylim=(0, top))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    save_figure(figure, path)
    return path
