"""Which images are held out: stratified, seeded, and a pure function of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.data.augment import Purpose, order
from memoro.data.dataset import ImageSet, Skipped
from memoro.data.listing import Listing, Part, Role, encode, in_order, left_out, names_of
from memoro.data.screening import refuse_many, screen_images
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.heads import HeadKind


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


ROLES: tuple[Role, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Splits:
    """The splits of a set; None where it has none. `notes` are for the user to read before trusting a figure."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    train: ImageSet | None
    val: ImageSet | None
    test: ImageSet | None
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    """Images that could not be read, of all splits."""


def build_splits(
    listing: Listing,
    name: str,
    *,
    labels: Sequence[str] | None,
    val_fraction: float,
    fold: tuple[int, int] | None,
    seed: int,
    screen: bool,
    screened: Splits | None,
    workers: int | None,
    quiet: bool,
) -> Splits:
    """The listing's images, numbered by label, screened, and with a validation split."""
    parts = {role: listing.parts[role] for role in ROLES if role in listing.parts and len(listing.parts[role].rows)}
    if not parts:
        refuse_many(listing.skipped, len(listing.skipped), name)
        raise DataError(f"{name}: there are no images in it.")
    notes = list(listing.notes)
    names = _labels(listing, parts, labels, name)
    if labels is None and listing.kind != "regression":
        notes += _drop_unseen(parts)

    sets: dict[Role, ImageSet] = {}
    for role, part in parts.items():
        rows = np.asarray(part.rows, dtype=np.int64)
        targets = encode(part.values, names, listing.kind)
        sets[role] = ImageSet(f"{name}:{role}", names, listing.kind, part.source, rows, targets)
    skipped = list(listing.skipped)
    total = len(skipped) + sum(map(len, sets.values()))
    if screen:
        for role, images in sets.items():
            known = _known_digests(images, screened)
            if known is not None:
                sets[role] = replace(images, digests=known)
                continue
            found = screen_images(images, workers, quiet=quiet)
            sets[role] = replace(images.subset(found.good), digests=found.digests, skipped=found.skipped)
            skipped += found.skipped
    else:
        notes.append("images were not screened: duplicates are not looked for, and an unreadable image stops the run.")
    refuse_many(skipped, total, name)
    if skipped:
        notes.append(f"{left_out(len(skipped), 'unreadable image')}, such as {skipped[0].where} ({skipped[0].reason}).")

    if "train" in sets and (fold is not None or ("val" not in sets and val_fraction > 0)):
        notes += _hold_out(sets, val_fraction, fold, seed)
    if "train" in sets:
        notes += _thin_classes(sets["train"])
    notes += _duplicates(sets)
    return Splits(
        name=name,
        labels=names,
        kind=listing.kind,
        train=sets.get("train"),
        val=sets.get("val"),
        test=sets.get("test"),
        notes=tuple(notes),
        skipped=tuple(skipped),
    )


def _labels(listing: Listing, parts: dict[Role, Part], asked: Sequence[str] | None, name: str) -> tuple[str, ...]:
    """The labels in the order of their numbers: as asked for, as the source fixes them, or those of the train split."""
    if listing.kind == "regression":
        own = listing.labels or ()
        if asked is not None and len(asked) != len(own):
            raise DataError(
                f"{name}: {len(own)} numbers per image ({', '.join(own)}), but {len(asked)} were asked for."
            )
        return tuple(asked) if asked is not None else own
    present = {role: names_of(part.values) for role, part in parts.items()}
    everything = set().union(*present.values())
    if asked is not None:
        strange = in_order(everything - set(asked))
        if strange:
            raise DataError(
                f"{name}: the labels do not match the task's. Not among its {len(asked)}: {_some(strange)}; "
                f"it knows {_some(tuple(asked))}. Rename the classes, or train a task of their own."
            )
        return tuple(asked)
    names = listing.labels or in_order(present.get("train") or everything)
    if listing.kind == "softmax" and len(names) < 2:
        raise DataError(
            f"{name}: one class only ({_some(names)}); to tell it from others, add images of another class, in a "
            "folder or rows of their own."
        )
    if not names:
        raise DataError(f"{name}: not one image has a label.")
    return names


def _drop_unseen(parts: dict[Role, Part]) -> list[str]:
    """Takes out val and test images of classes without a training image: no training could ever get them right."""
    notes: list[str] = []
    if "train" not in parts:
        return notes
    seen = names_of(parts["train"].values)
    for role in [role for role in parts if role != "train"]:
        part = parts[role]
        unseen = in_order(names_of(part.values) - seen)
        if not unseen:
            continue
        keep = [at for at, value in enumerate(part.values) if names_of([value]) <= seen]
        notes.append(
            f"{left_out(len(part.rows) - len(keep), f'{role} image')}: no training image shows {_some(unseen)}."
        )
        parts[role] = Part(part.source, [part.rows[at] for at in keep], [part.values[at] for at in keep])
        if not keep:
            del parts[role]
    return notes


def _known_digests(images: ImageSet, screened: Splits | None) -> npt.NDArray[np.uint8] | None:
    """The digests of images that somebody has screened already, None unless that was all of them."""
    rows: dict[int, npt.NDArray[np.uint8]] = {}
    for other in (screened.train, screened.val, screened.test) if screened is not None else ():
        if other is not None and other.digests is not None and other.source == images.source:
            rows |= dict(zip(other.rows.tolist(), other.digests, strict=True))
    if not len(images) or not all(row in rows for row in images.rows.tolist()):
        return None
    return np.stack([rows[row] for row in images.rows.tolist()])


def hold_out(splits: Splits, fraction: float, seed: int, like: Splits | None = None) -> Splits:
    """The same with a validation split cut out of train, where there is none yet.

    Classes are those of `like`, where that has the same images: then both lose the same ones.
    """
    if splits.train is None or splits.val is not None or not fraction:
        return splits
    sets: dict[Role, ImageSet] = {"train": splits.train}
    if like is not None and like.train is not None and np.array_equal(like.train.rows, splits.train.rows):
        other: dict[Role, ImageSet] = {"train": like.train}
        notes = _hold_out(other, fraction, None, seed)
        held = np.isin(splits.train.rows, other["val"].rows) if "val" in other else None
        if held is not None:
            _cut(sets, held)
    else:
        notes = _hold_out(sets, fraction, None, seed)
    before = set(_thin_classes(splits.train))  # of all images: what is left may have fewer
    kept = [note for note in splits.notes if note not in before]
    return replace(
        splits, train=sets["train"], val=sets.get("val"), notes=(*kept, *notes, *_thin_classes(sets["train"]))
    )


def fold_numbers(train: ImageSet, folds: int, seed: int) -> npt.NDArray[np.int64]:
    """The fold in which each image is held out, -1 for never; copies of an image stay together."""
    group, leaders = _leaders(train)
    number = np.full(len(train), -1, dtype=np.int64)
    number[leaders] = stratified_folds(strata(train.targets)[leaders], folds, seed)
    return number[group]


def _leaders(images: ImageSet) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first copy of each image's content, for every image; and which images are first."""
    group = np.arange(len(images))
    if images.digests is not None:
        _, first, inverse = np.unique(_keys(images), return_index=True, return_inverse=True)
        group = first[inverse]
    return group, np.flatnonzero(group == np.arange(len(images)))


def _hold_out(sets: dict[Role, ImageSet], fraction: float, fold: tuple[int, int] | None, seed: int) -> list[str]:
    """Cuts a validation split out of train. Copies of an image stay together, or validation would ask what it told."""
    whole = sets["train"]
    notes = []
    if fold is not None and "val" in sets:
        notes.append("the set's own validation split was left out: a fold was asked for.")
    group, leaders = _leaders(whole)
    classes = strata(whole.targets)[leaders]
    if fold is None:
        held = stratified_split(classes, fraction, seed)[1]
        notes.append(f"{fraction:.0%} of train, stratified with seed {seed}, became the validation split.")
    else:
        which, folds = fold
        if not 0 <= which < folds:
            raise DataError(f"fold {which} of {folds}: count from 0 to {folds - 1}.")
        held = np.flatnonzero(stratified_folds(classes, folds, seed) == which)
        notes.append(f"fold {which} of {folds} of train, stratified with seed {seed}, became the validation split.")
    out = np.isin(group, leaders[held])
    if not out.any():
        return ["no validation split could be made: every class has a single image."]
    _cut(sets, out)
    return notes


def _cut(sets: dict[Role, ImageSet], out: npt.NDArray[np.bool_]) -> None:
    whole = sets["train"]
    sets["train"] = whole.subset(np.flatnonzero(~out))
    # What could not be read is told once, with train.
    sets["val"] = replace(whole.subset(np.flatnonzero(out)), name=whole.name.removesuffix("train") + "val", skipped=())


def _thin_classes(train: ImageSet) -> list[str]:
    if train.kind == "regression":
        return []
    count = (
        torch.bincount(train.targets, minlength=len(train.labels)) if train.kind == "softmax" else train.targets.sum(0)
    )
    one = tuple(label for label, images in zip(train.labels, count.tolist(), strict=True) if images == 1)
    none = tuple(label for label, images in zip(train.labels, count.tolist(), strict=True) if images == 0)
    return [
        f"{len(labels)} of {len(train.labels)} classes have {what} in train: {_some(labels)}."
        for labels, what in ((one, "a single image"), (none, "no image"))
        if labels
    ]


def _duplicates(sets: dict[Role, ImageSet]) -> list[str]:
    """Notes on images that stand in two splits, or under two labels."""
    notes = []
    known = {role: images for role, images in sets.items() if images.digests is not None and len(images)}
    for role, other in (("test", "train"), ("val", "train"), ("test", "val")):
        if role not in known or other not in known:
            continue
        _, here, there = np.intersect1d(_keys(known[role]), _keys(known[other]), return_indices=True)
        if len(here):
            pair = known[role].where(int(here[0])), known[other].where(int(there[0]))
            notes.append(f"{len(here)} images of {role} stand in {other} too, such as {pair[0]} = {pair[1]}.")
    if "train" in known and known["train"].kind == "softmax":
        train = known["train"]
        pairs = np.stack([np.unique(_keys(train), return_inverse=True)[1], train.targets.numpy()], axis=1)
        _, labels_of = np.unique(np.unique(pairs, axis=0)[:, 0], return_counts=True)
        if (labels_of > 1).any():
            notes.append(f"{int((labels_of > 1).sum())} images stand under two labels or more in train.")
    return notes


def _keys(images: ImageSet) -> npt.NDArray[np.bytes_]:
    assert images.digests is not None
    return np.ascontiguousarray(images.digests).view("S32").ravel()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
