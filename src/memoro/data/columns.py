"""The columns of a table: which holds the images, which the labels, of what kind these are, and what they say."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memoro.data.dataset import DataOptions, Skipped, SplitName
from memoro.data.source import Source
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
    """The images of one split: what their source calls them, and an annotation for each."""

    source: Source
    rows: Sequence[Any]
    annotations: Sequence[Annotation]


@dataclass(frozen=True)
class RawDataset:
    """What a folder, archive or table holds, before images are checked, labels numbered and splits completed."""

    kind: HeadKind
    splits: dict[SplitName, RawSplit]
    labels: tuple[str, ...] | None = None
    """Their names in order, if the source fixes them."""
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
    """Labels sorted by name, or by number if all are whole numbers."""
    if all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def left_out(count: int, what: str, where: str = "") -> str:
    """`1 image was left out`, `3 images were left out`."""
    return f"1 {what}{where} was left out" if count == 1 else f"{count} {what}s{where} were left out"


def first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def as_numbers(cells: Sequence[Any]) -> list[float] | None:
    """The cells as finite numbers, without empty ones; None if one is something else, or none is left."""
    present = [cell for cell in cells if not _missing(cell)]
    if any(isinstance(cell, bool) for cell in present):
        return None
    try:
        numbers = [float(cell) for cell in present]
    except (TypeError, ValueError):
        return None
    return numbers if numbers and all(map(math.isfinite, numbers)) else None


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


# ------------------------------------------------------------------------------------------------------------ columns

INDICATORS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
"""Cells of a column that says whether an image has the label that the column is named after."""
IMAGE_COLUMNS = ("image", "img", "path", "file", "file_name", "filename", "image_path", "filepath")
PATH_COLUMNS = ("path", *IMAGE_COLUMNS)


@dataclass(frozen=True)
class Columns:
    """The columns to read. `labels` are the names that the table fixes, or for regression its columns' names."""

    image: str
    values: tuple[str, ...]
    kind: HeadKind
    labels: tuple[str, ...] | None = None

    def cells(self, table: Mapping[str, Sequence[Any]]) -> list[Any]:
        """The cells to parse: class numbers replaced by their names, unknown ones by None."""
        if len(self.values) > 1:
            return list(zip(*(table[column] for column in self.values), strict=True))
        cells, names = table[self.values[0]], self.labels
        if self.kind == "regression" and any(isinstance(cell, (list, np.ndarray)) and len(cell) != 1 for cell in cells):
            raise DataError(
                f"column {self.values[0]!r} has lists of numbers: make a column of each number, and name them all with "
                "`label_column`."
            )
        if names is None or self.kind == "regression":
            return list(cells)

        def name(number: Any) -> str | None:
            return names[number] if isinstance(number, int) and 0 <= number < len(names) else None

        if self.kind == "multilabel":
            return [[name(number) for number in (cell if isinstance(cell, Sequence) else [cell])] for cell in cells]
        return [name(cell) for cell in cells]


def settle_columns(
    features: Mapping[str, Any],
    read: Callable[[Columns], Mapping[str, Sequence[Any]]],
    options: DataOptions,
    name: str,
    image_columns: Sequence[str] = IMAGE_COLUMNS,
) -> tuple[Columns, list[Any], list[str]]:
    """The columns to read, their cells, which `read` gives, and notes on what was chosen."""
    columns = choose_columns(features, options, name, image_columns)
    cells = columns.cells(read(columns))
    columns, notes = recognise_numbers(columns, cells, options)
    return columns, cells, [*note_column(columns, features, options), *notes]


def annotate(
    columns: Columns, cells: Sequence[Any], name: str, where: Callable[[int], str]
) -> tuple[dict[int, Annotation], list[str]]:
    """The annotations of the rows that have one, by number, and a note on the others."""
    parts = (cell if isinstance(cell, tuple) else (cell,) for cell in cells)  # several numbers are a tuple
    # An image without any of several labels has one: none of them.
    rows = [row for row, part in enumerate(parts) if columns.kind == "multilabel" or not any(map(_missing, part))]
    found = parse([cells[row] for row in rows], columns.kind, lambda at: where(rows[at]))
    count = len(cells) - len(rows)
    have = "it has" if count == 1 else "they have"
    return dict(zip(rows, found, strict=True)), [
        f"{name}: {left_out(count, 'image')}: {have} no label."
    ] if count else []


def choose_columns(
    features: Mapping[str, Any], options: DataOptions, name: str, image_columns: Sequence[str] = IMAGE_COLUMNS
) -> Columns:
    """The columns of a table, by the types of its features (None if it has none) first and by their names second."""
    asked, kind = options.label_column, options.kind
    if asked is None and kind == "regression" and options.labels and set(options.labels) <= set(features):
        asked = options.labels[0] if len(options.labels) == 1 else options.labels  # what a task was trained on
    image = find_image_column(features, options.image_column, name, image_columns)
    if asked is None and options.task in features and options.task != image:
        asked = options.task
    classes = [column for column, feature in features.items() if _kind_of_feature(feature)[1] is not None]
    if asked is None and len(classes) == 1:
        asked = classes[0]
    present = [column for column in features if column != image]
    if asked is not None and not isinstance(asked, str):
        if kind not in {None, "regression"}:
            raise DataError(f"{name}: several label columns need `kind='number'`: they are numbers to predict.")
        values = tuple(_find_column(present, column, (), "label_column", name) for column in asked)
        if options.labels is not None and len(values) > 1:
            if sorted(options.labels) != sorted(values):
                raise DataError(
                    f"{name}: the label columns are {', '.join(values)}, but the task predicts "
                    f"{', '.join(options.labels)}. Rename the columns to match."
                )
            values = tuple(options.labels)
        return Columns(image, values, "regression", values)
    # `label` and `labels` are mixed up too often to insist on one of them, once the kind is known.
    usual = sorted(KIND_OF_COLUMN, key=lambda column: kind not in {None, KIND_OF_COLUMN[column]})
    value = _find_column(present, asked, usual, "label_column", name)
    by_type, names = _kind_of_feature(features[value])
    if by_type == "multilabel" and kind == "softmax":
        raise DataError(f"{name}: the column {value!r} has several labels per image: use `kind='labels'`.")
    kind = kind or by_type or KIND_OF_COLUMN.get(value.lower(), "softmax")
    return Columns(image, (value,), kind, (value,) if kind == "regression" else names)


def find_image_column(
    features: Mapping[str, Any], asked: str | None, name: str, usual: Sequence[str] = IMAGE_COLUMNS
) -> str:
    """The column with the images: the one asked for, the only one of that type, or the first of the usual names."""
    pictures = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    if asked is None and len(pictures) == 1:
        asked = pictures[0]
    return _find_column(list(features), asked, usual, "image_column", name)


def join_indicators(
    table: Mapping[str, Sequence[Any]], options: DataOptions, name: str, image_columns: Sequence[str] = IMAGE_COLUMNS
) -> tuple[Mapping[str, Sequence[Any]], list[str]]:
    """The table with one column of labels instead of columns of 0 and 1, if no other column can hold the labels; and
    a note. If every row has exactly one 1, the labels are classes, unless `kind` says otherwise."""
    named = any(column.lower() in KIND_OF_COLUMN for column in table)
    if named or options.label_column is not None or options.kind == "regression" or options.task in table:
        return table, []
    image = find_image_column(table, options.image_column, name, image_columns)
    kept = {column: cells for column, cells in table.items() if column == image or column.lower() == "split"}
    flags = {
        column: [INDICATORS.get(str(cell).strip().lower()) for cell in cells]
        for column, cells in table.items()
        if column not in kept
    }
    flags = {column: own for column, own in flags.items() if None not in own}
    rows = [[column for column in flags if flags[column][row]] for row in range(len(table[image]))]
    if len(flags) < 2 or not rows:
        return table, []
    one_each = all(len(row) == 1 for row in rows)
    kind = options.kind or ("softmax" if one_each else "multilabel")
    what = f"columns {first_few(list(map(repr, flags)))} hold 0 and 1"
    if kind == "multilabel":
        return {**kept, "labels": rows}, [f"{what}: used as the labels of a multi-label task."]
    if not one_each:
        return table, []
    more = "" if options.kind else "; if an image may have several of them, use `kind='labels'`"
    return {**kept, "label": [label for [label] in rows]}, [f"{what}, one 1 per row: used as classes{more}."]


def note_column(columns: Columns, features: Iterable[str], options: DataOptions) -> list[str]:
    """A note on which column the labels are from, if others could have been meant."""
    used = {columns.image, *columns.values}
    others = [name for name in features if name not in used and name.lower() not in {"split", "id", ""}]
    if options.label_column is not None or options.labels is not None or not others:
        return []
    return [f"the labels are those of column {columns.values[0]!r}; for another one, use `label_column`."]


def recognise_numbers(columns: Columns, cells: Sequence[Any], options: DataOptions) -> tuple[Columns, list[str]]:
    """The columns, as a regression if nobody named the kind and the cells look like measurements; and a note."""
    column, (rows, distinct) = columns.values[0], (len(cells), len(set(map(str, cells))))
    if options.kind is not None or len(columns.values) > 1:
        return columns, []
    if columns.kind == "regression":
        why = "its values are decimal numbers"
    else:
        if columns.kind != "softmax" or columns.labels is not None:
            return columns, []
        numbers = as_numbers(cells)
        if numbers is None:
            _refuse_mixture(column, cells)
            return columns, []
        if not all(number.is_integer() for number in numbers):
            why = "its values are not all whole"
        elif column.lower() in KIND_OF_COLUMN:
            return columns, []
        elif rows < 2 * distinct:
            why = f"it has {distinct} different values in {rows} rows"
        else:
            how = "for numbers to be predicted, use `kind='number'`"
            return columns, [f"column {column!r} has whole numbers: treated as {distinct} classes; {how}."]
        columns = replace(columns, kind="regression", labels=(column,))
    if KIND_OF_COLUMN.get(column.lower()) == "regression":
        return columns, []
    return columns, [f"column {column!r} is treated as numbers, because {why}; for classes, use `kind='class'`."]


def _refuse_mixture(column: str, cells: Sequence[Any]) -> None:
    """Raises if nearly all cells are measurements, and others, such as `unknown`, would make a class of each."""
    numbers = [one for cell in cells for one in as_numbers([cell]) or ()]
    others = [cell for cell in cells if isinstance(cell, str) and cell.strip() and as_numbers([cell]) is None]
    if others and len(numbers) >= 9 * len(others) and not all(number.is_integer() for number in numbers):
        raise DataError(
            f"column {column!r} mixes numbers and text ({others[0]!r}, {len(others)} of {len(cells)} rows). Empty "
            "these cells to skip their rows, or use `kind='class'` if the values are classes."
        )


def check_numbers(own: Sequence[str], labels: Sequence[str], name: str) -> list[str]:
    """A note if the only column of numbers has another name than its label; an error unless each label has one."""
    if len(own) != len(labels):
        raise DataError(f"{name}: {len(own)} numbers per image ({', '.join(own)}), but {len(labels)} were asked for.")
    return [] if tuple(own) == tuple(labels) else [f"the numbers of column {own[0]!r} are used as {labels[0]!r}."]


def require_column(present: Sequence[str], asked: str, name: str) -> str:
    """The column asked for, if it is there."""
    if asked not in present:
        raise DataError(f"{name}: no column {asked!r}; it has {', '.join(map(repr, present))}.")
    return asked


def _find_column(present: Sequence[str], asked: str | None, usual: Sequence[str], argument: str, name: str) -> str:
    """The column asked for, or the first of the usual names (whatever their case), or an error that lists them all."""
    if asked is not None:
        return require_column(present, asked, name)
    lower = {column.lower(): column for column in reversed(present)}
    for candidate in usual:
        if candidate in lower:
            return lower[candidate]
    what = "label" if argument == "label_column" else "image's path" if usual[0] == "path" else "image"
    raise DataError(
        f"{name}: no column for the {what} (columns: {', '.join(map(repr, present)) or 'none'}). Rename one to "
        f"{usual[0]!r}, or name it with {argument}."
    )


def _kind_of_feature(feature: Any) -> tuple[HeadKind | None, tuple[str, ...] | None]:
    """The kind of head and the labels that a feature of `datasets`, or a cell of a table without types, tells."""
    inner: Any = getattr(feature, "feature", None)
    kind, inner_kind = type(feature).__name__, type(inner).__name__
    if kind == "ClassLabel":
        return "softmax", tuple(feature.names)
    if inner_kind == "ClassLabel":
        return "multilabel", tuple(inner.names)
    if inner_kind == "Value":
        return ("regression" if inner.dtype.startswith("float") else "multilabel"), None
    if kind == "float" or (kind == "Value" and feature.dtype.startswith(("float", "decimal"))):
        return "regression", None
    return ("multilabel" if kind == "list" else None), None
