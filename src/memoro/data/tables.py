"""Tables: CSV, JSON lines, Parquet and `datasets`, which list images or contain them, and their rows as annotations."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from memoro.data.columns import (
    KIND_OF_COLUMN,
    PATH_COLUMNS,
    SPLIT_NAMES,
    Columns,
    RawDataset,
    RawSplit,
    annotate,
    join_indicators,
    require_column,
    settle_columns,
    split_name,
)
from memoro.data.dataset import SPLITS, DataOptions, Skipped, SplitName
from memoro.data.hub import read_inaturalist
from memoro.data.source import NO_FILE, Files, Places, Rows, Source, Stream, hub_caches, unreadable_size
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
    if path.suffix.lower() == ".json":
        return read_columns(read_inaturalist(path.parent), str(path), path.parent, _counted(path), options)
    table, where = _read_table(path)
    if not isinstance(table, dict):
        return read_tables({"train": table}, options, str(path), path.parent)
    return read_columns(table, str(path), path.parent, where, options)


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
    except OSError:  # `open_folder` explains it
        return []
    return find(folder) or [file for place in splits for file in find(place)]


def read_metadata(folder: Path, files: Sequence[Path], options: DataOptions) -> RawDataset:
    """What the metadata files of an image folder list. Images of a file in a split's folder are of that split."""
    tables: list[dict[str, list[Any]]] = []
    places: list[str] = []
    for file in files:
        table, where = _read_table(file)
        if not isinstance(table, dict):
            raise DataError(f"{file} contains the images themselves: give that file instead of its folder.")
        count = len(table["file_name"])
        if file.parent != folder:
            split = file.parent.name
            table["file_name"] = [name and f"{split}/{name}" for name in table["file_name"]]
            table["split"] = [split] * count
        tables.append(table)
        places += map(where, range(count))
    names = dict.fromkeys(name for table in tables for name in table)
    nothing = [[None] * len(table["file_name"]) for table in tables]
    joined = {
        name: [cell for table, empty in zip(tables, nothing, strict=True) for cell in table.get(name, empty)]
        for name in names
    }
    return read_columns(joined, str(folder), folder, places.__getitem__, options)


def read_columns(
    table: Mapping[str, Sequence[Any]],
    name: str,
    folder: Path,
    where: Where,
    options: DataOptions,
    objects: Source | None = None,
) -> RawDataset:
    """What the columns of a table say about the files that it lists, or about its objects, by number."""
    table, joined = join_indicators(table, options, name, PATH_COLUMNS)
    # Names that tell the kind come before the types of cells: those of a CSV are all text.
    features = {
        column: None if column.lower() in KIND_OF_COLUMN else next((cell for cell in cells if cell is not None), None)
        for column, cells in table.items()
    }
    columns, cells, chosen = settle_columns(features, lambda _: table, options, name, PATH_COLUMNS)
    if not cells:
        raise DataError(f"{name}: there are no rows below the header.")
    annotations, unlabelled = annotate(columns, cells, Path(name).name, where)
    notes = [*joined, *chosen, *unlabelled]
    keys: Sequence[Any] = range(len(cells))
    source, skipped = objects, dict[int, Skipped]()
    if source is None:
        source = Files((name,))
        keys, skipped = _find_files(table[columns.image], Places(str(folder), anywhere=options.allow_absolute), where)
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
        split: RawSplit(source, [keys[row] for row in rows], [annotations[row] for row in rows])
        for split, rows in by_split.items()
        if rows
    }
    return RawDataset(columns.kind, splits, columns.labels, tuple(notes), tuple(skipped.values()))


def _read_table(path: Path) -> tuple[Any, Where]:
    """The columns of a file as lists, or a `datasets.Dataset` where the images themselves are inside; and where its
    rows are."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path), _counted(path)
    header, rows = open_rows(path)  # cells of a CSV stay text: 007 is a name, and so is NA
    numbered = list(rows)
    names = dict.fromkeys(filter(None, [*header, *(name for _, row in numbered for name in row)]))
    columns = {name: [row.get(name) for _, row in numbered] for name in names}
    return columns, lambda row: f"{path}, line {numbered[row][0]}"


def _counted(path: Path) -> Where:
    return lambda row: f"{path}, row {row}"


def column_names(path: Path) -> Sequence[str]:
    """The names of a file's columns; of JSON lines, those of the first row."""
    if path.suffix.lower() != ".parquet":
        return open_rows(path)[0]
    with open_parquet(path) as file:
        return list(file.schema_arrow.names)


def open_rows(path: Path) -> tuple[Sequence[str], Iterator[tuple[int, dict[str, Any]]]]:
    """The columns' names of a text, for JSON lines those of the first row; and its rows by name, each with its line."""
    if path.suffix.lower() not in JSON_LINES:
        rows = iterate_csv(path)
        return list(next(rows)[1]), rows
    rows = iterate_json_lines(path)
    first = list(islice(rows, 1))
    return [name for _, row in first for name in row], chain(first, rows)


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


def iterate_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The header, then the rows, by the names of the columns; each with the number of its line."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            separator = ";" if ";" in header and "," not in header else ","
            if path.suffix.lower() == ".tsv" or "\t" in header:
                separator = "\t"
            file.seek(0)
            reader = csv.reader(file, delimiter=separator)
            rows = filter(None, reader)
            names = [name.strip() for name in next(rows, [])]
            if not any(names):
                raise DataError(f"{path}: not a readable CSV (there is no header).")
            twice = [name for name, count in Counter(names).items() if name and count > 1]
            if twice:
                raise DataError(f"{path}: column names must be unique: {twice[0]!r} appears twice.")
            yield reader.line_num, dict.fromkeys(names)
            for row in rows:
                if any(row[len(names) :]):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} cells, but the header has {len(names)}."
                    )
                yield reader.line_num, dict(zip_longest(names, row[: len(names)], fillvalue=""))
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save it as UTF-8 text.") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path}: not a readable CSV ({error}).") from None


def _read_parquet(path: Path) -> Any:
    """The columns as lists; as a `datasets.Dataset` if the images themselves are inside."""
    with open_parquet(path) as file:
        table = file.read()
    column = next((field.name for field in table.schema if holds_bytes(field.type)), None)
    if column is not None:
        import datasets

        known = path.stat()
        fingerprint = hashlib.sha256(repr((str(path), known.st_size, known.st_mtime_ns)).encode()).hexdigest()
        return datasets.Dataset(table, fingerprint=fingerprint).cast_column(column, datasets.Image())
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _find_files(cells: Sequence[Any], places: Places, where: Where) -> tuple[list[str], dict[int, Skipped]]:
    """Each row's file, and the rows whose file is missing or empty."""
    files: list[str] = []
    skipped: dict[int, Skipped] = {}
    for row, cell in enumerate(cells):
        text = str(cell or "").strip()
        if not text:
            raise DataError(f"{where(row)}: there is no path; fill it in, or remove the row.")
        file = os.path.join(places.root, places.resolve(text, where(row)))
        files.append(file)
        reason = unreadable_size(os.path.getsize(file)) if os.path.isfile(file) else NO_FILE
        if reason is not None:
            skipped[row] = Skipped(file, reason)
    return files, skipped


def iterate_column(path: Path, column: str) -> Iterator[Any]:
    """The cells of a table's column, one by one."""
    if path.suffix.lower() == ".parquet":
        for batch in iterate_parquet(path, columns=[column]):
            yield from (cell.as_py() for cell in batch.column(0))
    else:
        yield from (row.get(column) for _, row in open_rows(path)[1])


def iterate_parquet(path: str | Path, *rows: int, **wanted: Any) -> Iterator[Any]:
    """Batches of a Parquet file."""
    with open_parquet(path) as file:
        yield from file.iter_batches(*rows, **wanted)


@contextmanager
def open_parquet(path: str | Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("reading parquet needs pyarrow: pip install 'memoro[train]', or use a CSV file.") from None
    try:
        with parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); write it again.") from None


# ----------------------------------------------------------------------------------------------------------- datasets


def open_images(table: Any, column: str, name: str, places: Places, length: int | None = None) -> Rows | Stream:
    """The images in a column of a `datasets` table, as bytes; all places are trusted where `datasets` itself found the
    files of an image folder. `length` is that of an iterable table, if it is known."""
    import datasets

    files = [os.path.realpath(file["filename"]) for file in getattr(table, "cache_files", ())]
    root = os.path.join(os.path.realpath(hub_caches()[0]), "")  # its cache has the table then
    if table.info.builder_name == "imagefolder" and files and all(file.startswith(root) for file in files):
        places = replace(places, anywhere=True)
    feature = table.features[column]
    is_stream = isinstance(table, datasets.IterableDataset)
    table = table.with_format(None).select_columns([column])
    table = table.decode(False) if is_stream else table
    if isinstance(feature, datasets.Image):
        table = table.cast_column(column, datasets.Image(decode=False))
    elif getattr(feature, "dtype", None) not in {"binary", "large_binary", "string", "large_string"}:
        raise DataError(
            f"column {column!r} holds {feature}, not images: cast it with dataset.cast_column({column!r}, "
            "datasets.Image()), or name another with `image_column`."
        )
    return Stream(name, column, places, table, length) if is_stream else Rows(name, column, places, table)


def read_tables(tables: Mapping[str, Any], options: DataOptions, name: str, root: Path | None = None) -> RawDataset:
    """What `datasets` tables hold, by the names of the splits and the types of their columns.

    Without a `root`, image files may be in the working directory or in the hub's cache.
    """
    places = Places(str(root or Path.cwd()), hub=root is None, anywhere=options.allow_absolute)
    names, notes = match_splits(tables, name)
    first = tables[next(iter(names.values()))]
    columns, _, more = settle_columns(first.features, lambda columns: _read_values(first, columns), options, name)
    notes += more
    splits: dict[SplitName, RawSplit] = {}
    for split, key in names.items():
        table, title = tables[key], f"{name}:{key}" if len(tables) > 1 else name
        for column in (columns.image, *columns.values):
            require_column(list(table.features), column, title)
        source = open_images(table, columns.image, title, places)
        # Test sets of competitions come without labels, or with -1 for them.
        cells = columns.cells(_read_values(table, columns))
        annotations, more = annotate(columns, cells, title, source.where)
        splits[split] = RawSplit(source, list(annotations), list(annotations.values()))
        notes += more
    return RawDataset(columns.kind, splits, labels=columns.labels, notes=tuple(notes))


def match_splits(tables: Mapping[str, Any], name: str) -> tuple[dict[SplitName, str], list[str]]:
    """The table of each split; a single table is for training, unless its name says otherwise."""
    names: dict[SplitName, str] = {}
    notes = []
    for key in tables:
        split = split_name(key) or ("train" if len(tables) == 1 else None)
        if split is None or split in names:
            notes.append(f"the split {key!r} was left out: only one train, one val and one test split are used.")
        else:
            names[split] = key
    if not names:
        raise DataError(f"{name}: no train, val or test among its splits {', '.join(tables)}; name one with split.")
    return names, notes


def _read_values(table: Any, columns: Columns) -> dict[str, list[Any]]:
    # As Arrow: a column whose type is an image would open files that no place allows.
    return dict(table.select_columns(list(columns.values)).with_format("arrow")[:].to_pydict())


def holds_bytes(kind: Any) -> bool:
    """Whether a Parquet column of this type holds encoded images: bytes, or records of bytes and a path."""
    from pyarrow import types

    of_bytes = types.is_struct(kind) and {item.name for item in kind} == {"bytes", "path"}
    return bool(of_bytes or types.is_binary(kind) or types.is_large_binary(kind))


def contains_all(column: Any) -> bool:
    """Whether each cell of a column of images holds the image itself, not the path of a file."""
    parts = [chunk.field("bytes") if hasattr(chunk, "field") else chunk for chunk in column.chunks]
    return holds_bytes(column.type) and not any(part.null_count for part in parts)
