"""Checks of a dataset's images: every one is decoded once, before hours are spent on training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memoro.console import bar
from memoro.data.dataset import ImageSet, Skipped
from memoro.data.near import HASH_BYTES, hash_look
from memoro.data.workers import WorkerPool, shared_pool, worker_count
from memoro.errors import ImageError
from memoro.images import Levels, open_image

_CHUNK = 64
_DRAFT = 64  # JPEGs are decoded at a fraction of their size: every byte is read all the same


def drop_unreadable(sets: Sequence[ImageSet], workers: int | None = None, *, quiet: bool = False) -> list[ImageSet]:
    """Of each set the images that can be decoded, with their hashes; `skipped` lists the others."""
    pool = shared_pool()
    checks = [_Check(images) for images in sets]
    for check in checks:
        pool.register(check)  # so that the same worker processes serve all sets
    return [_drop_unreadable(check, pool, workers, quiet) for check in checks]


def _drop_unreadable(check: _Check, pool: WorkerPool, workers: int | None, quiet: bool) -> ImageSet:
    images = check.images
    chunks = [range(at, min(at + _CHUNK, len(images))) for at in range(0, len(images), _CHUNK)]
    results = pool.imap(check, chunks, worker_count(workers, len(images)))
    good: list[int] = []
    hashes: list[bytes] = []
    levels: Levels | None = None
    skipped: list[Skipped] = []
    with bar(f"checking {images.name}", len(images), quiet=quiet) as advance:
        for chunk, outcomes in results:
            for at, outcome in zip(chunk, outcomes, strict=True):
                if isinstance(outcome, str):
                    skipped.append(Skipped(images.where(at), outcome))
                    continue
                good.append(at)
                hashes.append(outcome[0])
                levels = levels if outcome[1] is None else outcome[1].join(levels)
            advance(len(chunk))
    table = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), 32 + HASH_BYTES)
    digests, looks = table[:, :32], table[:, 32:]
    return replace(images.subset(good), digests=digests, looks=looks, levels=levels, skipped=tuple(skipped))


@dataclass(frozen=True, eq=False)
class _Check:
    """For a chunk of positions, each image's SHA-256 and look, and its levels if it has more than 8 bits; or the reason
    why it cannot be read."""

    images: ImageSet

    def __call__(self, chunk: range) -> list[tuple[bytes, Levels | None] | str]:
        return [self._check(at) for at in chunk]

    def _check(self, at: int) -> tuple[bytes, Levels | None] | str:
        where, levels = self.images.where(at), list[Levels]()

        def own_white(found: Levels) -> float:  # the data set's is known once all images have been read
            levels.append(found)
            return found.white

        try:
            data = self.images.read(at)
            image = open_image(data, draft=_DRAFT, name=where, white=own_white)
        except ImageError as error:
            return str(error).removeprefix(f"{where}: ").rstrip(".")
        return hashlib.sha256(data).digest() + hash_look(image), levels[0] if levels else None
