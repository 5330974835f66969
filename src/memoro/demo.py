"""`memoro demo`: the real engine on a real architecture, exactness and cost shown."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from memoro.backbones import load_backbone
from memoro.bench.engine import bench_engine, candidate_count, random_vit
from memoro.composition import compose
from memoro.progress import bar
from memoro.task import Task, new_task


def run_demo(console: Console) -> None:
    """Attaches tasks to a ViT-S/16 with random weights; prints receipts and costs."""
    torch.manual_seed(0)
    backbone = load_backbone(random_vit(16, dim=384, heads=6))
    console.print(f"[bold]A ViT-S/16[/] with random weights: {backbone.depth} layers of {backbone.dim}.\n")
    labels = [f"class {i}" for i in range(10)]
    tasks = [_as_if_trained(new_task(backbone, f"task {i}", labels, cells=5, seed=i)) for i in range(100)]
    pixels = torch.randn(4, 3, 224, 224)
    table = Table(title="Is the backbone's own answer still the same?", title_justify="left")
    for column in ("tasks attached", "base against the original model", "largest change of a task by its neighbours"):
        table.add_column(column, justify="right")
    for count in (0, 1, 10):
        receipt = compose(backbone, tasks[:count]).verify(pixels)
        worst = max(receipt.tasks.values(), default=0.0)
        same = "equal to the bit" if receipt.base_equal else f"[red]differs by {receipt.base_difference:.2g}[/]"
        table.add_row(str(count), same, f"{worst:.1e}" if count else "")
    with torch.no_grad():
        equal = torch.equal(compose(backbone, tasks)(pixels)["base"], backbone.original(pixels))
    table.add_row(str(len(tasks)), "equal to the bit" if equal else "[red]differs[/]", "")
    console.print(table)

    counts, forks = (1, 10, 100), (0, 8)
    with bar("measuring", 3 * candidate_count(counts, forks)) as tick:
        rows = bench_engine(backbone, counts=counts, forks=forks, batch=4, rounds=3, tick=tick)
    cost = Table(title="What do tasks cost, in plain passes of the backbone?", title_justify="left")
    for column in ("tasks", "one pass of memoro", "… forked at layer 8", "dense mask", "a pass for each"):
        cost.add_column(column, justify="right")
    for count in counts:
        full, late = (next(row for row in rows if (row.tasks, row.fork) == (count, fork)) for fork in forks)
        cost.add_row(
            str(count), f"{full.engine:.2f}", f"{late.engine:.2f}", f"{full.dense:.2f}", f"{full.separate:.1f}"
        )
    console.print(cost)


def _as_if_trained(task: Task) -> Task:
    """Far from its neutral start, so that equality means something."""
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return task
