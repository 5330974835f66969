"""Random numbers that depend on nothing but their address: seed, purpose, epoch, sample."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """Keeps the draws of one use apart from those of another under the same seed."""

    AUGMENT = 1
    ORDER = 2
    SPLIT = 3
    STREAM = 4


def raw(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit words of a counter-based generator: same address, same words, in any process.

    Only raw words are used, since numpy promises those, and not its distributions, for all its versions.
    """
    key = np.array([seed & _MASK, purpose], dtype=np.uint64)
    counter = np.array([0, sample & _MASK, epoch & _MASK, 0], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key, counter=counter).random_raw(count), dtype=np.uint64)


def uniform(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.float64]:
    """`count` numbers from [0, 1)."""
    return (raw(count, seed, purpose, epoch, sample) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.int64]:
    """The numbers 0 to count - 1, shuffled."""
    return np.argsort(raw(count, seed, purpose, epoch, sample), kind="stable").astype(np.int64)
