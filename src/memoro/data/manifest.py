"""A manifest: a table of paths and what each image shows, as CSV, as Parquet or as iNaturalist's JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoro.data.arrow import list_tables
from memoro.data.columns import IMAGE_COLUMNS, choose_column, choose_values
from memoro.data.folder import Files
from memoro.data.imageset import Skipped, unreadable_size
from memoro.data.inaturalist import read_inaturalist
from memoro.data.listing import ROLES, Listing, Part, Role, Value, role_of
from memoro.data.values import KIND_OF_COLUMN, parse
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.task import HeadKind

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
