"""Images without labels from any source, in a fixed order: what predictions are made for."""

from __future__ import annotations

import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import Any, Protocol

from memoro.data.columns import IMAGE_COLUMNS, find_image_column
from memoro.data.folders import ZipImages, open_archive
from memoro.data.hub import fetch, is_dataset_id, is_saved
from memoro.data.manifests import TABLE_SUFFIXES, column_names, iterate_rows, open_parquet
from memoro.data.tables import Places, TableImages, encoded_image, holds_bytes, undecoded
from memoro.errors import DataError, ImageError
from memoro.images import NamedPicture
from memoro.images.finding import IMAGE_SUFFIXES, find_images, is_clutter, is_image

Key = str | int | tuple[int, Any]
"""One image of a source."""

_ROWS = 64  # of a Parquet file that are in memory at a time


class Unlabelled(Protocol):
    """Images in order. Their keys are small, so that millions can be listed; an image is read when it is needed.

    Sources can be pickled, for other processes and machines. Relative paths start from the working directory.
    """

    def keys(self) -> Iterator[Key]: ...

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        """The images of some consecutive keys, by name."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """What the source is, as JSON: another description means other images, or trust in other paths."""
        ...


def open_unlabelled(
    places: Sequence[Any],
    *,
    image_column: str | None = None,
    allow_absolute: bool = False,
    streaming: bool = False,
) -> Unlabelled:
    """The images of files, folders and globs, zips, tables, and `datasets` objects, saved folders or hub ids.

    A table (.csv, .tsv, .jsonl, .parquet) has a column of paths; a Parquet file may contain the images instead. With
    `streaming`, a dataset of the hub is read from front to back and not stored.
    """
    sources: list[Unlabelled] = []
    files: list[str] = []  # neighbours among the places, which may name an image twice

    def add_files() -> None:
        if files:
            sources.append(Files(tuple(files)))
            files.clear()

    for place in _expand(places):
        path = Path(place).expanduser() if isinstance(place, (str, os.PathLike)) else None
        suffix = "" if path is None else path.suffix.lower()
        if path is not None and path.is_file() and suffix == ".zip":
            found: list[Unlabelled] = [_open_zip(path)]
        elif path is not None and path.is_file() and suffix in TABLE_SUFFIXES:
            found = [_open_table(path, image_column, allow_absolute)]
        elif path is None or (path.is_dir() and is_saved(path)) or _looks_like_hub(str(place), path):
            given = place if path is None or not path.exists() else path
            found = list(_open_dataset(given, image_column, allow_absolute, streaming))
        else:
            files.append(str(place))
            continue
        add_files()
        sources += found
    add_files()
    if not sources:
        raise DataError("no images were named: give files, folders, zips, tables or hub ids.")
    if len(sources) > 1 and any(map(is_endless, sources)):
        raise DataError("the length of a stream is unknown: name one split only (owner/name:train), and nothing else.")
    return sources[0] if len(sources) == 1 else Chain(tuple(sources))


def is_endless(source: Unlabelled) -> bool:
    """Whether its keys do not end: it is a stream of unknown length."""
    return isinstance(source, Stream) and source.length is None


def _expand(places: Sequence[Any]) -> Iterator[Any]:
    """The places, with globs replaced by their zips and tables where they match any."""
    for place in places:
        matches = sorted(glob.glob(place, recursive=True)) if isinstance(place, str) and glob.has_magic(place) else []
        kinds = {Path(match).suffix.lower() for match in matches}
        yield from matches if kinds & (TABLE_SUFFIXES | {".zip"}) else [place]


def _looks_like_hub(place: str, path: Path) -> bool:
    files = IMAGE_SUFFIXES | TABLE_SUFFIXES | {".zip"}
    return is_dataset_id(place) and not path.exists() and path.suffix.lower() not in files


@dataclass(frozen=True)
class Chain:
    """Several sources, one after the other."""

    sources: tuple[Unlabelled, ...]

    def keys(self) -> Iterator[Key]:
        for number, source in enumerate(self.sources):
            yield from ((number, key) for key in source.keys())  # noqa: SIM118

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        for number, some in groupby(keys, key=lambda key: key[0]):
            yield from self.sources[number].read([key for _, key in some])

    def describe(self) -> list[dict[str, Any]]:
        return [one for source in self.sources for one in source.describe()]


@dataclass(frozen=True)
class Files:
    """Files, folders and globs. Keys are paths as the user would write them."""

    places: tuple[str, ...]

    def keys(self) -> Iterator[Key]:
        return map(str, find_images(self.places))

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        return ((key, key) for key in keys)

    def describe(self) -> list[dict[str, Any]]:
        return [{"path": place} for place in self.places]


@dataclass(frozen=True)
class Zip:
    """The images of a zip. Keys are positions among its files, sorted by name."""

    source: ZipImages
    bad: dict[int, str]
    bytes: int

    def keys(self) -> Iterator[Key]:
        for row, name in enumerate(self.source.names):
            if not is_clutter(name) and is_image(name, lambda row=row: self.source.head(row)):  # type: ignore[misc]
                yield row

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        for key in keys:
            name = self.source.where(key)
            try:
                if key in self.bad:
                    raise ImageError(f"{name}: {self.bad[key]}.")
                yield name, self.source.read(key)
            except ImageError as error:
                yield name, error

    def describe(self) -> list[dict[str, Any]]:
        names = hashlib.sha256("\0".join(self.source.names).encode(errors="surrogateescape")).hexdigest()
        return [{"path": self.source.archive, "bytes": self.bytes, "names": names}]


def _open_zip(path: Path) -> Zip:
    source, _, bad = open_archive(path)
    return Zip(source, bad, path.stat().st_size)


@dataclass(frozen=True)
class Paths:
    """A table with a column of paths, which are the keys. They start from the table's folder and stay inside it."""

    path: str
    column: str
    allow_absolute: bool

    def keys(self) -> Iterator[Key]:
        return _column(Path(self.path), self.column)

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        places = Places(os.path.dirname(self.path), anywhere=self.allow_absolute)
        for key in keys:
            name = os.path.join(places.root, key.strip()) if key.strip() else f"{self.path}, a row without a path"
            try:
                if not key.strip():
                    raise ImageError(f"{name}: no image.")
                yield name, os.path.join(places.root, places.resolve(key, name))
            except (DataError, ImageError) as error:
                yield name, ImageError(str(error))

    def describe(self) -> list[dict[str, Any]]:
        return [_describe_table(self.path, self.column, self.allow_absolute)]


@dataclass(frozen=True)
class ParquetImages:
    """A Parquet file that contains the encoded images. Keys are row numbers; a few rows are in memory at a time."""

    path: str
    column: str
    groups: tuple[int, ...]
    """Where each row group ends."""
    allow_absolute: bool

    def keys(self) -> Iterator[Key]:
        return iter(range(self.groups[-1] if self.groups else 0))

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        places = Places(os.path.dirname(self.path), anywhere=self.allow_absolute)
        first = bisect_right(self.groups, keys[0])
        row, groups = self.groups[first - 1] if first else 0, list(range(first, len(self.groups)))
        with open_parquet(self.path) as file:
            for batch in _batches(file, self.path, _ROWS, columns=[self.column], row_groups=groups):
                start = max(keys[0] - row, 0)
                for at, cell in enumerate(batch.column(0)[start : keys[-1] + 1 - row], row + start):
                    yield _read_cell(cell.as_py(), f"{self.path}, row {at}", places)
                row += len(batch)
                if row > keys[-1]:
                    return

    def describe(self) -> list[dict[str, Any]]:
        return [_describe_table(self.path, self.column, self.allow_absolute)]


def _describe_table(path: str, column: str, allow_absolute: bool) -> dict[str, Any]:
    return {"path": path, "bytes": os.path.getsize(path), "column": column, "allow_absolute": allow_absolute}


@dataclass(frozen=True)
class Rows:
    """A stored `datasets.Dataset`. Keys are row numbers."""

    images: TableImages

    def keys(self) -> Iterator[Key]:
        return iter(range(len(self.images.table)))

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        for key in keys:
            cell = self.images.table[key][self.images.column]
            yield _read_cell(cell, self.images.where(key), self.images.places)

    def describe(self) -> list[dict[str, Any]]:
        trusted = self.images.places.anywhere
        name, fingerprint = self.images.name, self.images.table._fingerprint
        return [{"dataset": name, "fingerprint": fingerprint, "allow_absolute": trusted}]


@dataclass
class Stream:
    """An iterable dataset, read from front to back. Keys count its images; without a known length, they never end."""

    table: Any
    column: str
    name: str
    places: Places
    length: int | None
    _rest: tuple[int, Iterator[Any]] | None = field(default=None, repr=False)

    def keys(self) -> Iterator[Key]:
        return count() if self.length is None else iter(range(self.length))

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        if self._rest is None or self._rest[0] != keys[0]:
            self._rest = (keys[0], iter(self.table.skip(keys[0]) if keys[0] else self.table))
        rows = self._rest[1]
        self._rest = (keys[-1] + 1, rows)
        for key, row in zip(keys, rows, strict=False):
            yield _read_cell(row[self.column], f"{self.name}, row {key}", self.places)

    def describe(self) -> list[dict[str, Any]]:
        return [{"stream": self.name, "allow_absolute": self.places.anywhere}]


def _read_cell(cell: Any, name: str, places: Places) -> NamedPicture:
    try:
        return name, encoded_image(cell, name, places)
    except (DataError, ImageError) as error:
        return name, ImageError(str(error))


def _open_table(path: Path, image_column: str | None, allow_absolute: bool) -> Unlabelled:
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            column = image_column or next((name for name, kind in kinds.items() if holds_bytes(kind)), None)
            column = find_image_column(kinds, column, str(path), ("path", *IMAGE_COLUMNS))
            if holds_bytes(kinds[column]):
                groups = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
                return ParquetImages(str(path), column, tuple(accumulate(groups)), allow_absolute)
    else:
        names = dict.fromkeys(column_names(path))
        column = find_image_column(names, image_column, str(path), ("path", *IMAGE_COLUMNS))
    return Paths(str(path), column, allow_absolute)


def _column(path: Path, column: str) -> Iterator[str]:
    """The cells of a table's column as text, one by one."""
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            for batch in _batches(file, path, columns=[column]):
                yield from (str(cell.as_py() or "") for cell in batch.column(0))
    else:
        yield from (str(row.get(column) or "") for _, row in iterate_rows(path))


def _batches(file: Any, path: str | Path, *rows: int, **wanted: Any) -> Iterator[Any]:
    import pyarrow

    try:
        yield from file.iter_batches(*rows, **wanted)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: the Parquet file is damaged ({error}); write it again.") from None


def _open_dataset(source: Any, image_column: str | None, allow_absolute: bool, streaming: bool) -> Iterator[Unlabelled]:
    """The splits of a `datasets` object, a folder that it saved, or a hub id, one after the other."""
    iterable = type(source).__name__ in {"IterableDataset", "IterableDatasetDict"}
    tables, name = fetch(source, streaming=streaming or iterable)
    here = isinstance(source, Path)
    for split, table in tables.items():
        if table.features is None:
            table = table._resolve_features()
        column = find_image_column(table.features, image_column, name)
        places = Places(str(source) if here else os.getcwd(), hub=not here, anywhere=allow_absolute)
        title = f"{name}:{split}" if len(tables) > 1 else name
        sizes = getattr(table.info, "splits", None) or {}
        table = undecoded(table.with_format(None), column)
        if streaming or iterable:
            length = sizes[split].num_examples if split in sizes else None
            yield Stream(table, column, title, places, length)
        else:
            yield Rows(TableImages(table, column, title, places))
