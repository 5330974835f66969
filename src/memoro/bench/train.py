"""`memoro bench train`: what a training step costs beside one plain pass, and what else users would run."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memoro.bench.clock import best_times
from memoro.bench.steps import Method, Setting, build_step


@dataclass(frozen=True)
class TrainRow:
    """One way to train, one step of it."""

    name: str
    runs: int
    fork: int
    cached: bool
    step: float
    """In plain base passes without gradients."""
    steps_per_second: float
    megabytes: float | None
    """Peak memory above that of holding the model."""
    trained: int
    """Parameters that learn, in one run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_train(
    setting: Setting,
    ways: Sequence[Method],
    *,
    rounds: int = 5,
    memory: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> list[TrainRow]:
    """Times all ways in this process, a few at a time with the base pass beside them.

    Their peak memory is taken in a process of its own each. The first way is the base pass. `tick` is called
    `tick_count` times.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base, _ = build_step(setting, ways[0], Path(folder))
        for way in ways:
            step, trained = build_step(setting, way, Path(folder))
            best = best_times({"base": base, "step": step}, rounds, tick)
            peak = _measure_peak(setting, way) if memory else None
            rows.append(
                TrainRow(
                    way.name,
                    way.runs,
                    way.fork,
                    way.cached,
                    best["step"] / best["base"],
                    1 / best["step"],
                    peak,
                    trained,
                )
            )
    return rows


def tick_count(ways: Sequence[Method], rounds: int) -> int:
    """How often `bench_train` ticks."""
    return 2 * rounds * len(ways)


def _measure_peak(setting: Setting, way: Method) -> float | None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (setting, way))


def _peak(setting: Setting, way: Method) -> float | None:
    """Megabytes by which two steps raise the memory use of a fresh process over that of the built model (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        step, _ = build_step(setting, way, Path(folder))
        status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
        if not (status.exists() and reset.exists()):
            return None
        # Resets the high-water mark, which a new process inherits from its parent.
        reset.write_text("5")
        before = _kilobytes(status, "VmRSS")
        for _ in range(2):
            step()
        return (_kilobytes(status, "VmHWM") - before) / 1000


def _kilobytes(status: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{field}:"))


def bench_loader(workers: Sequence[int] = (0, 1, 2), count: int = 384, side: int = 224) -> dict[str, float]:
    """Images per second that the loader decodes, augments and normalises: JPEGs of 500 x 375 pixels to `side`."""
    import numpy as np
    from PIL import Image

    from memoro.data import Augment, Loader, load_data
    from memoro.images import Preprocessing

    generator = np.random.default_rng(0)
    speeds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            small = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            small.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            path = Path(folder) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(buffer.getvalue())
        images = load_data(folder, val_fraction=0, screen=False, quiet=True).train
        assert images is not None
        for number in workers:
            loader = Loader(
                images,
                Preprocessing(resize=(side, side)),
                batch_size=32,
                augment=Augment(),
                shuffle=True,
                workers=number,
            )
            for _ in loader.epoch(0):  # starts the processes
                pass
            start = time.perf_counter()
            done = sum(len(batch.targets) for batch in loader.epoch(1))
            speeds[f"{number} workers"] = done / (time.perf_counter() - start)
            loader.close()
    return speeds


def draw_growth(path: Path, results: Mapping[str, Sequence[TrainRow]]) -> Path:
    """A step's cost over the number of runs in one pass: a panel for each model, a line for each fork and source."""
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
        top = 1.25 * max((row.step for row in rows), default=1.0)  # the legend stands above the lines
        axes.set(title=model, xlabel="runs in one pass", ylabel="base passes a step", ylim=(0, top))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    figure.savefig(path, dpi=120)
    return path
