"""Sources: where encoded images come from, by keys that are small, so that millions can be listed."""

from __future__ import annotations

import hashlib
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

from memoro.errors import DataError, ImageError
from memoro.images import NamedPicture, Picture, encode_image, find_images

Key = str | int | tuple[int, Any]
"""One image of a source."""

# No encoded image is bigger; a file that is would only fill the memory.
MAX_BYTES = 512 * 2**20
NO_FILE = "no such file"
"""Why an image of a table cannot be read."""
_SETTLED = 2.0
"""Seconds in which the clock of every file system moves on."""
_ROWS = 64  # of a Parquet file that are in memory at a time


class PlaceError(DataError, ImageError):
    """A cell of a table names a file outside the places that it may."""


class Source:
    """Images in order, each read when it is needed.

    Sources can be pickled, for other processes and machines, and open their files when first asked. Relative paths
    start from the working directory.
    """

    def keys(self) -> Iterator[Key]:
        """All images. A stream of unknown length never ends."""
        raise NotImplementedError

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        """Images by name, or why they cannot be read; neighbours are read together."""
        for key, content in zip(keys, self._fetch(keys), strict=False):
            name = self.where(key)
            try:
                yield name, self._encoded(content, name)
            except ImageError as error:
                yield name, error

    def _fetch(self, keys: Sequence[Any]) -> Iterable[Any]:
        """What the source holds for each image: by default its key."""
        return keys

    def _encoded(self, content: Any, name: str) -> Picture:
        """The image, made of what the source holds. Raises ImageError."""
        raise NotImplementedError

    def where(self, key: Any) -> str:
        """The image's address as a user would write it."""
        raise NotImplementedError

    def describe(self) -> list[dict[str, Any]]:
        """What the source is, as JSON: another description means other images, or trust in other paths."""
        raise NotImplementedError

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        """What changes with the content of each image, as far as that can be told without reading it; else None."""
        return (None for _ in keys)


def read_bytes(picture: Picture | ImageError) -> bytes:
    """The encoded image of what `Source.read` gives."""
    if isinstance(picture, ImageError):
        raise picture
    if isinstance(picture, bytes):
        return picture
    try:
        return Path(str(picture)).read_bytes()
    except OSError as error:
        raise ImageError(f"{picture}: {error.strerror or error}.") from None


def is_endless(source: Source) -> bool:
    """Whether its keys do not end: it is a stream of unknown length."""
    return isinstance(source, Stream) and source.length is None


def unreadable_size(size: int) -> str | None:
    """Why a file of this many bytes cannot be an image, or None."""
    if size == 0:
        return "the file is empty (0 bytes)"
    return f"{size / 2**20:.0f} MiB, more than {MAX_BYTES // 2**20}" if size > MAX_BYTES else None


def stamp_file(path: str | Path) -> tuple[Any, ...] | None:
    """What changes with a file; None for one that has just changed, as its times may stay with the next change."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if time.time() - max(found.st_mtime, found.st_ctime) < _SETTLED:
        return None
    return os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True)
class Files(Source):
    """Image files. Keys are their paths, as the user would write them."""

    places: tuple[str, ...]
    """Files, folders and globs; the table that lists them; @FILE or -, whose lines are `listed`."""
    listed: tuple[str, ...] | None = None

    def keys(self) -> Iterator[Key]:
        return map(str, find_images(self.places)) if self.listed is None else iter(self.listed)

    def _encoded(self, content: Any, name: str) -> Picture:
        return name

    def where(self, key: Any) -> str:
        return str(key)

    def describe(self) -> list[dict[str, Any]]:
        if self.listed is None:
            return [{"path": place} for place in self.places]
        lines = "\n".join(self.listed).encode(errors="surrogateescape")
        return [{"list": self.places[0], "lines": hashlib.sha256(lines).hexdigest()}]

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        return map(stamp_file, keys)


@dataclass(frozen=True)
class Chain(Source):
    """Several sources, one after the other."""

    sources: tuple[Source, ...]

    def keys(self) -> Iterator[Key]:
        for number, source in enumerate(self.sources):
            yield from ((number, key) for key in source.keys())  # noqa: SIM118

    def read(self, keys: Sequence[Any]) -> Iterator[NamedPicture]:
        for number, some in groupby(keys, key=lambda key: key[0]):
            yield from self.sources[number].read([key for _, key in some])

    def where(self, key: Any) -> str:
        return str(self.sources[key[0]].where(key[1]))

    def describe(self) -> list[dict[str, Any]]:
        return [one for source in self.sources for one in source.describe()]

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        for number, some in groupby(keys, key=lambda key: key[0]):
            yield from self.sources[number].stamps([key for _, key in some])


@dataclass(frozen=True, eq=False)
class Objects(Source):
    """Images that are objects in memory, or made by a dataset of torch. Keys count them."""

    items: Any
    """Each image by its number: a path, an encoded or a decoded image."""
    first: bool = False
    """Whether an item is a pair, of which the first is the image."""

    def keys(self) -> Iterator[Key]:
        return iter(range(len(self.items)))

    def _encoded(self, content: Any, name: str) -> Picture:
        item = self.items[content][0] if self.first else self.items[content]
        return encode_image(item, str(item) if isinstance(item, (str, Path)) else name)

    def where(self, key: Any) -> str:
        named = not self.first and isinstance(self.items[key], (str, Path))
        return str(self.items[key]) if named else f"image {key}"

    def describe(self) -> list[dict[str, Any]]:
        return [{"objects": len(self.items)}]


# ------------------------------------------------------------------------------------------------------------- tables


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
            roots = [self.root, *(hub_caches() if self.hub else ())]
            inside = path[1:2] != ":" and any(full.startswith(os.path.join(os.path.abspath(r), "")) for r in roots)
        if not inside and not self.anywhere:
            raise PlaceError(
                f"{where}: {text!r} leaves the table's folder; move the table above its images or, if you trust it, "
                "use `allow_absolute=True`."
            )
        return path


_HUB_URL = re.compile(r"((zip|tar|gzip|bz2|xz|zstd|lz4)://[^:]*::)*hf://datasets/[^:]*")


def hub_caches() -> tuple[str, str]:
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(datasets.config.HF_DATASETS_CACHE), HF_HUB_CACHE


@dataclass
class Column(Source):
    """A column of a table, with images or the paths of image files. Keys are row numbers."""

    name: str
    """Of the table: its path, if it is a file."""
    column: str
    places: Places

    def where(self, key: Any) -> str:
        return f"{self.name}, row {key}"

    def _encoded(self, content: Any, name: str) -> Picture:
        """The bytes of an image cell: bytes, a path, or a record of either."""
        is_record = isinstance(content, Mapping)
        data, path = (content.get("bytes"), content.get("path")) if is_record else (content, content)
        if not isinstance(data, bytes):
            if not isinstance(path, str):
                raise ImageError(f"{name} contains no image.")
            data = _read_limited(self.places.resolve(path, name), name, self.places.root)
        reason = unreadable_size(len(data))
        if reason is not None:
            raise ImageError(f"{name}: {reason}.")
        return data

    def describe(self) -> list[dict[str, Any]]:
        about = {"path": self.name, "bytes": os.path.getsize(self.name)}
        return [{**about, "column": self.column, "allow_absolute": self.places.anywhere}]


class Paths(Column):
    """A file with a column of paths, which are the keys. They start from the table's folder and stay inside it."""

    def keys(self) -> Iterator[Key]:
        from memoro.data.tables import iterate_column

        return (str(cell or "") for cell in iterate_column(Path(self.name), self.column))

    def where(self, key: Any) -> str:
        return os.path.join(self.places.root, key.strip()) if key.strip() else f"{self.name}, a row without a path"

    def _fetch(self, keys: Sequence[Any]) -> Iterable[Any]:
        return (key.strip() for key in keys)

    def _encoded(self, content: Any, name: str) -> Picture:
        if not content:
            raise ImageError(f"{name}: no image.")
        return os.path.join(self.places.root, self.places.resolve(content, name))


@dataclass
class ParquetImages(Column):
    """A Parquet file that contains the encoded images, of which a few rows are in memory at a time."""

    groups: tuple[int, ...]
    """Where each row group ends."""

    def keys(self) -> Iterator[Key]:
        return iter(range(self.groups[-1] if self.groups else 0))

    def _fetch(self, keys: Sequence[Any]) -> Iterable[Any]:
        from memoro.data.tables import iterate_parquet

        for first, last in _runs(keys):
            group = bisect_right(self.groups, first)
            row, groups = self.groups[group - 1] if group else 0, list(range(group, len(self.groups)))
            for batch in iterate_parquet(self.name, _ROWS, columns=[self.column], row_groups=groups):
                yield from (cell.as_py() for cell in batch.column(0)[max(first - row, 0) : last + 1 - row])
                row += len(batch)
                if row > last:
                    break


def _runs(keys: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each run of numbers without gaps."""
    for _, run in groupby(enumerate(keys), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1]


@dataclass
class Rows(Column):
    """A column of a stored `datasets.Dataset`."""

    table: Any = field(compare=False, repr=False)
    fingerprint: str = field(init=False)
    """The table's fingerprint: one that is read twice is the same."""

    def __post_init__(self) -> None:
        self.fingerprint = getattr(self.table, "_fingerprint", None) or str(id(self.table))

    def keys(self) -> Iterator[Key]:
        return iter(range(len(self.table)))

    def _fetch(self, keys: Sequence[Any]) -> Iterable[Any]:
        # As Arrow, one query for all: for a row alone, `datasets` takes longer than a small image to decode.
        cells = self.table.with_format("arrow")[list(keys)].column(self.column) if len(keys) else ()
        return (cell.as_py() for cell in cells)

    def describe(self) -> list[dict[str, Any]]:
        return [{"dataset": self.name, "fingerprint": self.fingerprint, "allow_absolute": self.places.anywhere}]

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        from memoro.data.tables import contains_all

        inside = contains_all(self.table.data.table.column(self.column))
        return ((self.fingerprint, self.column, key) if inside else None for key in keys)


@dataclass
class Stream(Column):
    """An iterable dataset, read from front to back. Without a known length, its keys never end."""

    table: Any
    length: int | None
    _rest: tuple[int, Iterator[Any]] | None = field(default=None, repr=False)

    def keys(self) -> Iterator[Key]:
        return count() if self.length is None else iter(range(self.length))

    def _fetch(self, keys: Sequence[Any]) -> Iterable[Any]:
        if self._rest is None or self._rest[0] != keys[0]:
            self._rest = (keys[0], iter(self.table.skip(keys[0]) if keys[0] else self.table))
        rows = self._rest[1]
        self._rest = (keys[-1] + 1, rows)
        return (row[self.column] for row in rows)

    def describe(self) -> list[dict[str, Any]]:
        return [{"stream": self.name, "allow_absolute": self.places.anywhere}]


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
