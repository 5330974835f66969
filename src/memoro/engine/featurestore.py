"""Features on disk: what tasks read of a base pass, kept for later epochs, runs and tasks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memoro.engine.streams import BaseLayer, Features
from memoro.errors import CacheError

StoreDtype = Literal["float16", "bfloat16", "float32"]

VERSION = 2
SHARD_BYTES = 64 * 2**20
SHARD_RECORDS = 1024
"""A file holds at most this many bytes and records: a crash loses no more, and eviction frees no less."""
SUFFIX = ".features"
PART = ".part"
ABANDONED = 3600.0
"""Seconds without a write after which an unfinished file belongs to a process that died."""
KEY_BYTES = 32
TENSORS = ("keys", "tokens", "pairs")


def default_folder() -> Path:
    """Where features are kept unless the user names another folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "memoro" / "features"


@dataclass(frozen=True)
class RecordFormat:
    """One image's record: the class token that enters each kept layer and the final one, and all keys and values."""

    from_layer: int
    depth: int
    dim: int
    heads: int
    tokens: int
    dtype: StoreDtype

    @property
    def layers(self) -> int:
        return self.depth - self.from_layer

    def tensors(self, records: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what a file of so many records holds, in the order of `TENSORS`."""
        # The few class tokens stay exact: a head reads nothing else.
        return [
            (torch.uint8, (records, KEY_BYTES)),
            (torch.float32, (records, self.layers + 1, self.dim)),
            (getattr(torch, self.dtype), (records, self.layers, 2, self.heads, self.tokens, self.dim // self.heads)),
        ]

    @property
    def size(self) -> int:
        """Bytes of a record with its key."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors(1))

    def pack(self, features: Features) -> tuple[Tensor, Tensor]:
        """Class tokens (b, layers + 1, dim), and keys and values (b, layers, 2, h, n, d), as they are stored."""
        _, (token_dtype, _), (pair_dtype, pair_shape) = self.tensors(len(features.token))
        tokens = torch.stack([*(layer.token for layer in features.layers), features.token], dim=1)
        pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in features.layers]
        both = torch.stack(pairs, dim=1) if pairs else tokens.new_zeros(pair_shape)
        packed = tokens.to("cpu", token_dtype), both.to("cpu", pair_dtype)
        if not all(bool(torch.isfinite(part).all()) for part in packed):
            raise CacheError(
                f"the backbone's features do not fit into {self.dtype}: choose --cache-dtype bfloat16 or float32, or "
                "train with --no-cache."
            )
        return packed


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of records, mapped from disk: nothing is read before it is used. The mapping outlives the file."""

    path: Path
    keys: Tensor
    tokens: Tensor
    pairs: Tensor

    @classmethod
    def open(cls, path: Path) -> Shard:
        with safe_open(path, "pt") as file:
            return cls(path, *(file.get_tensor(name) for name in TENSORS))

    def serves(self, wanted: RecordFormat) -> bool:
        """Whether the records have this format, or the same from an earlier layer on."""
        found = [(part.dtype, tuple(part.shape)) for part in (self.keys, self.tokens, self.pairs)]
        records = self.keys.numel() // KEY_BYTES
        formats = (replace(wanted, from_layer=layer) for layer in range(wanted.from_layer + 1))
        return any(found == format.tensors(records) for format in formats)


class FeatureStore:
    """Records of one backbone with one preprocessing, by key. `about` is all that they depend on beside the image.

    Files are renamed into place when they are complete: a crash leaves nothing half done, and two processes at worst
    compute the same record twice. Nothing in a file can run code.
    """

    def __init__(self, folder: Path, format: RecordFormat, about: dict[str, Any]) -> None:
        self.root, self.format = folder, format
        facts = json.dumps({"version": VERSION, **about}, sort_keys=True)
        self.folder = folder / hashlib.sha256(facts.encode()).hexdigest()[:32]
        self._known: set[Path] = set()
        self._records: dict[bytes, tuple[Shard, int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Finds the files that were written since the last time, by this process or another one."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path in self._known:
                continue
            with suppress(OSError, RuntimeError, SafetensorError):  # damaged, or just evicted by another process
                self.add(path)

    def add(self, path: Path) -> None:
        """Maps a file. At once, not when it is read: another process may evict it in between."""
        self._known.add(path)
        shard = Shard.open(path)
        if shard.serves(self.format):
            self._records.update((bytes(key), (shard, row)) for row, key in enumerate(shard.keys.numpy()))

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """The positions of keys that have no record yet."""
        return [at for at, key in enumerate(keys) if key not in self._records]

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """Keeps what was added when it ends, even by an exception."""
        clear_abandoned(self.root)
        writer = Writer(self)
        try:
            yield writer
        except CacheError:
            raise
        except BaseException:
            with suppress(CacheError):
                writer.flush()
            raise
        writer.flush()

    def buffer(self, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for a batch of records. Use it again: touching fresh memory takes longer than reading."""
        form = self.format
        pairs = (form.layers, 2, batch, form.heads, form.tokens, form.dim // form.heads)
        return torch.empty(form.layers + 1, batch, form.dim, dtype=dtype), torch.empty(pairs, dtype=dtype)

    def read(
        self,
        keys: Sequence[bytes],
        biases: Sequence[Tensor | None],
        device: torch.device,
        buffer: tuple[Tensor, Tensor],
    ) -> Features:
        """The features of a batch as the backbone computed them, up to the rounding of the store.

        They are valid until the next batch is read into the same buffer.
        """
        layers = self.format.layers
        tokens, pairs = buffer[0][:, : len(keys)], buffer[1][:, :, : len(keys)]
        for at, key in enumerate(keys):
            shard, row = self._records[key]
            # A record may start at an earlier layer: its last layers are the wanted ones.
            tokens[:, at].copy_(shard.tokens[row, -layers - 1 :])
            if layers:
                pairs[:, :, at].copy_(shard.pairs[row, -layers:])
        tokens, pairs = tokens.to(device), pairs.to(device)
        parts = zip(tokens[:-1], pairs, biases, strict=True)
        kept = [BaseLayer(token, pair[0], pair[1], bias) for token, pair, bias in parts]
        return Features(self.format.from_layer, kept, tokens[-1])

    def files_of(self, keys: Iterable[bytes]) -> set[Path]:
        """The files that hold the records of these keys."""
        return {self._records[key][0].path for key in keys if key in self._records}

    def forget(self, files: Set[Path]) -> None:
        """Releases files that were removed."""
        self._records = {key: place for key, place in self._records.items() if place[0].path not in files}


class Writer:
    """Collects records and writes them to a store, a file at a time."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._limit = max(1, min(SHARD_RECORDS, SHARD_BYTES // store.format.size))
        self._records: list[tuple[bytes, Tensor, Tensor]] = []

    def add(self, keys: Sequence[bytes], features: Features) -> None:
        for record in zip(keys, *self._store.format.pack(features), strict=True):
            self._records.append(record)
            if len(self._records) == self._limit:
                self.flush()

    def flush(self) -> None:
        """Writes what was added since the last file. The store has it from then on."""
        if not self._records:
            return
        keys, tokens, pairs = zip(*self._records, strict=True)
        self._records = []
        named = torch.tensor([list(key) for key in keys], dtype=torch.uint8)
        data = save(dict(zip(TENSORS, (named, torch.stack(tokens), torch.stack(pairs)), strict=True)))
        folder = self._store.folder
        path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        part = path.with_name(path.name + PART)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            self._store.add(path)
        except (OSError, RuntimeError, SafetensorError) as error:  # the latter where it cannot be mapped
            reason = error.strerror if isinstance(error, OSError) else error
            raise CacheError(
                f"cannot keep features in {folder} ({reason}): free some space, choose another --cache-folder, "
                "or train with --no-cache. What was kept so far stays."
            ) from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def evict(root: Path, needed: int, budget: float, keep: Set[Path]) -> set[Path]:
    """Removes the files that were used longest ago, of any backbone, until `needed` more bytes fit the budget.

    What other processes are writing counts, and is left alone.

    Returns what it removed: a store that has these open must forget them, or their space is not freed.
    """
    files = _files(root)
    total, removed = total_bytes(root), set()
    for file, stat in sorted(files.items(), key=lambda item: item[1].st_mtime):
        if total + needed <= budget:
            break
        if file not in keep and file.suffix != PART:
            total -= stat.st_size
            removed.add(file)
            with suppress(OSError):
                file.unlink(missing_ok=True)
    return removed


def clear_abandoned(root: Path) -> None:
    """Removes unfinished files of processes that died."""
    for file, stat in _files(root).items():
        if file.suffix == PART and time.time() - stat.st_mtime > ABANDONED:
            with suppress(OSError):
                file.unlink(missing_ok=True)


def mark_used(files: Iterable[Path]) -> None:
    """Makes these files the last that `evict` takes."""
    for file in files:
        with suppress(OSError):  # a folder that can only be read
            os.utime(file)


def total_bytes(root: Path) -> int:
    """The size of all features in a folder."""
    return sum(stat.st_size for stat in _files(root).values())


def clear(root: Path) -> int:
    """Removes all features from a folder; returns how many bytes that freed."""
    files = _files(root)
    for file in files:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in files}:
        if not any(folder.iterdir()):
            folder.rmdir()
    return sum(stat.st_size for stat in files.values())


def _files(root: Path) -> dict[Path, os.stat_result]:
    """All files of features in a folder, complete or not. Nothing else there is ever touched."""
    found = {}
    for file in [*root.glob(f"*/*{SUFFIX}"), *root.glob(f"*/*{SUFFIX}{PART}")]:
        with suppress(OSError):  # another process has just removed it
            found[file] = file.stat()
    return found
