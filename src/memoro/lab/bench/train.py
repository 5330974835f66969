"""`memoro lab bench train`: the cost of a training step of every regime relative to one plain pass."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from memoro.backbones import load_backbone
from memoro.clock import best_times
from memoro.console import bar
from memoro.data import Splits, load_data
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan
from memoro.lab.bench.models import LABELS, MODELS, Row
from memoro.lab.tables.plots import Point, draw_panels
from memoro.training.cached import Cache
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions, find_recipe
from memoro.training.run import Run

RANK = 8
"""The rank of `side`, and of LoRA."""
ONE_RUN = ("lora", "full")
"""Baselines that are drawn as lines: one run, whatever the number of the others."""


@dataclass(frozen=True)
class Candidate:
    """A method to time. `regime` is a regime's name, or `base` for a plain pass without gradients."""

    name: str
    regime: str
    model: str
    """A key of `MODELS`."""
    batch: int
    cells: int
    runs: int = 1
    fork: int = 0
    cached: bool = False


def list_candidates(
    model: str, batch: int, cells: int, runs: Sequence[int], forks: Sequence[int], *, baselines: bool = True
) -> list[Candidate]:
    """The base pass, `head`, `memory` and `side` for all numbers of runs and forks, computed and from the cache, and
    baselines."""
    common = (model, batch, cells)
    found = [Candidate("base", "base", *common), Candidate("head", "head", *common)]
    for cached in (False, True):
        for regime, title in (("memory", f"memory, {cells} cells"), ("side", f"side, rank {RANK}")):
            for fork in forks:
                for count in runs:
                    name = title + (f", fork {fork}" if fork else "")
                    name += (f", {count} runs" if count > 1 else "") + (", from cache" if cached else "")
                    found.append(Candidate(name, regime, *common, runs=count, fork=fork, cached=cached))
    return [*found, *(Candidate(name, name, *common) for name in BASELINES if baselines)]


def build_step(candidate: Candidate, folder: Path) -> tuple[Callable[[], object], int]:
    """A function that takes one step of the training loop on a batch that is always the same, and how many parameters
    a run trains. Images and features are stored in `folder`; decoding is not part of the step."""
    torch.manual_seed(0)
    build, side = MODELS[candidate.model]
    model = build().eval()
    if candidate.regime == "base":
        pixels = torch.randn(candidate.batch, 3, side, side)
        return torch.no_grad()(lambda: model(pixels)), 0
    backbone, regime = load_backbone(model), REGIMES[candidate.regime]
    splits = _save_noise(folder / "images", candidate.batch, side)
    cells, rank = (0, RANK) if candidate.regime == "side" else (candidate.cells, None)
    plan = BaselinePlan("bench", splits.labels, cells=cells, rank=rank, from_layer=candidate.fork)
    recipe = replace(find_recipe(None, regime)[1], steps=1_000_000, batch_size=candidate.batch, views=1)
    tasks = [regime.build(backbone, replace(plan, seed=seed)) for seed in range(candidate.runs)]
    runs = [Run(task, recipe, regime, splits, backbone.preprocessing.at(side)) for task in tasks]
    cache = Cache(folder / "features") if candidate.cached else None
    trainer = Trainer(backbone, runs, TrainOptions(workers=0, quiet=True), cache=cache)
    trainer.fill_cache()
    [group] = trainer.groups
    batches = group.next_batches()
    return lambda: trainer.step([(group, batches)]), sum(one.numel() for one in group.runs[0].trained.values())


def _save_noise(folder: Path, batch: int, side: int) -> Splits:
    """Images of noise, at least as many as a batch has, with every label."""
    generator = np.random.default_rng(0)
    for number in range(-(-batch // len(LABELS)) * len(LABELS)):
        path = folder / LABELS[number % len(LABELS)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    return load_data(folder, val_fraction=0, screen=False, quiet=True)


def bench_train(candidates: Sequence[Candidate], *, rounds: int, memory: bool, quiet: bool = True) -> list[Row]:
    """Times each candidate in this process, alternating with the base pass, which is the first candidate.

    `step`: the cost of one training step in plain base passes without gradients. `megabytes`: its peak memory above
    that of the loaded model, measured in a process of its own. `trained`: trainable parameters of one run.
    """
    rows = []
    title, steps = candidates[0].model, 2 * rounds * len(candidates)
    with tempfile.TemporaryDirectory() as folder, bar(title, steps, quiet=quiet) as tick:
        base, _ = build_step(candidates[0], Path(folder))
        for one in candidates:
            step, trained = build_step(one, Path(folder))
            best = best_times({"base": base, "step": step}, rounds, tick)
            peak = None
            if memory:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    peak = pool.apply(_peak_megabytes, (one,))
            row: Row = {"name": one.name, "runs": one.runs, "fork": one.fork, "cached": one.cached}
            row |= {"step": best["step"] / best["base"], "steps_per_second": 1 / best["step"]}
            rows.append({**row, "megabytes": peak, "trained": trained})
    return rows


def _peak_megabytes(candidate: Candidate) -> float | None:
    """By how much two steps raise the memory use of a new process above that of the built model (Linux)."""
    with tempfile.TemporaryDirectory() as folder:
        step, _ = build_step(candidate, Path(folder))
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


def draw_growth(path: Path, results: Mapping[str, Sequence[Row]]) -> Path:
    """Plots a step's cost over the number of runs in one pass: a panel per model, a line per fork and source."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for model, rows in results.items():
        lines = panels.setdefault(model, {})
        for row in (row for row in rows if row["name"].startswith("memory,")):
            name = f"from layer {row['fork']}" + (", from cache" if row["cached"] else "")
            lines.setdefault(name, []).append((row["runs"], row["step"], 0.0))
        most = max(row["runs"] for row in rows)
        for row in (row for row in rows if row["name"] in ONE_RUN):
            lines[f"one {row['name']} run"] = [(runs, row["step"], 0.0) for runs in (1, most)]
    level = [f"one {name} run" for name in ONE_RUN]
    return draw_panels(path, panels, "runs in one pass", "base passes per step", level=level)
