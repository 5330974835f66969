"""The photographs of a session, labelled or not, by keys that stay the same when it is started again."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from memoro.data.columns import RawDataset, RawSplit
from memoro.data.dataset import DataOptions, ImageSet, Splits
from memoro.data.open import load_data, open_source
from memoro.data.source import Key, Source, read_bytes
from memoro.data.splits import build_splits
from memoro.errors import DataError, TeachError
from memoro.files import write_whole
from memoro.heads import HeadKind
from memoro.images.finding import HEAD_BYTES, is_heif
from memoro.images.opening import FORMATS
from memoro.teach.labels import Decision, Label, as_annotation

KEY_LETTERS = 20
CORRECTIONS = "corrections"
"""The folder of images that were answered wrongly elsewhere, inside that of the photographs."""


@dataclass(eq=False)
class Photos:
    """Images in order. `paths` name them in the table of labels; `keys` stand for them in requests."""

    place: Path
    """What was opened."""
    source: Source
    rows: list[Key]
    """What the source calls them."""
    paths: list[str]
    given: dict[int, Decision]
    """The labels that the source has itself."""
    kind: HeadKind | None
    """The kind of these labels; None if there are none."""
    keys: list[str] = field(default_factory=list, repr=False)
    by_key: dict[str, int] = field(default_factory=dict, repr=False)
    by_path: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for at, path in enumerate(self.paths):
            self._register(at, path)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def name(self) -> str:
        return self.place.stem if self.place.is_file() else self.place.name

    @property
    def folder(self) -> Path | None:
        """Where labels are kept unless the user says otherwise; None if they cannot be written there."""
        folder = self.place if self.place.is_dir() else self.place.parent
        is_zip = self.place.is_file() and self.place.suffix.lower() == ".zip"
        return None if is_zip or not os.access(folder, os.W_OK) else folder

    @property
    def can_add(self) -> bool:
        """Whether images can be added, which needs a folder that can be written to."""
        return self.folder == self.place

    def add(self, data: bytes) -> int:
        """Stores a readable image in the folder, under a name made of its content, and returns its position."""
        if not self.can_add:
            raise TeachError("images can be added to a folder that can be written to only, not to a zip or a table.")
        form = "heic" if is_heif(data[:HEAD_BYTES]) else Image.open(io.BytesIO(data), formats=FORMATS).format or ""
        path = f"{CORRECTIONS}/{hashlib.sha256(data).hexdigest()[:KEY_LETTERS]}.{form.lower()}"
        if path not in self.by_path:
            write_whole(self.place / path, data)
            self.rows.append(str(self.place / path))
            self._register(len(self.paths), path)
            self.paths.append(path)
        return self.by_path[path]

    def read(self, at: int) -> bytes:
        """The encoded image."""
        [(_, picture)] = self.source.read([self.rows[at]])
        return read_bytes(picture)

    def labelled_set(self, decisions: Mapping[int, Decision], kind: HeadKind, labels: Sequence[str]) -> Splits:
        """The images with these decisions, as training images of a set; unreadable ones are left out."""
        annotations = [as_annotation(one.label) for one in decisions.values()]
        rows = RawSplit(self.source, [self.rows[at] for at in decisions], annotations)
        raw = RawDataset(kind, {"train": rows}, tuple(labels))
        return build_splits(raw, self.name, DataOptions(val_fraction=0, max_unreadable=1.0, quiet=True))

    def _register(self, at: int, path: str) -> None:
        key = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:KEY_LETTERS]
        self.keys.append(key)
        self.by_key[key] = self.by_path[path] = at


def open_photos(
    place: str | os.PathLike[str], labels: Sequence[str] = (), kind: HeadKind | None = None, **reading: Any
) -> Photos:
    """The images of a folder, zip or table, and the labels that it has: class folders, or a column.

    If `labels` are given, others are left out. Links in a folder are not followed. Images of a test split are not
    among them. `reading` are further options of `load_data`: `label_column`, `image_column`, `allow_absolute`.
    """
    path = Path(place).expanduser().absolute()
    column, absolute = reading.get("image_column"), reading.get("allow_absolute", False)
    source = open_source([str(path)], image_column=column, allow_absolute=absolute)
    everything = list(source.keys())
    try:
        splits = load_data(path, val_fraction=0, screen=False, quiet=True, kind=kind, **reading)
    except DataError:
        if kind is None and (reading.get("label_column") or column):
            raise
        splits = None
    known, tests = ({}, {}) if splits is None else (_labels_of(splits.train, splits.val), _labels_of(splits.test))
    root = path if path.is_dir() or path.suffix.lower() == ".zip" else path.parent
    real = os.path.realpath(root)
    rows: list[Key] = []
    paths: list[str] = []
    given: dict[int, Decision] = {}
    for row in everything:
        where = source.where(row)
        relative = where.removeprefix(str(root)).lstrip("/" + os.sep) if where.startswith(str(root)) else where
        linked = path.is_dir() and os.path.realpath(where) != os.path.join(real, relative)
        if where in tests or linked:
            continue
        label = known.get(where)
        if label is not None and (not labels or {*(label if isinstance(label, tuple) else [label])} <= {*labels}):
            given[len(rows)] = Decision("label", label)
        rows.append(row)
        paths.append(relative)
    if not rows:
        raise TeachError(f"{place}: no images there, apart from links and test images.")
    return Photos(path, source, rows, paths, given, splits.kind if splits is not None and given else None)


def _labels_of(*sets: ImageSet | None) -> dict[str, Label]:
    """The label of each image of some sets, by the image's address."""
    return {images.where(at): label_of(images, at) for images in sets if images for at in range(len(images))}


def label_of(images: ImageSet, at: int) -> Label:
    """The label of an image of a set, as a decision has it."""
    target = images.targets[at]
    if images.kind == "softmax":
        return images.labels[int(target)]
    if images.kind == "multilabel":
        return tuple(label for label, on in zip(images.labels, target.tolist(), strict=True) if on)
    return float(target.flatten()[0])
