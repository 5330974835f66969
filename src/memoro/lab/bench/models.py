"""What the benchmarks share: models and tasks with random weights, timing, and tables.

Speed does not depend on the values of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from memoro.backbones import Backbone
from memoro.clock import best_times
from memoro.console import bar, format_bytes, make_table
from memoro.tasks.task import Task, new_task

LABELS = [str(number) for number in range(10)]
Row = dict[str, Any]
"""A measurement, as it is printed with `--json`."""


def random_vit(patch: int) -> Any:
    """ViT-B with a classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=len(LABELS))).eval()


def random_dinov2_small() -> Any:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(hidden_size=384, num_attention_heads=6, image_size=518)
    return Dinov2WithRegistersModel(config).eval()


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "ViT-B/32": (partial(random_vit, 32), 224),
    "ViT-B/16": (partial(random_vit, 16), 224),
    "dinov2-small": (random_dinov2_small, 112),
}
"""By name: how to build the model, and the image size."""


def new_tasks(backbone: Backbone, count: int, **sizes: Any) -> list[Task]:
    """Untrained tasks of ten classes."""
    return [new_task(backbone, f"task {number}", LABELS, **sizes) for number in range(count)]


def time_candidates(
    title: str,
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    quiet: bool,
    seconds: float = math.inf,
) -> dict[str, float]:
    """`best_times` with a progress bar."""
    with bar(title, rounds * len(candidates), quiet=quiet) as tick:
        return best_times(candidates, rounds, tick, seconds=seconds)


def rows_table(title: str, rows: Sequence[Row], *, sideways: bool = False) -> Table:
    """A column for each value of the rows that is no list and that a name does not say; `sideways`: a line for each."""
    left_out = {"runs", "fork", "cached"} if "name" in rows[0] else set()
    names = [name for name, value in rows[0].items() if name not in left_out and not isinstance(value, list)]
    columns = [name.replace("_", " ") for name in names]
    cells = [[_cell(name, row[name]) for name in names] for row in rows]
    if not sideways:
        return make_table(columns, cells, title)
    lines = [list(line) for line in zip(columns, *cells, strict=True)]
    return make_table(lines[0], lines[1:], title)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return format_bytes(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_cell(name, part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
