"""Tables of `datasets`: objects in memory, Arrow files, sets of the hub. Images stay encoded in the table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoro.data.dataset import Skipped, unreadable_size
from memoro.data.folders import Files
from memoro.data.hub import read_inaturalist
from memoro.data.listing import KIND_OF_COLUMN, ROLES, Listing, Part, Role, Value, parse, role_of
from memoro.errors import DataError, ImageError

if TYPE_CHECKING:
    from memoro.heads import HeadKind


@dataclass(frozen=True)
class ImageColumn:
    """Images in a column of a `datasets.Dataset`."""

    table: Any
    column: str
    name: str

    def read(self, row: int) -> bytes:
        return encoded(self.table[row][self.column], self.where(row))

    def where(self, row: int) -> str:
        return f"{self.name}, row {row}"


def encoded(cell: Any, where: str) -> bytes:
    """The bytes of an image cell: bytes, a path, or a record of either."""
    path = cell
    if isinstance(cell, Mapping):
        path = cell.get("path")
        cell = cell.get("bytes")
    if isinstance(cell, bytes):
        return cell
    if not isinstance(path, str):
        raise ImageError(f"{where}: there is no image in it.")
    try:
        if "://" in path:
            from datasets.utils.file_utils import xopen

            with xopen(path, "rb") as remote:
                return bytes(remote.read())
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ImageError(f"{where}: {path}: {error.strerror or error}.") from None


def list_tables(
    tables: Mapping[str, Any],
    *,
    kind: HeadKind | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    name: str,
) -> Listing:
    """What the tables of a set hold, by the names of its splits and the types of its columns."""
    roles, notes = roles_of(tables, name)
    first = next(iter(roles))
    columns = choose(
        tables[roles[first]].features, kind=kind, image_column=image_column, label_column=label_column, name=name
    )
    parts: dict[Role, Part] = {}
    for role, split in roles.items():
        table = tables[split]
        part, note = _part(table, columns, f"{name}:{split}" if len(tables) > 1 else name)
        parts[role] = part
        notes += note
    return Listing(columns.kind, parts, labels=columns.labels, notes=tuple(notes))


def roles_of(tables: Mapping[str, Any], name: str) -> tuple[dict[Role, str], list[str]]:
    """Which table is for what; a set of one table is for training, whatever it is called, unless it says otherwise."""
    roles: dict[Role, str] = {}
    notes = []
    for split in tables:
        role = role_of(split) or ("train" if len(tables) == 1 else None)
        if role is None or role in roles:
            notes.append(f"the split {split!r} was left out: it is none of train, val and test.")
        else:
            roles[role] = split
    if not roles:
        raise DataError(f"{name}: no train, val or test among its splits {', '.join(tables)}; name one with split.")
    return roles, notes


def encoded_table(table: Any, column: str) -> Any:
    """The table's image column alone, not decoded."""
    import datasets

    table = table.select_columns([column])
    if isinstance(table.features[column], datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    elif getattr(table.features[column], "dtype", None) not in {"binary", "large_binary", "string", "large_string"}:
        raise DataError(
            f"column {column!r} holds {table.features[column]}, not images: cast it with "
            f"dataset.cast_column({column!r}, datasets.Image()), or name another with image_column."
        )
    return table


def _part(table: Any, columns: Columns, name: str) -> tuple[Part, list[str]]:
    missing = [column for column in (columns.image, *columns.values) if column not in table.features]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; it has {', '.join(map(repr, table.features))}.")
    table = table.with_format(None)
    source = ImageColumn(encoded_table(table, columns.image), columns.image, name)
    cells = cells_of(table, columns)
    rows: Sequence[int] = range(len(cells))
    notes = []
    if columns.kind == "softmax":
        # Test sets of competitions come without labels, or with -1 for them.
        rows_known = [row for row, cell in enumerate(cells) if cell is not None]
        if len(rows_known) < len(cells):
            notes.append(f"{name}: {len(cells) - len(rows_known)} images without a label were left out.")
        rows, cells = rows_known, [cells[row] for row in rows_known]
    values: list[Value] = parse(cells, columns.kind, lambda at: f"{name}, row {rows[at]}")
    if columns.kind == "softmax" and columns.labels is not None:
        absent = [label for label in columns.labels if label not in Counter(map(str, values))]
        if absent and values:
            shown = ", ".join(absent[:5])
            notes.append(f"{name}: {len(absent)} of {len(columns.labels)} labels have no image there ({shown}…).")
    return Part(source, rows, values), notes


def cells_of(table: Any, columns: Columns) -> list[Any]:
    """The cells to parse, class numbers replaced by their names, missing ones by None."""
    data = table.select_columns(list(columns.values))[:]
    if len(columns.values) > 1:
        return list(zip(*(data[column] for column in columns.values), strict=True))
    return named(data[columns.values[0]], columns)


def named(cells: Sequence[Any], columns: Columns) -> list[Any]:
    """Class numbers as the names that the table gives them."""
    names = columns.labels
    if names is None or columns.kind == "regression":
        return list(cells)

    def name(number: Any) -> str | None:
        return names[number] if isinstance(number, int) and 0 <= number < len(names) else None

    if columns.kind == "multilabel":
        return [[name(number) for number in (cell if isinstance(cell, Sequence) else [cell])] for cell in cells]
    return [name(cell) for cell in cells]


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


MANIFEST_SUFFIXES = frozenset({".csv", ".tsv", ".parquet"})


def list_manifest(
    path: Path,
    *,
    kind: HeadKind | None,
    image_column: str | None,
    label_column: str | Sequence[str] | None,
    allow_absolute: bool,
) -> Listing:
    """What the table lists. Paths are relative to its folder and stay inside it, unless absolute ones are allowed.

    The column's name tells the kind of task: `label` is one class, `labels` several (between | or ;), `number` a
    regression. A column `split` says train, val or test.
    """
    suffix = path.suffix.lower()
    is_text = suffix in {".csv", ".tsv"}
    table = _read_csv(path) if is_text else read_inaturalist(path.parent) if suffix == ".json" else _read_parquet(path)
    if not isinstance(table, dict):
        return list_tables(
            {"train": table}, kind=kind, image_column=image_column, label_column=label_column, name=str(path)
        )
    present = list(table)
    image = choose_column(present, image_column, ("path", *IMAGE_COLUMNS), "image's path", "image_column", str(path))
    columns = choose_values([column for column in present if column != image], label_column, kind, str(path))

    def where(row: int) -> str:
        return f"{path}, line {row + 2}" if is_text else f"{path}, row {row}"  # line 1 of a text is its header

    found: HeadKind = kind or ("regression" if len(columns) > 1 else _kind(table[columns[0]], columns[0]))
    cells = table[columns[0]] if len(columns) == 1 else list(zip(*(table[column] for column in columns), strict=True))
    if not cells:
        raise DataError(f"{path}: there is not one row below the header.")
    values = parse(cells, found, where)
    files, skipped = _files(path.parent, table[image], allow_absolute, where)
    source = Files(str(path.parent), tuple(files))
    split = next((column for column in present if column.lower() == "split"), None)
    roles = [_role(cell, where(row)) for row, cell in enumerate(table[split])] if split else ["train"] * len(cells)
    parts: dict[Role, Part] = {}
    for role in ("train", "val", "test"):
        rows = [row for row, found_role in enumerate(roles) if found_role == role and row not in skipped]
        if rows:
            part_values: list[Value] = [values[row] for row in rows]
            parts[role] = Part(source, rows, part_values)
    return Listing(
        found, parts, labels=columns if found == "regression" else None, skipped=tuple(skipped[row] for row in skipped)
    )


def _read_csv(path: Path) -> dict[str, list[Any]]:
    """The columns as text: 007 is a name, and so is NA."""
    import pandas

    try:
        with open(path, encoding="utf-8-sig") as file:
            header = file.readline()
        separator = "\t" if path.suffix.lower() == ".tsv" or "\t" in header else ","
        if ";" in header and "," not in header:
            separator = ";"
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig", sep=separator)
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save it as UTF-8 text.") from None
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        raise DataError(f"{path}: not a readable CSV ({str(error).strip()}).") from None
    return {str(column).strip(): frame[column].tolist() for column in frame.columns}


def _read_parquet(path: Path) -> Any:
    """The columns as lists; as a `datasets.Dataset` where the images themselves are inside."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from None
    for field in table.schema:
        of_bytes = pyarrow.types.is_struct(field.type) and {item.name for item in field.type} == {"bytes", "path"}
        if of_bytes or pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
            return datasets.Dataset(table).cast_column(field.name, datasets.Image())
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _kind(cells: Sequence[Any], column: str) -> HeadKind:
    """The kind by the column's name, or by the type of its cells (a CSV's are all text)."""
    by_name = KIND_OF_COLUMN.get(column.lower())
    if by_name is not None:
        return by_name
    sample = next((cell for cell in cells if cell is not None), "")
    return "multilabel" if isinstance(sample, list) else "regression" if isinstance(sample, float) else "softmax"


def _role(cell: Any, where: str) -> Role:
    text = str(cell or "").strip()
    role = role_of(text) if text else "train"
    if role is None:
        raise DataError(f"{where}: the split {text!r} is none of {', '.join(ROLES)}.")
    return role


def _files(root: Path, cells: Sequence[Any], allow_absolute: bool, where: Any) -> tuple[list[str], dict[int, Skipped]]:
    """Each row's path below the root, and the rows whose file is missing or empty."""
    paths: list[str] = []
    skipped: dict[int, Skipped] = {}
    for row, cell in enumerate(cells):
        text = str(cell or "").strip()
        if not text:
            raise DataError(f"{where(row)}: there is no path; fill it in, or drop the row.")
        path = os.path.normpath(text.replace("\\", "/") if os.sep == "/" else text)
        leaves = os.path.isabs(path) or path.split(os.sep)[0] == ".." or path[1:2] == ":"
        if leaves and not allow_absolute:
            raise DataError(
                f"{where(row)}: {text!r} leaves the manifest's folder; move the manifest above its images, "
                "or pass allow_absolute=True if you trust it."
            )
        paths.append(path)
        file = os.path.join(root, path)
        reason = unreadable_size(os.path.getsize(file)) if os.path.isfile(file) else "no such file"
        if reason is not None:
            skipped[row] = Skipped(file, reason)
    return paths, skipped
