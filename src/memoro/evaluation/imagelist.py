"""The images of a bulk prediction, listed when it begins: a line for each shard, in a file beside the answers.

So a source may gain and lose images while it is answered, and each image has its rows once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memoro.data.unlabelled import Key, Unlabelled
from memoro.errors import DataError
from memoro.files import open_whole

IMAGES = "_images.list"
"""Readers of Parquet folders leave out names with an underscore, and no other reader knows the suffix."""

Hashes = npt.NDArray[np.uint64]


class Shard(NamedTuple):
    """The unit of work: consecutive images, whose answers are one file."""

    number: int
    keys: Sequence[Key]


def cut_shards(keys: Iterable[Key], size: int, first: int = 0) -> Iterator[Shard]:
    """The images in shards, numbered from `first` on. Only the keys of one are in memory."""
    rest = iter(keys)
    while some := list(islice(rest, size)):
        yield Shard(first, some)
        first += 1


def write_list(path: Path, shards: Iterable[Shard]) -> None:
    """Writes the list; an error if it would be empty."""
    with open_whole(path) as file:
        for shard in shards:
            file.write(json.dumps(shard.keys).encode() + b"\n")
        if not file.tell():
            raise DataError("the source contains no images.")


def read_list(path: Path) -> Iterator[Shard]:
    """All shards of a job, in order."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                keys = [tuple(key) if isinstance(key, list) else key for key in json.loads(line)]
                yield Shard(number, keys)
    except (OSError, ValueError, TypeError):
        raise DataError(f"{path} is missing or damaged: choose another folder.") from None


def update_list(path: Path, source: Unlabelled, size: int, done: Collection[int]) -> list[str]:
    """Makes the list of an earlier run that of the source as it is now; returns what has changed, for the user.

    Shards that are `done` stay. What is new gets shards of its own; what is gone leaves those that are not done.
    """
    listed = _hash_all(key for shard in read_list(path) for key in shard.keys)
    present = _hash_all(source.keys())
    if np.array_equal(listed, present):
        return []
    new, gone, answered = _Some(), _Some(), _Some()

    def update() -> Iterator[Shard]:
        number = -1
        for number, keys in read_list(path):
            missing = _outside(keys, present)
            gone.add(missing)
            if number in done:
                answered.add(missing)
            dropped = set() if number in done else set(missing)
            yield Shard(number, [key for key in keys if key not in dropped])
        added = (key for shard in cut_shards(source.keys(), size) for key in _outside(shard.keys, listed))
        for shard in cut_shards(added, size, number + 1):
            new.add(shard.keys)
            yield shard

    write_list(path, update())
    told = [f"New since this job began: {new}."] if new.count else []
    if gone.count:
        rest = f"; rows stay for {answered.count} of them" if answered.count else ""
        told.append(f"Gone since this job began: {gone}{rest}.")
    return told


class _Some:
    """How many images, and one of them."""

    def __init__(self) -> None:
        self.count, self.example = 0, ""

    def add(self, keys: Sequence[Key]) -> None:
        if keys and not self.count:
            self.example = str(keys[0][1] if isinstance(keys[0], tuple) else keys[0])
        self.count += len(keys)

    def __str__(self) -> str:
        return f"1 image ({self.example})" if self.count == 1 else f"{self.count} images, such as {self.example}"


def _hash_keys(keys: Sequence[Key]) -> Hashes:
    """A number for each: millions of them fit in memory."""
    digests = (hashlib.blake2b(repr(key).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), np.uint64)


def _hash_all(keys: Iterable[Key]) -> Hashes:
    parts = [_hash_keys(shard.keys) for shard in cut_shards(keys, 8192)]
    return np.sort(np.concatenate([np.empty(0, np.uint64), *parts]))


def _outside(keys: Sequence[Key], known: Hashes) -> list[Key]:
    """The keys whose hashes are not among the sorted ones."""
    if not len(known):
        return list(keys)
    hashes = _hash_keys(keys)
    at = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return [key for key, same in zip(keys, known[at] == hashes, strict=True) if not same]
