"""Manifests: CSV, JSON lines and Parquet files that list images, among them the metadata of an image folder."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memoro.data.annotations import (
    KIND_OF_COLUMN,
    SPLIT_NAMES,
    RawDataset,
    RawSplit,
    labelled_rows,
    note_unlabelled,
    parse,
    split_name,
)
from memoro.data.columns import IMAGE_COLUMNS, choose_columns, join_indicators, note_column, recognise_numbers
from memoro.data.dataset import NO_FILE, SPLITS, DataOptions, Skipped, SplitName, unreadable_size
from memoro.data.folders import FileImages
from memoro.data.hub import read_inaturalist
from memoro.data.tables import Places, holds_bytes, read_tables
from memoro.errors import DataError

Where = Callable[[int], str]
"""Where a row is, for messages."""

JSON_LINES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".parquet"}) | JSON_LINES
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""What `datasets` calls the table of an image folder; its column `file_name` names the images beside it."""


def read_manifest(path: Path, options: DataOptions) -> RawDataset:
    """What a CSV, JSON lines or Parquet file lists. Paths are relative to its folder and stay inside it, unless
    `allow_absolute`.

    The column's name tells the kind of head: `label` is one class, `labels` several (between | or ;), `number` a
    regression. A column `split` says train, val or test.
    """
    is_known = path.suffix.lower() == ".json"
    table, where = (read_inaturalist(path.parent), _counted(path)) if is_known else _read_columns(path)
    if not isinstance(table, dict):
        return read_tables({"train": table}, options, str(path), path.parent)
    return _read_listed(table, str(path), path.parent, where, options)


def find_metadata(folder: Path, options: DataOptions) -> list[Path]:
    """The metadata files of an image folder as `datasets` has them: its own, else those of its splits.

    Files without the column `file_name` or a label column, and those that cannot be read, are something else.
    """
    usual = {options.task, *((options.labels or ()) if options.kind == "regression" else ())}

    def has_labels(names: Sequence[str]) -> bool:
        asked = options.label_column
        if asked is not None:
            return asked in names if isinstance(asked, str) else set(asked) <= set(names)
        return any(name in usual or name.lower() in KIND_OF_COLUMN for name in names)

    def find(place: Path) -> list[Path]:
        for file in (place / name for name in METADATA):
            with suppress(DataError):
                names = column_names(file) if file.is_file() else ()
                if "file_name" in names and has_labels(names):
                    return [file]
        return []

    try:
        splits = sorted(place for place in folder.iterdir() if split_name(place.name) and place.is_dir())
    except OSError:  # `read_folder` explains it
        return []
    return find(folder) or [file for place in splits for file in find(place)]


def read_metadata(folder: Path, files: Sequence[Path], options: DataOptions) -> RawDataset:
    """What the metadata files of an image folder list. Images of a file in a split's folder are of that split."""
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    for file in files:
        table, where = _read_columns(file)
        if not isinstance(table, dict):
            raise DataError(f"{file} contains the images themselves: give that file instead of its folder.")
        inside = {} if file.parent == folder else {"split": file.parent.name}
        for row, cells in enumerate(zip(*table.values(), strict=True)):
            own = dict(zip(table, cells, strict=True))
            if inside and own["file_name"]:
                own["file_name"] = f"{file.parent.name}/{own['file_name']}"
            rows.append(own | inside)
            places.append(where(row))
    names = dict.fromkeys(name for row in rows for name in row)
    return _read_listed(_columns_of(rows, names), str(folder), folder, places.__getitem__, options)


def _read_listed(
    table: Mapping[str, Sequence[Any]], name: str, folder: Path, where: Where, options: DataOptions
) -> RawDataset:
    """What the columns of a table say about the files that it lists."""
    image_columns = ("path", *IMAGE_COLUMNS)
    table, joined = join_indicators(table, options, name, image_columns)
    # Names that tell the kind come before the types of cells: those of a CSV are all text.
    features = {
        column: None if column.lower() in KIND_OF_COLUMN else next((cell for cell in cells if cell is not None), None)
        for column, cells in table.items()
    }
    columns = choose_columns(features, options, name, image_columns)
    cells = columns.cells(table)
    if not cells:
        raise DataError(f"{name}: there are no rows below the header.")
    columns, notes = recognise_numbers(columns, cells, options)
    notes = [*joined, *note_column(columns, table, options), *notes]
    labelled = labelled_rows(cells, columns.kind)
    if len(labelled) < len(cells):
        notes.append(note_unlabelled(len(cells) - len(labelled), Path(name).name))
    parsed = parse([cells[row] for row in labelled], columns.kind, lambda at: where(labelled[at]))
    annotations = dict(zip(labelled, parsed, strict=True))
    files, skipped = _find_files(table[columns.image], Places(str(folder), anywhere=options.allow_absolute), where)
    source = FileImages(str(folder), tuple(files))
    by_split: dict[SplitName, list[int]] = {split: [] for split in SPLITS}
    split_cells = next((table[column] for column in table if column.lower() == "split"), ["train"] * len(cells))
    for row, cell in enumerate(split_cells):
        split = split_name(str(cell or "").strip() or "train")
        if split is None:
            known = ", ".join(SPLIT_NAMES)
            raise DataError(f"{where(row)}: unknown split {str(cell).strip()!r}: choose one of {known}.")
        if row not in skipped and row in annotations:
            by_split[split].append(row)
    splits = {
        split: RawSplit(source, rows, [annotations[row] for row in rows]) for split, rows in by_split.items() if rows
    }
    return RawDataset(columns.kind, splits, columns.labels, tuple(notes), tuple(skipped.values()))


def _read_columns(path: Path) -> tuple[Any, Where]:
    """The columns of a file as lists, or a `datasets.Dataset` where the images themselves are inside; and where its
    rows are."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path), _counted(path)
    numbered = list(iterate_rows(path))  # cells of a CSV stay text: 007 is a name, and so is NA
    rows = [row for _, row in numbered]
    names = dict.fromkeys(name for row in rows for name in row) or dict.fromkeys(column_names(path))
    return _columns_of(rows, filter(None, names)), lambda row: f"{path}, line {numbered[row][0]}"


def _counted(path: Path) -> Where:
    return lambda row: f"{path}, row {row}"


def column_names(path: Path) -> Sequence[str]:
    """The names of a file's columns; of JSON lines, those of the first row."""
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            return list(file.schema_arrow.names)
    if path.suffix.lower() in JSON_LINES:
        return list(next(iterate_json_lines(path), (0, {}))[1])
    return next(iterate_csv(path))[1]


def _columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """The rows as columns; None where a row lacks one."""
    return {name: [row.get(name) for row in rows] for name in names}


def iterate_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a text by the names of the columns, each with the number of its line."""
    if path.suffix.lower() in JSON_LINES:
        yield from iterate_json_lines(path)
        return
    rows = iterate_csv(path)
    _, names = next(rows)
    yield from ((line, dict(zip(names, row, strict=True))) for line, row in rows)


def iterate_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON lines file, each with the number of its line; empty lines are left out."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    raise DataError(f'{path}, line {number}: not a JSON object such as {{"path": "1.jpg"}}.')
                if row:
                    yield number, row
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON lines ({error}).") from None


def iterate_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The names of the columns, then the cells of each row, as many as there are names; each with its line."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            separator = ";" if ";" in header and "," not in header else ","
            if path.suffix.lower() == ".tsv" or "\t" in header:
                separator = "\t"
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            rows = (row for row in reader if row)
            names = [name.strip() for name in next(rows, [])]
            if not any(names):
                raise DataError(f"{path}: not a readable CSV (there is no header).")
            twice = [name for at, name in enumerate(names) if name and name in names[:at]]
            if twice:
                raise DataError(f"{path}: column names must be unique: {twice[0]!r} appears twice.")
            yield reader.line_num, names
            for row in rows:
                if any(row[len(names) :]):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} cells, but the header has {len(names)}."
                    )
                yield reader.line_num, row[: len(names)] + [""] * (len(names) - len(row))
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save it as UTF-8 text.") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV ({error}).") from None


def _read_parquet(path: Path) -> Any:
    """The columns as lists; as a `datasets.Dataset` where the images themselves are inside."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from None
    column = next((field.name for field in table.schema if holds_bytes(field.type)), None)
    if column is not None:
        known = path.stat()
        fingerprint = hashlib.sha256(repr((str(path), known.st_size, known.st_mtime_ns)).encode()).hexdigest()
        return datasets.Dataset(table, fingerprint=fingerprint).cast_column(column, datasets.Image())
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _find_files(cells: Sequence[Any], places: Places, where: Where) -> tuple[list[str], dict[int, Skipped]]:
    """Each row's path below the root, and the rows whose file is missing or empty."""
    paths: list[str] = []
    skipped: dict[int, Skipped] = {}
    for row, cell in enumerate(cells):
        text = str(cell or "").strip()
        if not text:
            raise DataError(f"{where(row)}: there is no path; fill it in, or remove the row.")
        path = places.resolve(text, where(row))
        paths.append(path)
        file = os.path.join(places.root, path)
        reason = unreadable_size(os.path.getsize(file)) if os.path.isfile(file) else NO_FILE
        if reason is not None:
            skipped[row] = Skipped(file, reason)
    return paths, skipped


def open_parquet(path: str | Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("reading parquet needs pyarrow: pip install 'memoro[train]', or use a CSV file.") from None
    try:
        return parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from None
