"""A listing: what a source says it holds, before anything is checked, numbered or split."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from memoro.data.dataset import Skipped, Source
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.heads import HeadKind


Role = Literal["train", "val", "test"]
Value = str | tuple[str, ...] | tuple[float, ...]

# Names under which splits go in the wild.
ROLES: dict[str, Role] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def role_of(split: str) -> Role | None:
    """What a split of this name is for; `train[:10%]` is a part of train."""
    return ROLES.get(split.split("[")[0].strip().lower())


@dataclass(frozen=True)
class Part:
    """The images of one split: their rows in a source, and what each shows (a class, labels, or numbers)."""

    source: Source
    rows: Sequence[int]
    values: Sequence[Value]


@dataclass(frozen=True)
class Listing:
    """All parts of a set. `labels` are the names in order where the source fixes them."""

    kind: HeadKind
    parts: dict[Role, Part]
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def left_out(count: int, what: str, where: str = "") -> str:
    """`1 image was left out`, `3 images were left out`: the beginning of a note."""
    return f"1 {what}{where} was left out" if count == 1 else f"{count} {what}s{where} were left out"


# A column of one of these names is taken for what its name says.
KIND_OF_COLUMN: dict[str, HeadKind] = {
    "label": "softmax",
    "class": "softmax",
    "category": "softmax",
    "fine_label": "softmax",
    "labels": "multilabel",
    "tags": "multilabel",
    "number": "regression",
    "value": "regression",
}
_SEPARATORS = re.compile(r"[|;]")


def parse(cells: Sequence[Any], kind: HeadKind, where: Callable[[int], str]) -> list[Value]:
    """One value per cell: a class name, a tuple of labels (text is cut at | and ;), or a tuple of finite numbers."""
    if kind == "regression":
        return [_numbers(cell, where(at)) for at, cell in enumerate(cells)]
    if kind == "multilabel":
        return [_labels(cell) for cell in cells]
    bad = [at for at, cell in enumerate(cells) if _missing(cell)]
    if bad:
        rows = ", ".join(where(at) for at in bad[:5])
        raise DataError(
            f"{len(bad)} rows have no label ({rows}{', …' if len(bad) > 5 else ''}): fill it in, or drop them."
        )
    return [_text(cell) for cell in cells]


def names_of(values: Sequence[Value]) -> set[str]:
    """All labels that occur."""
    return {
        name for value in values for name in ((value,) if isinstance(value, str) else value) if isinstance(name, str)
    }


def in_order(names: set[str]) -> tuple[str, ...]:
    """Labels sorted by name, or by number where all are whole numbers."""
    if all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def encode(values: Sequence[Value], labels: Sequence[str], kind: HeadKind) -> Tensor:
    """Class numbers (n,) for softmax, 0/1 rows for multilabel, the numbers themselves for regression."""
    number = {label: at for at, label in enumerate(labels)}
    if kind == "softmax":
        return torch.tensor([number[str(value)] for value in values], dtype=torch.long)
    if kind == "regression":
        return torch.tensor(list(values), dtype=torch.float32).reshape(len(values), len(labels))
    rows = np.zeros((len(values), len(labels)), dtype=np.float32)
    for at, value in enumerate(values):
        rows[at, [number[str(name)] for name in value]] = 1.0
    return torch.from_numpy(rows)


def _missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell)) or not str(cell).strip()


def _text(cell: Any) -> str:
    return unicodedata.normalize("NFC", str(cell)).strip()


def _labels(cell: Any) -> tuple[str, ...]:
    if isinstance(cell, (list, tuple, np.ndarray)):
        return tuple(_text(item) for item in cell if not _missing(item))
    return () if _missing(cell) else tuple(_text(item) for item in _SEPARATORS.split(str(cell)) if item.strip())


def _numbers(cell: Any, where: str) -> tuple[float, ...]:
    items = cell if isinstance(cell, (list, tuple, np.ndarray)) else [cell]
    try:
        numbers = tuple(float(item) for item in items)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {cell!r} is not a number; regression needs one in every row.") from None
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{where}: {cell!r} is not a finite number; fill it in, or drop the row.")
    return numbers
