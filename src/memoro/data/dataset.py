"""Datasets of encoded images that are read one by one, their splits, and the options to load them with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memoro.clock import Phases
from memoro.data.source import NO_FILE, Source, read_bytes
from memoro.errors import DataError
from memoro.heads import HeadKind, find_kind
from memoro.images import Draft, Levels, NamedPicture, open_image
from memoro.options import option

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")

MAX_UNREADABLE = 0.05

ClassFolder = Literal["outer", "inner"]


class DataSettings(TypedDict, total=False):
    """The fields of DataOptions as keyword arguments; a test compares them."""

    split: str | None
    kind: Literal["class", "labels", "number"] | HeadKind | None
    image_column: str | None
    label_column: str | Sequence[str] | None
    task: str | None
    labels: Sequence[str] | None
    drop_unknown: bool
    val_fraction: float
    seed: int
    config: str | None
    allow_absolute: bool
    measured_only: bool
    class_folder: ClassFolder
    screen: bool
    cache: Path | bool
    max_unreadable: float
    workers: int | None
    quiet: bool
    phases: Phases


@dataclass(frozen=True)
class DataOptions:
    """How a dataset is read. `load_data` and `load_columns` take these fields as keyword arguments."""

    split: str | None = None
    """The one split to use."""
    kind: HeadKind | None = option(
        None,
        "What a label is: class, labels (several: a|b) or number.",
        shown="inferred from the data",
        typed=Literal["class", "labels", "number"] | None,
    )
    """`class` is softmax, `labels` multilabel, `number` regression. By default, the name or type of the label column
    and its values decide."""
    image_column: str | None = option(None, "Column of a table with the images.", shown="path or image")
    label_column: str | Sequence[str] | None = option(None, "Column of a table with the labels.", typed=str | None)
    """Several columns are the numbers of a regression."""
    task: str | None = None
    """The task that the labels are for: a column of this name is used unless another one is asked for."""
    labels: Sequence[str] | None = None
    """The labels of a task that the data must match; by default, the classes of the training images, sorted."""
    drop_unknown: bool = False
    """Whether labels that are not among `labels` are left out, with their images, and counted in `Splits.unknown`;
    else they are an error."""
    val_fraction: float = 0.15
    """Fraction of train that becomes the validation split if the data has none; 0 leaves train whole."""
    seed: int = 0
    config: str | None = None
    """The configuration of a dataset of the hub."""
    allow_absolute: bool = option(False, "Allow a table that you trust to name files outside its folder.")
    measured_only: bool = False
    """Whether only the split that an evaluation measures is kept: test, else val, else train."""
    class_folder: ClassFolder = option(
        "outer", "Folders that are the classes: outer, or inner (place/class/photo.jpg)."
    )
    screen: bool = True
    """Whether every image is decoded once: unreadable ones are left out and listed, and duplicates are found."""
    cache: Path | bool = option(True, "Keep what is known of checked images in the cache folder.", typed=bool)
    """A path is another folder."""
    max_unreadable: float = option(MAX_UNREADABLE, "Maximum fraction of unreadable images, which are skipped.")
    """One image always may be unreadable, unless this is 0."""
    workers: int | None = option(None, "Processes that decode images.", shown="one per core; none for few images")
    quiet: bool = False
    phases: Phases = field(default_factory=Phases)
    """Measures how long the images are checked."""

    def __post_init__(self) -> None:
        if self.kind is not None:
            object.__setattr__(self, "kind", find_kind(self.kind))
        if self.class_folder not in get_args(ClassFolder):
            raise DataError(f"class_folder {self.class_folder!r}: choose outer or inner.")
        if not 0 <= self.max_unreadable <= 1:
            raise DataError(f"max_unreadable {self.max_unreadable}: choose a fraction from 0 to 1.")


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    where: str
    reason: str


@dataclass(frozen=True, eq=False)
class Labelled:
    """What a dataset and its splits have in common."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind


@dataclass(frozen=True, eq=False)
class ImageSet(Labelled):
    """A map-style dataset: the images of one split. An image is decoded when it is opened."""

    source: Source
    rows: npt.NDArray[Any]
    """(n,) what the source calls the images of this split: its keys."""
    targets: Tensor
    """Class numbers (n,) for softmax, else float32 (n, labels)."""
    skipped: tuple[Skipped, ...] = ()
    digests: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    """SHA-256 of each encoded image (n, 32), once all have been read."""
    looks: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    """What `hash_look` gives for each image (n, 32), once all have been read."""
    levels: Levels | None = None
    """The values of its images of more than 8 bits, if there are any, once all have been read. All splits of a data set
    have those of its training images."""

    def __repr__(self) -> str:
        return f"ImageSet({self.name!r}, {len(self)} images, {len(self.labels)} labels)"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        """The encoded image."""
        [(_, picture)] = self.pictures([index])
        return read_bytes(picture)

    def pictures(self, indices: Sequence[int] | range) -> Iterator[NamedPicture]:
        """Some images by name; neighbours are read together."""
        return self.source.read(self.rows[list(indices)].tolist())

    def where(self, index: int) -> str:
        return self.source.where(self.rows[[index]].tolist()[0])

    def open(self, index: int, *, draft: Draft = None) -> Image.Image:
        """The image, upright, in RGB. `draft` as in `open_image`."""
        white = None if self.levels is None else self.levels.white
        return open_image(self.read(index), draft=draft, name=self.where(index), white=white)

    def key(self, index: int) -> str:
        """SHA-256 of the encoded image: equal for copies under other names."""
        if self.digests is not None:
            return bytes(self.digests[index]).hex()
        return hashlib.sha256(self.read(index)).hexdigest()

    def subset(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ImageSet:
        """The images at these positions, in this order."""
        at = np.asarray(indices, dtype=np.int64)
        digests, looks = (None if table is None else table[at] for table in (self.digests, self.looks))
        targets = self.targets[torch.from_numpy(at)]
        return replace(self, rows=self.rows[at], targets=targets, digests=digests, looks=looks)


def as_rows(keys: Sequence[Any]) -> npt.NDArray[Any]:
    """(n,) the keys of images, as numbers if they are."""
    if all(isinstance(key, int) for key in keys):
        return np.asarray(keys, dtype=np.int64)
    return np.fromiter(keys, dtype=object, count=len(keys))


def unlabelled(name: str, source: Source) -> ImageSet:
    """All images of a source, which has an end."""
    rows = as_rows(list(source.keys()))
    return ImageSet(name, (), "regression", source, rows, torch.zeros(len(rows), 0, device="cpu"))


def digest_keys(images: ImageSet) -> npt.NDArray[np.bytes_]:
    """(n,) SHA-256 of each image."""
    assert images.digests is not None
    return np.ascontiguousarray(images.digests).view("S32").ravel()


@dataclass(frozen=True, eq=False)
class Splits(Labelled):
    """The splits of a dataset; None for those that it does not have."""

    train: ImageSet | None = None
    val: ImageSet | None = None
    test: ImageSet | None = None
    notes: tuple[str, ...] = ()
    """What to know before trusting a metric."""
    skipped: tuple[Skipped, ...] = ()
    """Unreadable images of all splits."""
    unknown: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """For each split, the images of each label that was left out (`DataOptions.drop_unknown`)."""

    @property
    def new_test(self) -> ImageSet | None:
        """The test images without those that are in train too; None if there are none."""
        if self.test is None or self.train is None or self.test.digests is None or self.train.digests is None:
            return self.test
        new = ~np.isin(digest_keys(self.test), digest_keys(self.train))
        return self.test if new.all() else self.test.subset(np.flatnonzero(new)) if new.any() else None

    def to_measure(self) -> tuple[str, ImageSet]:
        """The images to measure on and the name of their split: test, else val, else `all`, which is train."""
        for name, images in (("test", self.test), ("val", self.val), ("all", self.train)):
            if images is not None:
                return name, images
        raise DataError(f"{self.name} contains no images.")


def refuse_many(skipped: Sequence[Skipped], total: int, name: str, most: float = MAX_UNREADABLE) -> None:
    """An error if more than this fraction of `total` images, the skipped ones among them, cannot be read."""
    if len(skipped) <= max(most * total, 1 if most and total > 1 else 0):
        return
    if len(skipped) == total and all(reason == NO_FILE for _, reason in skipped):
        raise DataError(
            f"{name}: none of the {total} images was found, for example {skipped[0].where}. Paths are relative to the "
            "table's folder. Correct them, or name the column of the paths with `image_column`."
        )
    first = "; ".join(f"{where}: {reason}" for where, reason in skipped[:5])
    more = f"; and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    raise DataError(
        f"{name}: {len(skipped)} of {total} images cannot be read, more than {most:.0%}: {first}{more}. Repair or "
        "remove them, or allow more with `max_unreadable`."
    )
