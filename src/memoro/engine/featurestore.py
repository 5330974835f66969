"""Features on disk: what tasks read of a base pass, kept for later epochs, runs and tasks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from memoro.engine.records import INDEX, TENSORS, Mapped, RecordFormat, Shard, checksum
from memoro.engine.streams import Features
from memoro.errors import CacheError
from memoro.files import cache_folder

VERSION = 5
SHARD_BYTES = 64 * 2**20
SHARD_RECORDS = 1024
"""A file holds at most this many bytes and records: a crash or damage loses no more, and eviction frees no less."""
SUFFIX = ".features"
PART = ".part"
ABANDONED = 3600.0
"""Seconds without a write after which an unfinished file belongs to a process that died."""
LOG = logging.getLogger("memoro")
CPU = torch.device("cpu")


def default_folder() -> Path:
    """Where features are kept unless the user names another folder."""
    return cache_folder() / "features"


class FeatureStore:
    """Records of one backbone with one preprocessing, by key. `about` is all that they depend on besides the image.

    Files are renamed into place when they are complete: a crash leaves nothing half done, and two processes at worst
    compute the same record twice. Nothing in a file can run code.
    """

    def __init__(self, folder: Path, format: RecordFormat, about: dict[str, Any]) -> None:
        self.root, self.format = folder, format
        # All but the layer: then a file in the folder that has another format is damaged.
        facts = json.dumps({"version": VERSION, **vars(replace(format, from_layer=0)), **about}, sort_keys=True)
        self.folder = folder / hashlib.sha256(facts.encode()).hexdigest()[:32]
        self._known: set[Path] = set()
        self._records: dict[bytes, tuple[Shard, int]] = {}
        self._mapped: Mapped = OrderedDict()
        self.refresh()

    def refresh(self) -> None:
        """Finds the files that were written since the last time, by this process or another one."""
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path in self._known:
                continue
            with suppress(OSError, RuntimeError):  # another process has just evicted it
                self.add(path)

    def add(self, path: Path, *, verified: bool = False) -> None:
        """Maps a file. At once, not when it is read: another process may evict it in between."""
        self._known.add(path)
        shard = Shard.open(path, self.format, self._mapped)
        if shard is None:
            self._discard({path})
        elif shard.from_layer <= self.format.from_layer:
            shard.verified.update(range(len(shard.keys)) if verified else ())
            self._records.update((bytes(key), (shard, row)) for row, key in enumerate(shard.keys.numpy()))

    def discard_damaged(self, keys: Iterable[bytes]) -> bool:
        """Removes the files in which a record of these keys is damaged, and says so; whether there were any."""
        damaged = {shard.path for shard, row in map(self._records.__getitem__, keys) if not shard.intact(row)}
        self._discard(damaged)
        return bool(damaged)

    def _discard(self, files: Set[Path]) -> None:
        self.forget(files)
        for file in files:
            LOG.warning("the feature file %s is damaged: what it held is computed again.", file)
            with suppress(OSError):
                file.unlink(missing_ok=True)

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

    def buffer(self, batch: int, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """Memory for a batch of records. Use it again: touching fresh memory takes longer than reading."""
        form = self.format
        pairs = (form.layers, 2, batch, form.heads, form.tokens, form.dim // form.heads)
        empty = partial(torch.empty, dtype=dtype, device=device)
        return empty(form.layers + 1, batch, form.dim), empty(pairs)

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
        tokens, pairs = (part.to(device) for part in self.copy(keys, buffer))
        return Features.of(self.format.from_layer, tokens, pairs, biases)

    def copy(self, keys: Sequence[bytes], buffer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The class tokens (layers + 1, b, dim), and the keys and values (layers, 2, b, h, n, d) of some records."""
        layers = self.format.layers
        tokens, pairs = buffer[0][:, : len(keys)], buffer[1][:, :, : len(keys)]
        for at, key in enumerate(keys):
            shard, row = self._records[key]
            # A record may start at an earlier layer: its last layers are the wanted ones.
            kept_tokens, _, kept_pairs = shard.parts()
            tokens[:, at].copy_(kept_tokens[row, -layers - 1 :])
            if layers:
                pairs[:, :, at].copy_(kept_pairs[row, -layers:])
        return tokens, pairs

    def statistics(self, keys: Sequence[bytes]) -> Tensor:
        """The pooled statistics (b, layers, statistics, dim), without the rest of the records."""
        places = [self._records[key] for key in keys]
        return torch.stack([shard.parts()[1][row] for shard, row in places])

    def files_of(self, keys: Iterable[bytes]) -> set[Path]:
        """The files that hold the records of these keys."""
        return {self._records[key][0].path for key in keys if key in self._records}

    def forget(self, files: Set[Path]) -> None:
        """Releases files that were removed."""
        self._records = {key: place for key, place in self._records.items() if place[0].path not in files}
        for file in files:
            self._mapped.pop(file, None)


class Writer:
    """Collects records and writes them to a store, a file at a time."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store
        self._limit = max(1, min(SHARD_RECORDS, SHARD_BYTES // store.format.size))
        self._records: list[tuple[bytes, Tensor, Tensor, Tensor]] = []

    def add(self, keys: Sequence[bytes], features: Features) -> None:
        for record in zip(keys, *self._store.format.pack(features), strict=True):
            self._records.append(record)
            if len(self._records) == self._limit:
                self.flush()

    def flush(self) -> None:
        """Writes what was added since the last file. The store has it from then on."""
        if not self._records:
            return
        keys, *records = zip(*self._records, strict=True)
        self._records = []
        index = (
            torch.tensor([list(key) for key in keys], dtype=torch.uint8, device="cpu"),
            torch.tensor([checksum(*record) for record in zip(*records, strict=True)], device="cpu"),
        )
        parts = zip(TENSORS, (*index, *(torch.stack(part) for part in records)), strict=True)
        data = save(dict(parts), metadata={INDEX: str(checksum(*index))})
        folder = self._store.folder
        path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        part = path.with_name(path.name + PART)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # features reveal what images show
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            self._store.add(path, verified=True)
        except (OSError, RuntimeError) as error:  # the latter if it cannot be mapped
            raise cannot_keep(folder, error) from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def cannot_keep(folder: Path, error: OSError | RuntimeError) -> CacheError:
    reason = error.strerror if isinstance(error, OSError) else error
    return CacheError(
        f"cannot cache features in {folder} ({reason}): free some space, choose another `Cache.folder`, or train with "
        "`cache=False`. Features cached so far are still valid."
    )


def evict(root: Path, needed: int, budget: float, keep: Set[Path]) -> set[Path]:
    """Removes the files that were used longest ago, of any backbone, until `needed` more bytes fit the budget.

    What other processes are writing counts, and is left alone.

    Returns what it removed: a store that has these open must forget them, or their space is not freed.
    """
    total, removed = total_bytes(root), set()
    for file, stat in sorted(_files(root).items(), key=lambda item: item[1].st_mtime):
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
