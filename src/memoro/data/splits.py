"""Splits of a dataset. Which images are held out is stratified, seeded, and a pure function of its arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from memoro.console import format_count
from memoro.data.columns import (
    Annotation,
    RawDataset,
    RawSplit,
    check_numbers,
    encode,
    first_few,
    labels_in,
    left_out,
    sort_labels,
)
from memoro.data.dataset import SPLITS, DataOptions, ImageSet, SplitName, Splits, as_rows, digest_keys, refuse_many
from memoro.data.screening import drop_unreadable, first_copies, near_groups
from memoro.errors import DataError
from memoro.images import Levels
from memoro.images.augment import Purpose, order

Index = npt.NDArray[np.int64]

_BINS = 10
_BIN_IMAGES = 4
"""Numbers of a bin, at least, so that some can be held out."""

ENOUGH = 10
"""Images that a class should have."""
SINGLE_IMAGES = "no validation split could be made: every class has a single image."


def strata(targets: Tensor) -> Index:
    """One group per image: its class, its rarest label (multilabel: 0/1 rows), or a tenth of the numbers' range."""
    if targets.ndim == 1:
        return np.asarray(targets.numpy(), dtype=np.int64)
    values = targets.numpy()
    if len(values) and np.isin(values, (0.0, 1.0)).all():
        rarity = np.where(values > 0, values.sum(axis=0), np.inf)
        return np.where(values.any(axis=1), rarity.argmin(axis=1), -1).astype(np.int64)
    ranks = np.argsort(np.argsort(values[:, 0], kind="stable"), kind="stable")
    bins = max(1, min(_BINS, len(values) // _BIN_IMAGES))
    return (ranks * bins // max(len(values), 1)).astype(np.int64)


def stratified_split(groups: Index, fraction: float, seed: int, sizes: Index | None = None) -> tuple[Index, Index]:
    """(kept, held out) positions, in order: about `fraction` of every group is held out.

    A group never loses its last image, so one with a single image is kept. What rounding leaves over is taken from
    the groups with the largest remainders. With `sizes`, each position stands for that many images which stay together.
    """
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"the held-out fraction is {fraction}: choose one from 0 to below 1.")
    groups, sizes = _sized(groups, sizes)
    parts = _by_group(groups, seed)
    counts, least = (np.array([pick(sizes[part]) for part in parts], dtype=np.int64) for pick in (np.sum, np.min))
    most = counts - least
    owed = counts * fraction
    take = np.minimum(np.floor(owed).astype(np.int64), most)
    free = most - take
    left = min(round(float(owed.sum())) - int(take.sum()), int(free.sum()))
    if fraction > 0 and take.sum() == 0 and free.sum() > 0:
        left = max(left, 1)
    # Ties between groups are broken at random: the alphabet must not decide which classes are measured.
    tie = order(len(parts), seed, Purpose.SPLIT, epoch=1)
    for position in sorted(range(len(parts)), key=lambda at: (take[at] - owed[at], tie[at])):
        if left > 0 and free[position] > 0:
            take[position] += 1
            left -= 1
    held = np.zeros(len(groups), dtype=bool)
    for part, wanted in zip(parts, take.tolist(), strict=True):
        rest = wanted
        for at in part:
            if sizes[at] <= rest:
                held[at] = True
                rest -= sizes[at]
        if rest == wanted > 0:  # none is as small as that
            held[part[sizes[part].argmin()]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def stratified_folds(groups: Index, folds: int, seed: int, sizes: Index | None = None) -> Index:
    """The fold (0 to folds - 1) in which each image is held out; -1 for a group's only image, which never is.

    `sizes` as for `stratified_split`.
    """
    groups, sizes = _sized(groups, sizes)
    if folds < 2 or folds > len(groups):
        raise DataError(f"{folds} folds of {len(groups)} images: choose a number from 2 to {max(len(groups), 2)}.")
    fold = np.full(len(groups), -1, dtype=np.int64)
    total = [0] * folds
    for part in _by_group(groups, seed):
        own = [0] * folds
        # The largest first, each to the fold with the fewest images, so that both groups and folds come out even.
        for at in part[np.argsort(-sizes[part], kind="stable")] if len(part) > 1 else ():
            fold[at] = fewest = min(range(folds), key=lambda number: (own[number], total[number]))
            own[fewest] += int(sizes[at])
            total[fewest] += int(sizes[at])
    return fold


def _sized(groups: Index, sizes: Index | None) -> tuple[Index, Index]:
    groups = np.asarray(groups, dtype=np.int64)
    return groups, np.ones(len(groups), dtype=np.int64) if sizes is None else sizes


def _by_group(groups: Index, seed: int) -> list[Index]:
    """The positions of each group, in random order."""
    shuffled = order(len(groups), seed, Purpose.SPLIT)
    several = shuffled[np.argsort(groups[shuffled], kind="stable")]
    return np.split(several, np.flatnonzero(np.diff(groups[several])) + 1) if len(groups) else []


def build_splits(raw: RawDataset, name: str, options: DataOptions, checked: Splits | None = None) -> Splits:
    """The dataset with numbered labels, without unreadable images, and with a validation split.

    Images that `checked` has as well are not decoded again.
    """
    parts = {split: raw.splits[split] for split in SPLITS if split in raw.splits and len(raw.splits[split].rows)}
    if not parts:
        refuse_many(raw.skipped, len(raw.skipped), name, 0)
        raise DataError(" ".join([f"{name} contains no images.", *raw.notes]))
    if options.measured_only:
        measured = next(split for split in reversed(SPLITS) if split in parts)
        parts = {measured: parts[measured]}
    notes = list(raw.notes)
    unknown: dict[str, dict[str, int]] = {}
    if options.drop_unknown and options.labels is not None and raw.kind != "regression":
        unknown = _drop_unknown(parts, set(options.labels))
    labels = _labels(raw, parts, options.labels, name)
    if raw.kind == "regression":
        notes += check_numbers(raw.labels or (), labels, name)
    if options.labels is None and raw.kind != "regression" and "train" in parts:
        notes += _drop_unseen(parts)
    sets: dict[SplitName, ImageSet] = {}
    for split, part in parts.items():
        rows, targets = as_rows(part.rows), encode(part.annotations, labels, raw.kind)
        sets[split] = ImageSet(f"{name}:{split}", labels, raw.kind, part.source, rows, targets)
    alike: dict[str, list[str]] = {}
    for label in labels if raw.kind != "regression" else ():
        alike.setdefault(" ".join(label.casefold().split()), []).append(label)
    for spellings in alike.values():
        if len(spellings) > 1:
            same = " and ".join(map(repr, spellings))
            notes.append(
                f"warning: the labels {same} differ in case or spaces only: if they mean one class, merge them."
            )
    total = len(raw.skipped) + sum(map(len, sets.values()))
    if options.screen:
        known = {split: _known_images(images, checked) for split, images in sets.items()}
        new = [split for split in sets if known[split] is None]
        with options.phases.during("checking"):
            parts_of = [sets[split] for split in new]
            readable = drop_unreadable(parts_of, options.workers, quiet=options.quiet, cache=options.cache)
        sets |= {split: images for split, images in known.items() if images is not None}
        sets |= dict(zip(new, readable, strict=True))
        levels = next((images.levels for images in sets.values() if images.levels is not None), None)  # train is first
        sets = {split: replace(images, levels=levels) for split, images in sets.items()}
        notes += [] if levels is None else _deep_images(levels)
    else:
        notes.append("images were not screened: duplicates are not found, and an unreadable image stops the run.")
    skipped = (*raw.skipped, *(skip for images in sets.values() for skip in images.skipped))
    refuse_many(skipped, total, name, options.max_unreadable)
    if skipped:
        notes.append(f"{left_out(len(skipped), 'unreadable image')}, such as {skipped[0].where} ({skipped[0].reason}).")
    train, val, test = map(sets.get, SPLITS)
    notes += [] if train is None or options.drop_unknown else _rare_classes(train)  # nothing is learned from those
    splits = Splits(name, labels, raw.kind, train, val, test, tuple(notes), skipped, unknown)
    splits = hold_out(splits, options.val_fraction, options.seed)
    return replace(splits, notes=(*splits.notes, *_duplicates(splits)))


def _labels(
    raw: RawDataset, parts: dict[SplitName, RawSplit], asked: Sequence[str] | None, name: str
) -> tuple[str, ...]:
    """The labels in the order of their numbers: as asked for, as the source fixes them, or those of the train split."""
    if raw.kind == "regression":
        return raw.labels or () if asked is None else tuple(asked)
    present = {split: labels_in(part.annotations) for split, part in parts.items()}
    everything = set().union(*present.values())
    if asked is not None:
        unknown = sort_labels(everything - set(asked))
        if unknown:
            raise DataError(
                f"{name}: the data has labels that the task does not have: {first_few(unknown)}. The task's labels are "
                f"{first_few(tuple(asked))}. Rename the labels, or train a new task."
            )
        return tuple(asked)
    labels = raw.labels or sort_labels(present.get("train") or everything)
    if raw.kind == "softmax" and len(labels) < 2:
        raise DataError(
            f"{name}: only one class was found ({first_few(labels)}), but training needs at least two. Add a folder, "
            "or rows of a table, for another class. If the labels are in a table, pass that file instead of the folder."
        )
    if not labels:
        raise DataError(f"{name}: no image has a label.")
    return labels


def _drop_unknown(parts: dict[SplitName, RawSplit], known: set[str]) -> dict[str, dict[str, int]]:
    """Removes unknown labels, and images of an unknown class; nothing if no label is known.

    Returns for each split how many images had each of these labels.
    """
    if not any(known & labels_in(part.annotations) for part in parts.values()):
        return {}
    unknown: dict[str, dict[str, int]] = {}
    for split, part in list(parts.items()):
        counts = Counter(label for one in part.annotations for label in labels_in([one]) - known)
        unknown[split] = {label: counts[label] for label in sort_labels(set(counts))}
        rows: list[Any] = []
        annotations: list[Annotation] = []
        for row, one in zip(part.rows, part.annotations, strict=True):
            if not isinstance(one, str) or one in known:
                rows.append(row)
                annotations.append(one if isinstance(one, str) else tuple(str(name) for name in one if name in known))
        parts[split] = RawSplit(part.source, rows, annotations)
        if not rows:
            del parts[split]
    return unknown


def _drop_unseen(parts: dict[SplitName, RawSplit]) -> list[str]:
    """Removes val and test images of classes without a training image: no training could ever get them right."""
    notes: list[str] = []
    seen = labels_in(parts["train"].annotations)
    for split in [split for split in parts if split != "train"]:
        part = parts[split]
        unseen = sort_labels(labels_in(part.annotations) - seen)
        if not unseen:
            continue
        keep = [at for at, annotation in enumerate(part.annotations) if labels_in([annotation]) <= seen]
        dropped = left_out(len(part.rows) - len(keep), f"{split} image")
        known = {label.casefold() for label in seen}
        warning = "warning: " if any(label.casefold() in known for label in unseen) else ""  # Red and red
        notes.append(f"{warning}{dropped}: there are no training images of {first_few(unseen)}.")
        parts[split] = RawSplit(part.source, [part.rows[at] for at in keep], [part.annotations[at] for at in keep])
        if not keep:
            del parts[split]
    return notes


def _known_images(images: ImageSet, checked: Splits | None) -> ImageSet | None:
    """The images with their hashes if all have been checked already, else None."""
    known: dict[Any, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = {}
    levels: Levels | None = None
    for other in (checked.train, checked.val, checked.test) if checked is not None else ():
        if other is not None and other.source == images.source and other.digests is not None:
            assert other.looks is not None
            levels = other.levels if levels is None else levels
            known |= dict(zip(other.rows.tolist(), zip(other.digests, other.looks, strict=True), strict=True))
    rows = images.rows.tolist()
    if not rows or not all(row in known for row in rows):
        return None
    digests, looks = (np.stack(column) for column in zip(*(known[row] for row in rows), strict=True))
    return replace(images, digests=digests, looks=looks, levels=levels)


def hold_out(splits: Splits, fraction: float, seed: int, *, like: Splits | None = None) -> Splits:
    """The same with a fraction of train as the validation split, if there is none yet.

    If `like` has the same training images, its labels decide, so that both hold out the same ones.
    """
    train = by = splits.train
    if train is None or by is None or splits.val is not None or not fraction:
        return splits
    if like is not None and like.train is not None and np.array_equal(like.train.rows, train.rows):
        by = like.train
    outdated = _rare_classes(train)  # train is about to have fewer images
    notes = [note for note in splits.notes if note not in outdated]
    near = near_groups(by)
    _, first, sizes = np.unique(near.numbers, return_index=True, return_counts=True)
    chosen = stratified_split(strata(by.targets)[first], fraction, seed, sizes)[1]
    held, val = np.isin(near.numbers, chosen), None
    if held.any():
        notes += [f"{fraction:.0%} of train (stratified, seed {seed}) became the validation split.", *near.notes]
        # Unreadable images are listed once, with train.
        val = replace(train.subset(np.flatnonzero(held)), name=train.name.removesuffix("train") + "val", skipped=())
        train = train.subset(np.flatnonzero(~held))
    else:
        notes.append(SINGLE_IMAGES)
    return replace(splits, train=train, val=val, notes=(*notes, *_rare_classes(train)))


def fold_numbers(train: ImageSet, folds: int, seed: int) -> Index:
    """The fold in which each image is held out, -1 for never; copies and near-duplicates are in the same fold."""
    numbers = near_groups(train).numbers
    _, first, sizes = np.unique(numbers, return_index=True, return_counts=True)
    return stratified_folds(strata(train.targets)[first], folds, seed, sizes)[numbers]


def _rare_classes(train: ImageSet) -> list[str]:
    """Notes on classes with three training images or fewer, which is hardly enough to learn from, or none."""
    if train.kind == "regression":
        return []
    counts = train.targets.bincount(minlength=len(train.labels)) if train.kind == "softmax" else train.targets.sum(0)
    notes = []
    for low, high, what in ((2, 3, "two or three images"), (1, 1, "a single image"), (0, 0, "no image")):
        labels = [label for label, count in zip(train.labels, counts.tolist(), strict=True) if low <= count <= high]
        if labels:
            have = "has" if len(labels) == 1 else "have"
            text = f"{len(labels)} of {len(train.labels)} classes {have} {what} in train: {first_few(labels)}."
            text += f" Aim for {ENOUGH} or more of each." if high else ""
            notes.append(f"warning: {text}" if high == 1 else text)
    return notes


def _deep_images(levels: Levels) -> list[str]:
    """Notes on images of more than 8 bits: one value is white in all of them."""
    notes = [
        f"{format_count(levels.images, 'image')} with more than 8 bits per pixel, values from {levels.low:,.6g} to "
        f"{levels.high:,.6g}: a task that is trained on these takes 0 as black and {levels.white:,.6g} as white."
    ]
    if 0 < levels.floats < levels.images:
        notes.append(f"warning: {levels.floats} of these contain floats, the others integers, on one scale.")
    return notes


def _duplicates(splits: Splits) -> list[str]:
    """Notes on images that are in two splits, or under two labels."""
    notes = []
    sets = {"train": splits.train, "val": splits.val, "test": splits.test}
    known = {split: images for split, images in sets.items() if images and images.digests is not None}
    for split, other in (("test", "train"), ("val", "train"), ("test", "val")):
        if split not in known or other not in known:
            continue
        own, others = digest_keys(known[split]), digest_keys(known[other])
        here = np.flatnonzero(np.isin(own, others))
        if len(here):
            there = int(np.flatnonzero(others == own[here[0]])[0])
            pair = known[split].where(int(here[0])), known[other].where(there)
            count = f"{format_count(len(here), 'image')} of {split} {'is' if len(here) == 1 else 'are'}"
            rest = " A training is scored without these." if (split, other) == ("test", "train") else ""
            notes.append(f"{count} in {other} too, such as {pair[0]} = {pair[1]}.{rest}")
    train = known.get("train")
    if train is not None and train.kind == "softmax":
        pairs = np.stack([first_copies(train), train.targets.numpy()], axis=1)
        _, labels = np.unique(np.unique(pairs, axis=0)[:, 0], return_counts=True)
        if (labels > 1).any():
            first = np.unique(np.unique(pairs, axis=0)[:, 0])[labels > 1]
            where = first_few([train.where(int(at)) for at in first])
            notes.append(f"{format_count(len(first), 'image')} with two or more labels in train: {where}.")
    return notes
