"""From the words of a command to an order: tables, sets, backbones and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memoro.errors import DataError, need
from memoro.lab.reproduce.plan import SCALES, TABLES, Request, Scale
from memoro.lab.reproduce.run import Order
from memoro.lab.reproduce.runner import MOST_PIXELS, Runner, find_sets, name_backbone
from memoro.training import Cache, TrainOptions


def make_order(
    table: str,
    scale_name: str,
    data: Sequence[str],
    backbones: Sequence[str],
    out: Path | None,
    *,
    command: str,
    image_size: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    methods: Sequence[str] = (),
    changes: Mapping[str, Any] = {},
) -> tuple[Order, Runner]:
    """What to run and what with. `changes` are fields of `Budget`: epochs of masked regimes, steps of the others."""
    need("accelerate", "matplotlib", "datasets")
    scale = _changed(SCALES[scale_name], changes)
    sets = find_sets(data) if data else {name: name for name in scale.sets} if scale.name == "paper" else {}
    if not sets and table != "table5":
        raise DataError(
            "--scale cpu needs sets of images: --data FOLDER or --data SET.zip, each with train/ and test/."
        )
    sources = {name_backbone(source): source for source in backbones or scale.backbones}
    known = [name for name in scale.sets if name in sets]
    request = Request(scale, (*known, *(name for name in sets if name not in known)), tuple(sources))
    folder = out or Path("results") / scale.name
    # Kept features serve every job of a set. At the paper's scale every epoch has new views, so nothing is kept.
    small = scale.name == "cpu"
    options = TrainOptions(cache=Cache() if small else False, folder=folder / "runs", workers=workers, quiet=True)
    runner = Runner(sets, sources, options, image_size, MOST_PIXELS if small else None, device)
    tables = tuple(TABLES) if table == "all" else (table,)
    return Order(tables, request, folder, command, frozenset(methods)), runner


def _changed(scale: Scale, changes: Mapping[str, Any]) -> Scale:
    masked = {name: value for name, value in changes.items() if name != "steps" or scale.masked.steps is not None}
    unmasked = {name: value for name, value in changes.items() if name != "epochs"}
    return replace(scale, masked=replace(scale.masked, **masked), unmasked=replace(scale.unmasked, **unmasked))
