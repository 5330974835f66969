"""Checks of a dataset's images: every one is decoded once, before hours are spent on training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Generator
from torch.utils.data import DataLoader, Dataset

from memoro.console import bar, plain_console
from memoro.data.dataset import ImageSet, Skipped, open_encoded
from memoro.errors import DataError, ImageError

MAX_UNREADABLE = 0.05

_CHUNK = 64
_SMALL = 512  # below this, starting processes takes longer than the work
_DRAFT = 64  # JPEGs are decoded at a fraction of their size: every byte is read all the same


def check_images(images: ImageSet, workers: int | None = None, *, quiet: bool = False) -> list[Skipped]:
    """The images that cannot be read, and why. More than 5 % of them is an error that lists the first."""
    skipped = list(drop_unreadable(images, workers, quiet=quiet).skipped)
    refuse_many(skipped, len(images), images.name)
    return skipped


def drop_unreadable(images: ImageSet, workers: int | None = None, *, quiet: bool = False) -> ImageSet:
    """The images that can be decoded, with their digests; `skipped` lists the others."""
    chunks = [range(at, min(at + _CHUNK, len(images))) for at in range(0, len(images), _CHUNK)]
    results: DataLoader[Any] = DataLoader(
        _CheckDataset(images),
        batch_size=None,
        sampler=chunks,
        num_workers=worker_count(workers, len(images)),
        generator=Generator(),  # its own: drawing from the global one would change the user's random numbers
    )
    good: list[int] = []
    digests: list[bytes] = []
    skipped: list[Skipped] = []
    quiet = quiet or not plain_console(stderr=True).is_terminal
    with bar(f"checking {images.name}", len(images), quiet=quiet) as advance:
        for chunk, outcomes in zip(chunks, results, strict=True):
            for at, outcome in zip(chunk, outcomes, strict=True):
                if isinstance(outcome, bytes):
                    good.append(at)
                    digests.append(outcome)
                else:
                    skipped.append(Skipped(images.where(at), outcome))
            advance(len(chunk))
    table = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), 32)
    return replace(images.subset(good), digests=table, skipped=tuple(skipped))


def refuse_many(skipped: Sequence[Skipped], total: int, name: str) -> None:
    """An error if more than 5 % of `total` images, the skipped ones among them, cannot be read."""
    if len(skipped) <= MAX_UNREADABLE * total:
        return
    first = "".join(f"\n  {where}: {reason}" for where, reason in skipped[:5])
    more = f"\n  and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    raise DataError(
        f"{name}: {len(skipped)} of {total} images cannot be read, more than {MAX_UNREADABLE:.0%}; "
        f"repair or remove them:{first}{more}"
    )


def worker_count(workers: int | None, images: int) -> int:
    """The number of worker processes: as asked, or one per core (eight at most), or none for a small dataset."""
    if workers is not None:
        if workers < 0:
            raise DataError(f"{workers} workers: choose 0 (decode in this process) or more.")
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if images < _SMALL else min(cores, 8)


class _CheckDataset(Dataset[Any]):
    """For a chunk of positions, each image's SHA-256 or the reason why it cannot be read."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __getitem__(self, chunk: range) -> list[bytes | str]:
        return [self._check(at) for at in chunk]

    def _check(self, at: int) -> bytes | str:
        where = self.images.where(at)
        try:
            data = self.images.read(at)
            open_encoded(data, where, _DRAFT)
        except ImageError as error:
            return str(error).removeprefix(f"{where}: ").rstrip(".")
        return hashlib.sha256(data).digest()
