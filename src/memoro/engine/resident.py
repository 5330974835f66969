"""Kept features in a GPU's memory, if they fit: an epoch then reads neither disk nor host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memoro.engine.featurestore import FeatureStore
from memoro.engine.streams import Features

SHARE = 0.5
"""Of a GPU's free memory: the rest is for training."""
BLOCK = 64
"""Records that are copied at once."""


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
