"""Files of kept features: what a record holds, and how files are mapped and checked."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memoro.engine.streams import Features
from memoro.errors import CacheError

if TYPE_CHECKING:
    from memoro.engine.featurestore import FeatureStore

StoreDtype = Literal["float16", "bfloat16", "float32"]

MOST_MAPPED = 4096
"""Files that a process maps at a time: the kernel allows some 65,000, and a file may hold a single large record."""
KEY_BYTES = 32
TENSORS = ("keys", "checksums", "tokens", "pooled", "pairs")
INDEX = "index checksum"
"""The name of the first two tensors' checksum: they are checked when a file is opened, records when they are read."""
SHARE = 0.5
"""Of a GPU's free memory: the rest is for training."""
BLOCK = 64
"""Records that are copied at once."""


@dataclass(frozen=True)
class RecordFormat:
    """One image's record: the class token that enters each kept layer (at least the last one) and the final one, all
    keys and values, and pooled statistics. From the last layer on there are no keys and values, which take by far the
    most space."""

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

    def tensors(self, records: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of what a file of this many records holds, in the order of `TENSORS`."""
        # The few class tokens stay exact: a head reads nothing else.
        return [
            (torch.uint8, (records, KEY_BYTES)),
            (torch.int64, (records,)),
            (torch.float32, (records, max(self.layers, 1) + 1, self.dim)),
            (torch.float16, (records, self.depth - self.pool_from, self.statistics, self.dim)),
            (getattr(torch, self.dtype), (records, self.layers, 2, self.heads, self.tokens, self.dim // self.heads)),
        ]

    @property
    def size(self) -> int:
        """Bytes of a record with its key and checksum."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors(1))

    def pack(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Class tokens (b, layers + 1, dim), statistics (b, layers, statistics, dim), and keys and values
        (b, layers, 2, h, n, d), as they are stored.

        Without layers there are two tokens.
        """
        *_, (token_dtype, _), (pooled_dtype, _), (pair_dtype, pair_shape) = self.tensors(len(features.token))
        assert features.pooled is not None
        entering = [layer.token for layer in features.layers]
        if not entering and features.entering is not None:
            entering = [features.entering]
        tokens = torch.stack([*entering, features.token], dim=1)
        pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in features.layers]
        both = torch.stack(pairs, dim=1) if pairs else tokens.new_zeros(pair_shape)
        limit = torch.finfo(pooled_dtype).max
        pooled = features.pooled.clamp(-limit, limit)
        packed = tokens.to("cpu", token_dtype), pooled.to("cpu", pooled_dtype), both.to("cpu", pair_dtype)
        if not all(bool(torch.isfinite(part).all()) for part in packed):
            raise CacheError(
                f"the backbone's features do not fit into {self.dtype}: choose `Cache.dtype` bfloat16 or float32, "
                "or train with `cache=False`."
            )
        return packed


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of records, mapped from disk: nothing is read before it is used. The mapping outlives the file, for the
    `MOST_MAPPED` files that were used last."""

    path: Path
    from_layer: int
    keys: Tensor
    checksums: Tensor
    mapped: Mapped
    verified: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, format: RecordFormat, mapped: Mapped) -> Shard | None:
        """The records of a file that have this format, from whatever layer on; None if the file is damaged."""
        found = _read_file(path)
        if found is None:
            return None
        parts, index = found
        kinds = [(part.dtype, tuple(part.shape)) for part in parts]
        for layer in range(format.depth + 1):
            if kinds == replace(format, from_layer=layer).tensors(parts[0].numel() // KEY_BYTES):
                if index != str(checksum(*parts[:2])):
                    return None
                keys, checksums = (part.clone() for part in parts[:2])
                shard = cls(path, layer, keys, checksums, mapped)
                shard._keep(parts[2:])
                return shard
        return None

    def parts(self) -> Sequence[Tensor]:
        """Its class tokens, statistics, and keys and values, by record. An OSError where the file is gone."""
        found = self.mapped.get(self.path)
        if found is not None:
            self.mapped.move_to_end(self.path)
            return found
        again = _read_file(self.path)
        if again is None or not torch.equal(again[0][0], self.keys):
            raise FileNotFoundError(self.path)
        return self._keep(again[0][2:])

    def _keep(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        self.mapped[self.path] = parts
        if len(self.mapped) > MOST_MAPPED:
            self.mapped.popitem(last=False)
        return parts

    def intact(self, row: int) -> bool:
        """Whether a record is what was written. It is checked once: later reads cost nothing more."""
        try:
            parts = self.parts()
        except (OSError, RuntimeError):  # evicted by another process while it was not mapped
            return False
        if row not in self.verified and checksum(*(part[row] for part in parts)) == self.checksums[row]:
            self.verified.add(row)
        return row in self.verified


Mapped = OrderedDict[Path, Sequence[Tensor]]
"""The tensors of files, those that were used last at the end."""


def _read_file(path: Path) -> tuple[list[Tensor], str | None] | None:
    """The tensors of a file, mapped, and the checksum of its index; None if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return [file.get_tensor(name) for name in TENSORS], (file.metadata() or {}).get(INDEX)
    except SafetensorError:
        return None


def checksum(*parts: Tensor) -> int:
    """CRC-32 of some tensors' bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part.view(torch.uint8).numpy().data, value)
    return value


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that features may take; none on other devices, where the files are in memory already."""
    return int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def resident_bytes(store: FeatureStore, records: int, dtype: torch.dtype) -> int:
    """What so many records take in memory."""
    numbers = sum(part.numel() for part in store.buffer(1, dtype, torch.device("meta")))
    return records * numbers * dtype.itemsize


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
