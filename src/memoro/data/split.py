"""Which images are held out: stratified, seeded, and a pure function of what it is given."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from memoro.data.draws import Purpose, order
from memoro.errors import DataError

Index = npt.NDArray[np.int64]

_BINS = 10


def strata(targets: Tensor) -> Index:
    """One group per image: its class, its rarest label (multilabel: 0/1 rows), or a tenth of the numbers' range."""
    if targets.ndim == 1:
        return np.asarray(targets.numpy(), dtype=np.int64)
    values = targets.numpy()
    if len(values) and np.isin(values, (0.0, 1.0)).all():
        rarity = np.where(values > 0, values.sum(axis=0), np.inf)
        return np.where(values.any(axis=1), rarity.argmin(axis=1), -1).astype(np.int64)
    ranks = np.argsort(np.argsort(values[:, 0], kind="stable"), kind="stable")
    return (ranks * _BINS // max(len(values), 1)).astype(np.int64)


def stratified_split(groups: Index, fraction: float, seed: int) -> tuple[Index, Index]:
    """(kept, held out) positions, in order: about `fraction` of every group is held out.

    A group never loses its last image, so one with a single image is kept. What rounding leaves over goes to the
    groups that are owed most.
    """
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"a held-out fraction of {fraction} makes no sense: choose one from 0 up to, but not, 1.")
    groups = np.asarray(groups, dtype=np.int64)
    shuffled = _by_group(groups, seed)
    names, counts = np.unique(groups, return_counts=True)
    owed = counts * fraction
    take = np.minimum(np.floor(owed).astype(np.int64), counts - 1)
    free = counts - 1 - take
    left = min(round(float(owed.sum())) - int(take.sum()), int(free.sum()))
    if fraction > 0 and take.sum() == 0 and free.sum() > 0:
        left = max(left, 1)
    # Ties between groups are broken by lot: the alphabet must not decide which classes are measured.
    lot = order(len(names), seed, Purpose.SPLIT, epoch=1)
    for position in sorted(range(len(names)), key=lambda at: (take[at] - owed[at], lot[at])):
        if left > 0 and free[position] > 0:
            take[position] += 1
            left -= 1
    held = np.zeros(len(groups), dtype=bool)
    start = 0
    for count, taken in zip(counts, take, strict=True):
        held[shuffled[start : start + taken]] = True
        start += count
    return np.flatnonzero(~held), np.flatnonzero(held)


def stratified_folds(groups: Index, folds: int, seed: int) -> Index:
    """The fold (0 to folds - 1) in which each image is held out; -1 for a group's only image, which never is."""
    groups = np.asarray(groups, dtype=np.int64)
    if folds < 2 or folds > len(groups):
        raise DataError(f"{folds} folds of {len(groups)} images: choose a number from 2 to {max(len(groups), 2)}.")
    fold = np.full(len(groups), -1, dtype=np.int64)
    shuffled = _by_group(groups, seed)
    _, counts = np.unique(groups, return_counts=True)
    several = shuffled[np.repeat(counts > 1, counts)]
    # Dealt like cards through all groups, so that both groups and folds come out even.
    fold[several] = np.arange(len(several)) % folds
    return fold


def _by_group(groups: Index, seed: int) -> Index:
    """All positions, sorted by group, in random order within each."""
    shuffled = order(len(groups), seed, Purpose.SPLIT)
    return shuffled[np.argsort(groups[shuffled], kind="stable")]
