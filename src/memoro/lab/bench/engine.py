"""`memoro lab bench engine`: the cost of many tasks relative to one plain pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from memoro.backbones import Backbone
from memoro.clock import best_times
from memoro.console import make_table
from memoro.engine.composition import compose
from memoro.engine.forward import ReadOutBank
from memoro.lab.bench.dense import DenseMask
from memoro.lab.bench.models import CLASSES
from memoro.tasks.familiarity import FamiliarityBank, Others, fit_familiarity
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import new_task


@dataclass(frozen=True)
class EngineRow:
    """One measurement. All costs are in plain base passes."""

    tasks: int
    fork: int
    engine: float
    limit: float
    """What the extra tokens would cost at the base's own price per token."""
    dense: float | None
    """One sequence with a dense mask (fork 0 only, without low-rank weights)."""
    separate: float
    """One pass per task, extrapolated from one."""
    familiarity: float
    """What it adds to judge how familiar the images are to all tasks; it is not part of `engine`."""
    readouts: float
    """What a read-out of each task adds, pooling included; it is not part of `engine`."""


def bench_engine(
    backbone: Backbone,
    *,
    counts: Sequence[int] = (1, 10, 50, 100),
    forks: Sequence[int] = (0, 8),
    cells: int = 5,
    rank: int = 0,
    batch: int = 8,
    rounds: int = 5,
    tick: Callable[[], None] = lambda: None,
) -> list[EngineRow]:
    """Times base pass, engine and dense mask side by side."""
    height, width = backbone.image_size
    pixels = torch.randn(batch, backbone.channels, height, width).to(backbone.device, backbone.dtype)
    rows, columns = backbone.anatomy.patch
    grid = (height // rows, width // columns)
    tokens = backbone.anatomy.prefix + grid[0] * grid[1]
    labels = [str(i) for i in range(CLASSES)]
    # All tasks have the same description: its values do not matter.
    anatomy, reads = backbone.anatomy, ReadOut.of(backbone.anatomy)
    layers = backbone.depth - reads.from_layer
    seen = torch.randn(1000, layers, reads.statistics, backbone.dim)
    described = fit_familiarity(seen, torch.arange(1000) % CLASSES, Others.of(seen[:100]))
    assert described is not None
    hidden = torch.randn(batch, tokens, backbone.dim).to(backbone.device, backbone.dtype)
    read = [new_task(backbone, f"task {i}", labels, cells=0, from_layer=backbone.depth) for i in range(max(counts))]
    for task in read:
        task.attach_readout(reads, torch.randn(CLASSES, layers * reads.statistics * backbone.dim), torch.zeros(CLASSES))

    def pool() -> Tensor:
        return torch.stack([anatomy.pool(hidden) for _ in range(layers)], dim=1)

    with torch.no_grad():
        candidates: dict[str, Callable[[], object]] = {"base": lambda: backbone.original(pixels)}
        for count in counts:
            bank = FamiliarityBank([described] * count, backbone.device)
            own = ReadOutBank(read[:count])
            pooled = pool()
            candidates[f"familiarity {count}"] = lambda bank=bank, pooled=pooled: bank.judge(pooled)  # type: ignore[misc]
            candidates[f"readouts {count}"] = lambda own=own, count=count: own.answer(pool(), range(count))  # type: ignore[misc]
        for fork in forks:
            for count in sorted({1, *counts}):
                sizes: dict[str, Any] = {"cells": cells, "rank": rank, "from_layer": fork}
                tasks = [new_task(backbone, f"task {i}", labels, **sizes) for i in range(count)]
                model = compose(backbone, tasks)
                candidates[f"engine {fork} {count}"] = lambda model=model: model(pixels)  # type: ignore[misc]
                if fork == 0 and not rank:
                    dense = DenseMask(backbone, tasks, grid)
                    candidates[f"dense {count}"] = lambda dense=dense: dense(pixels)  # type: ignore[misc]
        best = best_times(candidates, rounds, tick)
    base = best["base"]
    return [
        EngineRow(
            tasks=count,
            fork=fork,
            engine=best[f"engine {fork} {count}"] / base,
            limit=1 + count * (backbone.depth - fork) / backbone.depth / tokens,
            dense=best[f"dense {count}"] / base if fork == 0 and not rank else None,
            separate=count * best[f"engine {fork} 1"] / base,
            familiarity=best[f"familiarity {count}"] / base,
            readouts=best[f"readouts {count}"] / base,
        )
        for fork in forks
        for count in counts
    ]


def candidate_count(counts: Sequence[int], forks: Sequence[int], rank: int = 0) -> int:
    """The number of candidates that `bench_engine` times, for a progress bar."""
    return 1 + 2 * len({*counts}) + len({1, *counts}) * (len(forks) + (0 in forks and not rank))


def engine_table(title: str, rows: Sequence[EngineRow]) -> Table:
    columns = (
        "tasks",
        "fork",
        "memoro",
        "arithmetic limit",
        "dense mask",
        "separate passes",
        "familiarity",
        "read-outs",
    )
    cells = []
    for row in rows:
        costs = (row.engine, row.limit, row.dense, row.separate)
        shown = ("" if cost is None else f"{cost:.2f}" for cost in costs)
        cells.append([str(row.tasks), str(row.fork), *shown, f"{row.familiarity:.4f}", f"{row.readouts:.4f}"])
    return make_table(columns, cells, f"{title}: cost of one pass, in plain base passes", left=0)
