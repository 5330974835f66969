"""Features on disk: what tasks read of a base pass, kept for later epochs, runs and tasks."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memoro.engine.streams import Features
from memoro.errors import CacheError
from memoro.files import cache_folder

StoreDtype = Literal["float16", "bfloat16", "float32"]

VERSION = 6
SUFFIX = ".features"
LOCK = ".lock"
"""The suffix of the lock of a file, after its own."""
KEY_BYTES, ENTRY_BYTES = 32, 40
"""An entry of a file's index is a key, and the checksum of this key and its record."""
FILE_BYTES = 256 * 2**20
"""A file of several batches holds at most so much: damage loses no more, and eviction frees no less. The kernel allows
some 65,000 of them to be mapped, and none that is larger than the memory."""
SHARE = 0.5
"""Of a GPU's free memory: the rest is for training."""
BLOCK = 64
"""Records that are copied at once."""
LOG = logging.getLogger("memoro")
CPU = torch.device("cpu")


def default_folder() -> Path:
    """Where features are kept unless the user names another folder."""
    return cache_folder() / "features"


@dataclass(frozen=True)
class RecordFormat:
    """One image's record: the class token that enters each kept layer and the final one, pooled statistics, and all
    keys and values, which take by far the most space. With `from_layer` at the depth, there are none of these."""

    from_layer: int
    depth: int
    dim: int
    heads: int
    tokens: int
    dtype: StoreDtype
    pool_from: int
    """The first layer whose tokens are pooled."""
    statistics: int

    @property
    def layers(self) -> int:
        return self.depth - self.from_layer

    @property
    def parts(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Dtype and shape of a record's class tokens, of its statistics, and of its keys and values."""
        return (
            (torch.float32, (self.layers + 1, self.dim)),  # these few stay exact: a head reads nothing else
            (torch.float16, (self.depth - self.pool_from, self.statistics, self.dim)),
            (getattr(torch, self.dtype), (self.layers, 2, self.heads, self.tokens, self.dim // self.heads)),
        )

    @property
    def size(self) -> int:
        """Bytes of a record with its entry in the index."""
        return ENTRY_BYTES + sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.parts)

    def pack(self, features: Features) -> Tensor:
        """Records (b, bytes), as they are stored."""
        assert features.pooled is not None
        tokens = torch.stack([*(layer.token for layer in features.layers), features.token], dim=1)
        pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in features.layers]
        limit = torch.finfo(torch.float16).max
        found = tokens, features.pooled.clamp(-limit, limit), torch.stack(pairs, dim=1) if pairs else tokens[:, :0]
        packed = [part.to("cpu", dtype) for part, (dtype, _) in zip(found, self.parts, strict=True)]
        if not all(bool(torch.isfinite(part).all()) for part in packed):
            raise CacheError(
                f"the backbone's features do not fit into {self.dtype}: choose `Cache.dtype` bfloat16 or float32, "
                "or train with `cache=False`."
            )
        return torch.cat([part.flatten(1).view(torch.uint8) for part in packed], dim=1)

    def unpack(self, records: Tensor) -> list[Tensor]:
        """The class tokens (n, layers + 1, dim), statistics (n, layers, statistics, dim), and keys and values
        (n, layers, 2, h, tokens, d) of records (n, bytes), without a copy."""
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in self.parts]
        columns = torch.split(records, sizes, dim=1)
        return [
            column.view(dtype).view(len(records), *shape)
            for column, (dtype, shape) in zip(columns, self.parts, strict=True)
        ]


class _File(NamedTuple):
    """A file of records, mapped: nothing is read before it is used, and what is mapped outlives the file."""

    path: Path
    entries: Tensor
    """(n, bytes)"""
    records: Tensor
    """(n, bytes)"""
    parts: list[Tensor]
    """See `RecordFormat.unpack`."""


class FeatureStore:
    """Records of one backbone with one preprocessing, by key. `about` is all that they depend on besides the image.

    A file is an index with a place for each record that it is to hold, and the records in that order. Each one is
    written before its entry, and checked by its checksum when it is first read: neither a crash nor damage can give a
    wrong one. Two processes at worst compute the same record twice. Nothing in a file can run code.
    """

    def __init__(self, folder: Path, format: RecordFormat, about: dict[str, Any]) -> None:
        self.root, self.format = folder, format
        # All but the layer, which is in the names of files: what is kept from an earlier layer on serves a later fork.
        facts = json.dumps({"version": VERSION, **vars(replace(format, from_layer=0)), **about}, sort_keys=True)
        self.folder = folder / hashlib.sha256(facts.encode()).hexdigest()[:32]
        self._records: dict[bytes, tuple[_File, int]] = {}
        self._checked: set[tuple[Path, int]] = set()
        self._damaged: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Finds what is on disk now, written by this process or another one."""
        self._records = {}
        for path in sorted(set(self.folder.glob(f"*-*{SUFFIX}")) - self._damaged):
            with suppress(OSError, RuntimeError, ValueError):  # another process has just evicted it; not memoro's
                first = int(path.name.partition("-")[0])
                if first <= self.format.from_layer:
                    self._map(path, replace(self.format, from_layer=first))

    def _map(self, path: Path, format: RecordFormat) -> None:
        size = path.stat().st_size
        count, rest = divmod(size, format.size)
        if rest:
            self._discard(path)
        elif count:
            data = torch.from_file(str(path), size=size, dtype=torch.uint8)
            index, records = data[: count * ENTRY_BYTES].view(count, -1), data[count * ENTRY_BYTES :].view(count, -1)
            file = _File(path, index, records, format.unpack(records))
            keys = index[:, :KEY_BYTES].numpy()
            self._records.update((bytes(key), (file, row)) for row, key in enumerate(keys))

    def discard_damaged(self, keys: Iterable[bytes]) -> bool:
        """Removes the files in which a record of these keys is damaged, and says so; whether there were any. Their
        records are missing after `refresh`."""
        damaged = {file.path for file, row in map(self._records.__getitem__, keys) if not self._intact(file, row)}
        for path in damaged:
            self._discard(path)
        return bool(damaged)

    def _intact(self, file: _File, row: int) -> bool:
        """Whether a record is what was written. It is checked once: later reads cost nothing more."""
        if (file.path, row) not in self._checked:
            key, checksum = torch.split(file.entries[row], [KEY_BYTES, ENTRY_BYTES - KEY_BYTES])
            if _checksum(key, file.records[row]) != checksum.view(torch.int64):
                return False
            self._checked.add((file.path, row))
        return True

    def _discard(self, path: Path) -> None:
        LOG.warning("the feature file %s is damaged: what it held is computed again.", path)
        self._damaged.add(path)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """The positions of keys that have no record yet."""
        return [at for at, key in enumerate(keys) if key not in self._records]

    def buffer(self, batch: int, dtype: torch.dtype, device: torch.device = CPU) -> Buffer:
        """Memory for a batch of records. Use it again: touching fresh memory takes longer than reading."""
        form = self.format
        empty = partial(torch.empty, dtype=dtype, device=device)
        pairs = empty(form.layers, 2, batch, form.heads, form.tokens, form.dim // form.heads)
        return empty(form.layers + 1, batch, form.dim), pairs

    def buffer_bytes(self, batch: int, dtype: torch.dtype) -> int:
        """What such memory takes."""
        return sum(part.nbytes for part in self.buffer(batch, dtype, torch.device("meta")))

    def read(
        self, keys: Sequence[bytes], biases: Sequence[Tensor | None], device: torch.device, buffer: Buffer
    ) -> Features:
        """The features of a batch as the backbone computed them, up to the rounding of the store.

        They are valid until the next batch is read into the same buffer.
        """
        tokens, pairs = (part.to(device) for part in self.copy(keys, buffer))
        return Features.of(self.format.from_layer, tokens, pairs, biases)

    def copy(self, keys: Sequence[bytes], buffer: Buffer) -> Buffer:
        """The class tokens (layers + 1, b, dim), and the keys and values (layers, 2, b, h, n, d) of some records."""
        layers = self.format.layers
        tokens, pairs = buffer[0][:, : len(keys)], buffer[1][:, :, : len(keys)]
        for at, key in enumerate(keys):
            file, row = self._records[key]
            # A record may start at an earlier layer: its last layers are the wanted ones.
            tokens[:, at].copy_(file.parts[0][row, -layers - 1 :])
            if layers:
                pairs[:, :, at].copy_(file.parts[2][row, -layers:])
        return tokens, pairs

    def statistics(self, keys: Sequence[bytes]) -> Tensor:
        """The pooled statistics (b, layers, statistics, dim), without the rest of the records."""
        return torch.stack([file.parts[1][row] for file, row in map(self._records.__getitem__, keys)])

    def mark_used(self, keys: Iterable[bytes]) -> set[Path]:
        """The files that hold records of these keys: the last from now on that `evict` takes."""
        files = {self._records[key][0].path for key in keys if key in self._records}
        for file in files:
            with suppress(OSError):  # a folder that can only be read
                os.utime(file)
        return files


Buffer = tuple[Tensor, Tensor]
"""Class tokens (layers + 1, b, dim), and keys and values (layers, 2, b, h, n, d)."""


class Writer:
    """Adds `count` records to a store, in as few files as possible. Places that are not written take no space."""

    def __init__(self, store: FeatureStore, count: int) -> None:
        self._store, self._left = store, count
        self._path, self._places, self._at = store.folder, 0, 0

    def add(self, keys: Sequence[bytes], features: Features) -> None:
        """Writes the records of a batch. `FeatureStore.refresh` finds them."""
        size, records = self._store.format.size, self._store.format.pack(features)
        index = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), KEY_BYTES)
        found = [[_checksum(key, record)] for key, record in zip(index, records, strict=True)]
        checksums = torch.tensor(found, device="cpu")
        if self._at + len(keys) > self._places:
            self._path = self._store.folder / f"{self._store.format.from_layer:02}-{uuid.uuid4().hex}{SUFFIX}"
            self._places, self._at = max(len(keys), min(self._left, FILE_BYTES // size)), 0
        with writing(self._store.folder):
            self._store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # features reveal what images show
            with self._path.open("r+b" if self._at else "xb") as file:
                file.truncate(self._places * size)
                file.seek(self._places * ENTRY_BYTES + self._at * (size - ENTRY_BYTES))
                file.write(records.numpy().data)
                file.flush()
                file.seek(self._at * ENTRY_BYTES)
                file.write(torch.cat([index, checksums.view(torch.uint8)], dim=1).numpy().data)
        self._at += len(keys)
        self._left -= len(keys)


class Resident:
    """The features of some records on a device, by key."""

    def __init__(self, store: FeatureStore, keys: Sequence[bytes], device: torch.device, dtype: torch.dtype) -> None:
        self._first, self._rows = store.format.from_layer, {key: row for row, key in enumerate(dict.fromkeys(keys))}
        every, buffer = list(self._rows), store.buffer(BLOCK, dtype)
        self._tokens, self._pairs = store.buffer(len(every), dtype, device)
        for at in range(0, len(every), BLOCK):
            tokens, pairs = store.copy(every[at : at + BLOCK], buffer)
            self._tokens[:, at : at + BLOCK].copy_(tokens)
            self._pairs[:, :, at : at + BLOCK].copy_(pairs)

    def read(self, keys: Sequence[bytes], biases: Sequence[Tensor | None]) -> Features:
        """The features of a batch, as `FeatureStore.read` gives them."""
        rows = torch.tensor([self._rows[key] for key in keys], device=self._tokens.device)
        return Features.of(self._first, self._tokens.index_select(1, rows), self._pairs.index_select(2, rows), biases)


def _checksum(*parts: Tensor) -> int:
    """CRC-32 of some tensors' bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part.numpy().data, value)
    return value


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that features may take; none on other devices, where the files are in memory already."""
    return int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What fails here is a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot cache features in {folder} ({error.strerror}): free some space, choose another `Cache.folder`, or "
            "train with `cache=False`. Features cached so far are still valid."
        ) from None


def evict(root: Path, needed: int, budget: float, keep: Collection[Path] = ()) -> int:
    """Removes the files that were used longest ago, of any backbone, until `needed` more bytes fit the budget. Returns
    the bytes that are left."""
    files = _files(root)
    total = sum(map(_size, files.values()))
    for file in sorted(files.keys() - set(keep), key=lambda file: files[file].st_mtime):
        if total + needed <= budget:
            break
        total -= _size(files[file])
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return total


def total_bytes(root: Path) -> int:
    """The size of all features in a folder."""
    return sum(map(_size, _files(root).values()))


def clear(root: Path) -> int:
    """Removes all features from a folder; returns how many bytes that freed."""
    files = _files(root)
    locks = list(root.glob(f"*/*{SUFFIX}{LOCK}"))
    for file in (*files, *locks):
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in (*files, *locks)}:
        if not any(folder.iterdir()):
            folder.rmdir()
    return sum(map(_size, files.values()))


def _files(root: Path) -> dict[Path, os.stat_result]:
    """All files of features in a folder. Nothing else there is ever touched."""
    found = {}
    for file in root.glob(f"*/*{SUFFIX}"):
        with suppress(OSError):  # another process has just removed it
            found[file] = file.stat()
    return found


def _size(stat: os.stat_result) -> int:
    """Bytes on disk: places for records that were not written take none."""
    return min(stat.st_size, 512 * stat.st_blocks) if hasattr(stat, "st_blocks") else stat.st_size
