"""Features on disk: what tasks read of a base pass, kept for later epochs, runs and tasks."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from memoro.engine.streams import BaseLayer, Features
from memoro.errors import CacheError, TaskFileError
from memoro.files import write_whole

StoreDtype = Literal["float16", "bfloat16", "float32"]

VERSION = 1
SHARD_BYTES = 256 * 2**20
"""A file holds about so much: what a crash loses at most, and what making room frees at least."""
ABANDONED = 3600.0
"""Seconds after which an unfinished file that nobody wrote to belongs to a process that died."""


def default_folder() -> Path:
    """Where features are kept unless a user says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "memoro" / "features"


@dataclass(frozen=True)
class RecordFormat:
    """One image's record: the token that enters each kept layer and the final one, then keys and values a layer."""

    first: int
    depth: int
    dim: int
    heads: int
    tokens: int
    dtype: StoreDtype

    @property
    def layers(self) -> int:
        return self.depth - self.first

    @property
    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.layers + 1, self.dim), (self.layers, 2, self.heads, self.tokens, self.dim // self.heads)

    @property
    def _sizes(self) -> tuple[int, int]:
        # The few class tokens stay exact: a head reads nothing else.
        small, large = self._shapes
        return int(np.prod(small)) * 4, int(np.prod(large)) * getattr(torch, self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return sum(self._sizes)

    def pack(self, features: Features) -> bytes:
        """The records of a batch, one after the other. Numbers too large for the dtype are an error."""
        tokens = torch.stack([*(layer.token for layer in features.layers), features.token], dim=1)
        pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in features.layers]
        both = torch.stack(pairs, dim=1) if pairs else tokens.new_zeros(len(tokens), *self._shapes[1])
        kept = both.to("cpu", getattr(torch, self.dtype))
        exact = tokens.to("cpu", torch.float32)
        if not bool(torch.isfinite(kept).all() and torch.isfinite(exact).all()):
            raise CacheError(
                f"the backbone's features do not fit into {self.dtype}: choose --cache-dtype bfloat16 or float32, or "
                "train with --no-cache."
            )
        raw = [
            side.contiguous().view(torch.uint8).reshape(len(tokens), size).numpy()
            for side, size in zip((exact, kept), self._sizes, strict=True)
        ]
        return np.concatenate(raw, axis=1).tobytes()

    def views(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Raw records (rows, bytes) as tokens (rows, layers + 1, dim) and pairs (rows, layers, 2, h, n, d)."""
        small, _ = self._sizes
        tokens, pairs = data[:, :small].view(torch.float32), data[:, small:].view(getattr(torch, self.dtype))
        return tokens.view(len(data), *self._shapes[0]), pairs.view(len(data), *self._shapes[1])


@dataclass(frozen=True)
class Shard:
    """One finished file of records."""

    path: Path
    layout: RecordFormat
    keys: tuple[bytes, ...]

    def open(self) -> tuple[Tensor, Tensor]:
        """Its records, mapped from disk: reading one costs nothing before it is used. They outlive the file."""
        rows, size = len(self.keys), self.layout.size
        data = torch.from_file(str(self.path), shared=False, size=rows * size, dtype=torch.uint8)
        return self.layout.views(data.view(rows, size))


class FeatureStore:
    """Records of one backbone with one preprocessing, by key. `about` is all that they depend on beside the image.

    A file of records counts once its index stands beside it, and both are renamed into place: a crash leaves nothing
    half done, and two processes at worst compute the same record twice. Nothing that is read can run code.
    """

    def __init__(self, folder: Path, layout: RecordFormat, about: dict[str, Any]) -> None:
        self.root = folder
        self.layout = layout
        facts = json.dumps({"version": VERSION, **about}, sort_keys=True)
        self.folder = folder / hashlib.sha256(facts.encode()).hexdigest()[:32]
        self._open: dict[Path, tuple[Tensor, Tensor]] = {}
        self._places: dict[bytes, tuple[Shard, int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Looks for what other processes have written since."""
        for index in sorted(self.folder.glob("*.json")):
            shard = None if index.with_suffix(".bin") in self._open else _read_index(index, self.layout)
            if shard is None:
                continue
            try:
                self._add(shard, shard.open())
            except (OSError, RuntimeError):
                continue  # another process has just made room

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """The positions of keys that have no record yet."""
        return [at for at, key in enumerate(keys) if key not in self._places]

    def writer(self) -> Writer:
        return Writer(self)

    def buffer(self, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Buffers for a batch of records. It is worth keeping: touching fresh memory takes longer than reading."""
        layout = self.layout
        shape = (layout.layers, 2, batch, layout.heads, layout.tokens, layout.dim // layout.heads)
        return torch.empty(layout.layers + 1, batch, layout.dim, dtype=dtype), torch.empty(shape, dtype=dtype)

    def read(
        self,
        keys: Sequence[bytes],
        biases: Sequence[Tensor | None],
        device: torch.device,
        buffer: tuple[Tensor, Tensor],
    ) -> Features:
        """The features of a batch, as the backbone computed them but for the rounding of the store.

        They lie in the buffer, until the next batch is read into it.
        """
        layout = self.layout
        tokens, pairs = buffer[0][:, : len(keys)], buffer[1][:, :, : len(keys)]
        for at, key in enumerate(keys):
            shard, row = self._places[key]
            small, large = self._open[shard.path]
            # A record from an earlier layer on serves a later fork as well.
            skip = layout.first - shard.layout.first
            tokens[:, at].copy_(small[row, skip:])
            if layout.layers:
                pairs[:, :, at].copy_(large[row, skip:])
        tokens, pairs = tokens.to(device), pairs.to(device)
        layers = [
            BaseLayer(token, pair[0], pair[1], bias)
            for token, pair, bias in zip(tokens[:-1], pairs, biases, strict=True)
        ]
        return Features(layout.first, layers, tokens[-1])

    def files_of(self, keys: Iterable[bytes]) -> set[Path]:
        """The files that hold the records of these keys."""
        return {self._places[key][0].path for key in keys if key in self._places}

    def forget(self, files: Set[Path]) -> None:
        """Lets go of files that were removed."""
        self._places = {key: place for key, place in self._places.items() if place[0].path not in files}
        self._open = {path: data for path, data in self._open.items() if path not in files}

    def _add(self, shard: Shard, data: tuple[Tensor, Tensor]) -> None:
        # At once, not when it is read: another process may make room in between.
        self._open[shard.path] = data
        self._places.update({key: (shard, row) for row, key in enumerate(shard.keys)})


class Writer:
    """Appends records to a store; each file counts as soon as it is full, the last one when the writer closes."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._rows = max(1, SHARD_BYTES // max(1, store.layout.size))
        self._keys: list[bytes] = []
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Writer:
        clear_abandoned(self._store.root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, CacheError):
            self._drop()
            return
        # What is complete is kept, whatever stopped the rest; that is what the caller is to hear of.
        with nullcontext() if kind is None else suppress(CacheError):
            self._finish()

    def add(self, keys: Sequence[bytes], features: Features) -> None:
        data, size = self._store.layout.pack(features), self._store.layout.size
        try:
            for at, key in enumerate(keys):
                if self._file is None:
                    self._store.folder.mkdir(parents=True, exist_ok=True)
                    self._path = self._store.folder / f"{uuid.uuid4().hex}.part"
                    self._file = self._path.open("wb")
                self._file.write(data[at * size : (at + 1) * size])
                self._keys.append(key)
                if len(self._keys) == self._rows:
                    self._finish()
        except OSError as error:
            self._drop()
            raise self._failure(error.strerror) from None

    def _finish(self) -> None:
        if self._file is None or self._path is None:
            return
        layout, keys, part = self._store.layout, tuple(self._keys), self._path
        if not keys:
            self._drop()
            return
        data = part.with_suffix(".bin")
        record = {"layout": vars(layout), "keys": [key.hex() for key in keys]}
        try:
            self._file.truncate(len(keys) * layout.size)  # an interrupt may have come amid a record
            self._file.close()
            kept = Shard(part, layout, keys).open()
            os.replace(part, data)
            write_whole(data.with_suffix(".json"), json.dumps(record).encode())
        except (OSError, RuntimeError, TaskFileError) as error:  # torch's own, where it cannot map the file
            self._drop()
            data.unlink(missing_ok=True)
            raise self._failure(error.strerror if isinstance(error, OSError) else str(error)) from None
        self._store._add(Shard(data, layout, keys), kept)
        self._keys, self._path, self._file = [], None, None

    def _drop(self) -> None:
        if self._file is not None and self._path is not None:
            with suppress(OSError):  # it may try once more to write
                self._file.close()
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._keys, self._path, self._file = [], None, None

    def _failure(self, reason: str | None) -> CacheError:
        return CacheError(
            f"cannot keep features in {self._store.folder} ({reason}): make room, choose another --cache-folder, or "
            "train with --no-cache. What was kept so far stays."
        )


def make_room(root: Path, needed: int, budget: int, keep: Set[Path]) -> set[Path]:
    """Removes what was used longest ago, of any backbone, until `needed` more bytes stay within the budget.

    What other processes are writing counts, and is left alone.

    Returns what it removed: a store that has these open must forget them, or their room is not free.
    """
    files = sorted(root.glob("*/*.bin"), key=_used)
    sizes = {file: _size(file) for file in files}
    total = sum(sizes.values()) + sum(_size(file) for file in root.glob("*/*.part"))
    removed = set()
    for file in files:
        if total + needed <= budget:
            break
        if file not in keep:
            total -= sizes[file]
            removed.add(file)
            with suppress(OSError):
                file.with_suffix(".json").unlink(missing_ok=True)
                file.unlink(missing_ok=True)
    return removed


def clear_abandoned(root: Path) -> None:
    """Removes unfinished files of processes that died."""
    alone = [*root.glob("*/*.part")]
    for kind, other in ((".bin", ".json"), (".json", ".bin")):
        alone += [file for file in root.glob(f"*/*{kind}") if not file.with_suffix(other).exists()]
    for file in alone:
        try:
            if time.time() - file.stat().st_mtime > ABANDONED:
                file.unlink()
        except OSError:
            continue  # another process was faster


def _used(file: Path) -> float:
    try:
        return file.with_suffix(".json").stat().st_mtime
    except OSError:
        return time.time()  # being written


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # another process has removed it


def _read_index(index: Path, layout: RecordFormat) -> Shard | None:
    """The shard of an index that serves the layout, None if it does not or is damaged."""
    data = index.with_suffix(".bin")
    try:
        record = json.loads(index.read_bytes())
        first = record["layout"]["first"]
        keys = tuple(bytes.fromhex(key) for key in record["keys"])
        # Only this number is taken from the file; all others must be those that are wanted.
        if type(first) is not int or not 0 <= first <= layout.first:
            return None
        found = replace(layout, first=first)
        if not keys or record["layout"] != vars(found) or data.stat().st_size != len(keys) * found.size:
            return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Shard(data, found, keys)


def touch(files: Iterable[Path]) -> None:
    """Notes that these files are used: `make_room` takes others first."""
    for file in files:
        with suppress(OSError):  # a folder that is only lent
            os.utime(file.with_suffix(".json"))


def total_bytes(root: Path) -> int:
    """How much a folder of features holds."""
    return sum(_size(file) for file in root.glob("*/*.bin"))


def clear(root: Path) -> int:
    """Removes all features of a folder; returns how many bytes that freed."""
    freed = 0
    for folder in root.glob("*"):
        files = [*folder.glob("*.json"), *folder.glob("*.bin"), *folder.glob("*.part")] if folder.is_dir() else []
        for file in files:
            freed += _size(file)
            file.unlink(missing_ok=True)
        if files and not any(folder.iterdir()):
            folder.rmdir()
    return freed
