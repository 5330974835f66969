"""Tables of `datasets` that hold images or name them. Images stay encoded until they are used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memoro.data.annotations import (
    RawDataset,
    RawSplit,
    labelled_rows,
    note_unlabelled,
    parse,
    split_name,
)
from memoro.data.columns import Columns, choose_columns, note_column, recognise_numbers
from memoro.data.dataset import MAX_BYTES, DataOptions, SplitName, unreadable_size
from memoro.errors import DataError, ImageError


@dataclass(frozen=True)
class Places:
    """Where a table's cells may name image files: below its folder, in the hub's cache, or `anywhere` if trusted."""

    root: str
    hub: bool = False
    anywhere: bool = False

    def resolve(self, text: str, where: str) -> str:
        """The path (relative to the root) or URL that a cell names; an error if it leaves these places."""
        text = text.strip()
        if "://" in text:
            # A file of the hub, possibly inside archives: zip://1.jpg::hf://datasets/owner/name/images.zip
            inside = self.hub and ".." not in text and _HUB_URL.fullmatch(text) is not None
            path = text
        else:
            path = os.path.normpath(text.replace("\\", "/") if os.sep == "/" else text)
            full = os.path.abspath(os.path.join(self.root, path))
            roots = [self.root, *(_caches() if self.hub else ())]
            inside = path[1:2] != ":" and any(full.startswith(os.path.join(os.path.abspath(r), "")) for r in roots)
        if not inside and not self.anywhere:
            raise DataError(
                f"{where}: {text!r} leaves the table's folder; move the table above its images or, if you trust it, "
                "use `allow_absolute=True`."
            )
        return path


_HUB_URL = re.compile(r"((zip|tar|gzip|bz2|xz|zstd|lz4)://[^:]*::)*hf://datasets/[^:]*")


def _caches() -> tuple[str, str]:
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(datasets.config.HF_DATASETS_CACHE), HF_HUB_CACHE


@dataclass(frozen=True)
class TableImages:
    """Images in a column of a `datasets.Dataset`."""

    table: Any = field(compare=False)
    column: str
    name: str
    places: Places
    fingerprint: str = field(init=False)
    """Of the table: one that is read twice is the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", getattr(self.table, "_fingerprint", None) or str(id(self.table)))

    def read(self, row: int) -> bytes:
        return encoded_image(self.table[row][self.column], self.where(row), self.places)

    def where(self, row: int) -> str:
        return f"{self.name}, row {row}"


def encoded_image(cell: Any, where: str, places: Places) -> bytes:
    """The bytes of an image cell: bytes, a path, or a record of either."""
    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, cell)
    if not isinstance(data, bytes):
        if not isinstance(path, str):
            raise ImageError(f"{where} contains no image.")
        data = _read_limited(places.resolve(path, where), where, places.root)
    reason = unreadable_size(len(data))
    if reason is not None:
        raise ImageError(f"{where}: {reason}.")
    return data


def _read_limited(path: str, where: str, root: str) -> bytes:
    """The file or URL, but not much more than the largest image."""
    from datasets.utils.file_utils import xopen

    is_url = "://" in path
    path = path if is_url else os.path.join(root, path)
    if not is_url and not os.path.isfile(path):  # opening a pipe would wait forever
        raise ImageError(f"{where}: {path}: no such file.")
    try:
        with xopen(path, "rb") if is_url else open(path, "rb") as file:
            return bytes(file.read(MAX_BYTES + 1))
    except Exception as error:  # file systems and networks each have their own
        raise ImageError(f"{where}: {path}: {error}.") from None


def undecoded(table: Any, image: str, *others: str) -> Any:
    """These columns of a `datasets` table, its images as bytes."""
    import datasets

    table, feature = table.select_columns([image, *others]), table.features[image]
    if isinstance(table, datasets.IterableDataset):
        table = table.decode(False)
    if isinstance(feature, datasets.Image):
        return table.cast_column(image, datasets.Image(decode=False))
    if getattr(feature, "dtype", None) not in {"binary", "large_binary", "string", "large_string"}:
        raise DataError(
            f"column {image!r} holds {feature}, not images: cast it with dataset.cast_column({image!r}, "
            "datasets.Image()), or name another with `image_column`."
        )
    return table


def read_tables(tables: Mapping[str, Any], options: DataOptions, name: str, root: Path | None = None) -> RawDataset:
    """What `datasets` tables hold, by the names of the splits and the types of their columns.

    Without a `root`, image files may be in the working directory or in the hub's cache.
    """
    places = Places(str(root or Path.cwd()), hub=root is None, anywhere=options.allow_absolute)
    names, notes = match_splits(tables, name)
    first = tables[next(iter(names.values()))]
    columns = choose_columns(first.features, options, name)
    columns, more = recognise_numbers(columns, columns.cells(_read_values(first, columns)), options)
    notes += [*note_column(columns, first.features, options), *more]
    splits: dict[SplitName, RawSplit] = {}
    for split, key in names.items():
        title = f"{name}:{key}" if len(tables) > 1 else name
        splits[split], more = _read_table(tables[key], columns, title, places)
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


def _read_table(table: Any, columns: Columns, name: str, places: Places) -> tuple[RawSplit, list[str]]:
    missing = [column for column in (columns.image, *columns.values) if column not in table.features]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}; it has {', '.join(map(repr, table.features))}.")
    source = TableImages(undecoded(table.with_format(None), columns.image), columns.image, name, places)
    cells = columns.cells(_read_values(table, columns))
    rows = labelled_rows(cells, columns.kind)  # test sets of competitions come without labels, or with -1 for them
    notes = [] if len(rows) == len(cells) else [note_unlabelled(len(cells) - len(rows), name)]
    annotations = parse([cells[row] for row in rows], columns.kind, lambda at: f"{name}, row {rows[at]}")
    return RawSplit(source, rows, annotations), notes


def _read_values(table: Any, columns: Columns) -> dict[str, list[Any]]:
    # As Arrow: a column whose type is an image would open files that no place allows.
    return dict(table.select_columns(list(columns.values)).with_format("arrow")[:].to_pydict())


def holds_bytes(kind: Any) -> bool:
    """Whether a Parquet column of this type holds encoded images: bytes, or records of bytes and a path."""
    from pyarrow import types

    of_bytes = types.is_struct(kind) and {item.name for item in kind} == {"bytes", "path"}
    return bool(of_bytes or types.is_binary(kind) or types.is_large_binary(kind))
