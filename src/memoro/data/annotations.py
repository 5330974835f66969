"""What a source says about its images: splits before any label is numbered, and annotations as they are written."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memoro.data.dataset import Skipped, Source, SplitName
from memoro.errors import DataError
from memoro.heads import HeadKind

Annotation = str | tuple[str, ...] | tuple[float, ...]
"""A class, several labels, or numbers."""

SPLIT_NAMES: dict[str, SplitName] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}

LARGEST_NUMBER = float(np.finfo(np.float32).max)

# A column of one of these names holds what its name says.
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


@dataclass(frozen=True)
class RawSplit:
    """The images of one split as their source lists them: row numbers in it, and an annotation for each."""

    source: Source
    rows: Sequence[int]
    annotations: Sequence[Annotation]


@dataclass(frozen=True)
class RawDataset:
    """What a folder, archive or table holds, before images are checked, labels numbered and splits completed."""

    kind: HeadKind
    splits: dict[SplitName, RawSplit]
    labels: tuple[str, ...] | None = None
    """Their names in order, where the source fixes them."""
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def split_name(text: str) -> SplitName | None:
    """The split that a name stands for; `train[:10%]` is a part of train."""
    return SPLIT_NAMES.get(text.split("[")[0].strip().lower())


def parse(cells: Sequence[Any], kind: HeadKind, where: Callable[[int], str]) -> list[Annotation]:
    """The annotation of each cell: a class name, a tuple of labels (text is split at | and ;, or at commas where it has
    neither), or finite numbers."""
    if kind == "regression":
        return [_numbers(cell, where(at)) for at, cell in enumerate(cells)]
    if kind == "multilabel":
        separators = "[|;]" if any(isinstance(cell, str) and re.search("[|;]", cell) for cell in cells) else ","
        return [_labels(cell, separators) for cell in cells]
    return [_text(cell) for cell in cells]


def encode(annotations: Sequence[Annotation], labels: Sequence[str], kind: HeadKind) -> Tensor:
    """Class numbers (n,) for softmax, 0/1 rows for multilabel, the numbers themselves for regression."""
    if kind == "regression":
        numbers = torch.tensor(list(annotations), dtype=torch.float32, device="cpu")
        return numbers.reshape(len(annotations), len(labels))
    number = {label: at for at, label in enumerate(labels)}
    if kind == "softmax":
        return torch.tensor([number[str(name)] for name in annotations], dtype=torch.long, device="cpu")
    rows = np.zeros((len(annotations), len(labels)), dtype=np.float32)
    for at, names in enumerate(annotations):
        rows[at, [number[str(name)] for name in names]] = 1.0
    return torch.from_numpy(rows)


def labels_in(annotations: Iterable[Annotation]) -> set[str]:
    """All labels that occur; none in numbers."""
    each = (name for one in annotations for name in ((one,) if isinstance(one, str) else one))
    return {name for name in each if isinstance(name, str)}


def sort_labels(names: set[str]) -> tuple[str, ...]:
    """Labels sorted by name, or by number where all are whole numbers."""
    if all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def left_out(count: int, what: str, where: str = "") -> str:
    """`1 image was left out`, `3 images were left out`."""
    return f"1 {what}{where} was left out" if count == 1 else f"{count} {what}s{where} were left out"


def first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def as_numbers(cells: Sequence[Any]) -> list[float] | None:
    """The cells as finite numbers, without empty ones; None where one is something else, or none is left."""
    present = [cell for cell in cells if not _missing(cell)]
    if any(isinstance(cell, bool) for cell in present):
        return None
    try:
        numbers = [float(cell) for cell in present]
    except (TypeError, ValueError):
        return None
    return numbers if numbers and all(map(math.isfinite, numbers)) else None


def labelled_rows(cells: Sequence[Any], kind: HeadKind) -> list[int]:
    """The rows that have a label. An image without any of several labels has one: none of them."""
    if kind == "multilabel":
        return list(range(len(cells)))
    rows = (cell if isinstance(cell, tuple) else (cell,) for cell in cells)  # several numbers are a tuple
    return [row for row, parts in enumerate(rows) if not any(map(_missing, parts))]


def note_unlabelled(count: int, name: str) -> str:
    """The note on rows that have none."""
    return f"{name}: {left_out(count, 'image')}: {'it has' if count == 1 else 'they have'} no label."


def _missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell)) or not str(cell).strip()


def _text(cell: Any) -> str:
    return unicodedata.normalize("NFC", str(cell)).strip()


def _labels(cell: Any, separators: str) -> tuple[str, ...]:
    if isinstance(cell, str) and re.fullmatch(r"\s*\[.*\]\s*", cell, re.DOTALL):  # a list, as pandas and JSON write it
        quoted = re.findall(r"""(['"])(.*?)\1""", cell)
        cell = [label for _, label in quoted] if quoted else cell
    if not isinstance(cell, (list, tuple, np.ndarray)):
        cell = [] if _missing(cell) else re.split(separators, str(cell))
    return tuple(_text(item) for item in cell if not _missing(item))


def _numbers(cell: Any, where: str) -> tuple[float, ...]:
    items = cell if isinstance(cell, (list, tuple, np.ndarray)) else [cell]
    try:
        numbers = tuple(float(item) for item in items)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {cell!r} is not a number; `kind='number'` needs one in every row.") from None
    if not all(abs(number) <= LARGEST_NUMBER for number in numbers):  # false for NaN
        raise DataError(f"{where}: {cell!r} is not a finite number of float32; correct it, or remove the row.")
    return numbers
