"""Which columns of a table hold the images and what they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memoro.data.values import KIND_OF_COLUMN
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.task import HeadKind

IMAGE_COLUMNS = ("image", "img", "path", "file", "file_name", "filename", "image_path", "filepath")


@dataclass(frozen=True)
class Columns:
    """The columns to read. `labels` are the names that the table fixes, or for regression its columns' names."""

    image: str
    values: tuple[str, ...]
    kind: HeadKind
    labels: tuple[str, ...] | None = None


def choose_column(
    present: Sequence[str], asked: str | None, usual: Sequence[str], what: str, argument: str, name: str
) -> str:
    """The column asked for, or the first of the usual names (whatever their case), or an error that lists them all."""
    if asked is not None:
        if asked not in present:
            raise DataError(f"{name}: no column {asked!r}; it has {', '.join(map(repr, present))}.")
        return asked
    lower = {column.lower(): column for column in reversed(present)}
    for candidate in usual:
        if candidate in lower:
            return lower[candidate]
    raise DataError(
        f"{name}: no column for the {what} among {', '.join(map(repr, present)) or 'none at all'}; "
        f"call it {usual[0]!r}, or say which one with {argument}."
    )


def choose_values(
    present: Sequence[str], asked: str | Sequence[str] | None, kind: HeadKind | None, name: str
) -> tuple[str, ...]:
    """The columns of what the images show: one, or several numbers for a regression."""
    if asked is not None and not isinstance(asked, str):
        if kind not in {None, "regression"}:
            raise DataError(f"{name}: several label columns make sense for a regression only, not for {kind}.")
        return tuple(choose_column(present, column, (), "label", "label_column", name) for column in asked)
    usual = [column for column in KIND_OF_COLUMN if kind in {None, KIND_OF_COLUMN[column]}]
    # `label` and `labels` are mixed up too often to insist, once the kind is known.
    usual += [column for column in KIND_OF_COLUMN if column not in usual]
    return (choose_column(present, asked, usual, "label", "label_column", name),)


def kind_of_feature(feature: Any) -> tuple[HeadKind | None, tuple[str, ...] | None]:
    """What a `datasets` feature says about its column: the kind of task, and the labels' names."""
    import datasets

    inner = getattr(feature, "feature", None)
    if isinstance(feature, datasets.ClassLabel):
        return "softmax", tuple(feature.names)
    if isinstance(inner, datasets.ClassLabel):
        return "multilabel", tuple(inner.names)
    if isinstance(inner, datasets.Value):
        return ("regression" if inner.dtype.startswith("float") else "multilabel"), None
    if isinstance(feature, datasets.Value) and feature.dtype.startswith(("float", "decimal")):
        return "regression", None
    return None, None


def choose(
    features: Any,
    *,
    kind: HeadKind | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    name: str,
) -> Columns:
    """The columns of a `datasets` table, by their types first and by their names second."""
    import datasets

    pictures = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    image = image_column
    if image is None and len(pictures) == 1:
        image = pictures[0]
    image = choose_column(list(features), image, IMAGE_COLUMNS, "image", "image_column", name)
    classes = [column for column, feature in features.items() if kind_of_feature(feature)[1] is not None]
    asked = label_column
    if asked is None and len(classes) == 1:
        asked = classes[0]
    values = choose_values([column for column in features if column != image], asked, kind, name)
    by_type, names = kind_of_feature(features[values[0]])
    if by_type == "multilabel" and kind == "softmax":
        raise DataError(f"{name}: the column {values[0]!r} has several labels per image: that is kind 'multilabel'.")
    found = "regression" if len(values) > 1 else kind or by_type or KIND_OF_COLUMN.get(values[0].lower(), "softmax")
    if found == "regression":
        names = values
    return Columns(image, values, found, names)
