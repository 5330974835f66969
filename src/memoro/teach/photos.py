"""The photographs of a session, labelled or not, by keys that stay the same when it is started again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memoro.data.columns import RawDataset, RawSplit
from memoro.data.dataset import DataOptions, ImageSet, Splits
from memoro.data.open import load_data, open_source
from memoro.data.source import Key, Source, is_endless, read_bytes
from memoro.data.splits import build_splits
from memoro.errors import DataError, TeachError
from memoro.files import write_whole
from memoro.heads import HeadKind
from memoro.teach.labels import Decision, as_annotation

KEPT = "train", "val"
"""Splits whose images are shown. Those of a test split are never learned from."""
KEY_LETTERS = 20
CORRECTIONS = "corrections"
"""The folder of images that were answered wrongly elsewhere, inside that of the photographs."""


@dataclass(eq=False)
class Photos:
    """Images in order. `paths` name them in the table of labels; `keys` stand for them in requests."""

    name: str
    place: str
    """What was opened, as the command line takes it."""
    source: Source
    rows: list[Key]
    """What the source calls them."""
    paths: list[str]
    given: dict[int, Decision]
    """The labels that the source has itself."""
    kind: HeadKind | None
    """Of these labels; None where there are none."""
    folder: Path | None
    """Where labels and corrections are kept unless the user says otherwise; None where there is none to write to."""
    keys: list[str] = field(default_factory=list, repr=False)
    by_key: dict[str, int] = field(default_factory=dict, repr=False)
    by_path: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for at, path in enumerate(self.paths):
            self._register(at, path)

    def __len__(self) -> int:
        return len(self.paths)

    def add(self, data: bytes, suffix: str) -> int:
        """Stores an image in the folder, under a name made of its content, and returns its position."""
        if self.folder is None or str(self.folder) != self.place:
            raise TeachError("images can be added to a folder that can be written to only, not to a zip or a table.")
        path = f"{CORRECTIONS}/{hashlib.sha256(data).hexdigest()[:KEY_LETTERS]}{suffix}"
        if path in self.by_path:
            return self.by_path[path]
        write_whole(self.folder / path, data)
        self.rows.append(str(self.folder / path))
        self._register(len(self.paths), path)
        self.paths.append(path)
        return len(self.paths) - 1

    def read(self, at: int) -> bytes:
        """The encoded image."""
        [(_, picture)] = self.source.read([self.rows[at]])
        return read_bytes(picture)

    def _register(self, at: int, path: str) -> None:
        key = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:KEY_LETTERS]
        self.keys.append(key)
        self.by_key[key] = self.by_path[path] = at

    def labelled_set(
        self, decisions: dict[int, Decision], kind: HeadKind, labels: Sequence[str], screen: bool = True
    ) -> Splits:
        """The images with these decisions, as training images of a set; unreadable ones are left out."""
        annotations = [as_annotation(one.label) for one in decisions.values() if one.label is not None]
        raw = RawDataset(
            kind,
            {"train": RawSplit(self.source, [self.rows[at] for at in decisions], annotations)},
            tuple(labels) or None,
        )
        options = DataOptions(val_fraction=0, max_unreadable=1.0, screen=screen, quiet=True)
        return build_splits(raw, self.name, options)


def open_photos(
    place: Any, labels: Sequence[str] = (), kind: HeadKind | None = None, allow_absolute: bool = False, **reading: Any
) -> Photos:
    """The images of a folder, zip or table, and the labels that it has: class folders, or a column.

    Where `labels` are given, others are left out. Links in a folder are not followed. Images of a test split are not
    among them. `reading` are further options of `load_data`: `label_column`, `image_column`.
    """
    path = Path(place).expanduser().absolute() if isinstance(place, (str, os.PathLike)) else None
    where = place if path is None else str(path)
    column = reading.get("image_column")
    found = open_source([where], image_column=column, allow_absolute=allow_absolute)
    if is_endless(found):
        raise TeachError(f"{place} is a stream without an end: give a folder, a zip or a table.")
    root = "" if path is None else str(path if path.is_dir() or path.suffix.lower() == ".zip" else path.parent)
    everything = list(found.keys())
    places = [found.where(key) for key in everything]
    try:
        how: dict[str, Any] = {
            "val_fraction": 0,
            "screen": False,
            "quiet": True,
            "kind": kind,
            "allow_absolute": allow_absolute,
        }
        known = load_data(place if path is None else path, **how, **reading)
    except DataError:
        if kind is None and any(reading.values()):
            raise
        known = None
    tests = _places_of(known, ("test",))
    inside = os.path.realpath(root) if path is not None and path.is_dir() else None
    rows, paths = [], []
    for row, name in enumerate(places):
        relative = name[len(root) :].lstrip("/" + os.sep) if root and name.startswith(root) else name
        if name in tests or (inside is not None and os.path.realpath(name) != os.path.join(inside, relative)):
            continue
        rows.append(row)
        paths.append(relative)
    if not rows:
        raise TeachError(f"{place}: no images there, apart from links and test images.")
    at_place = {places[row]: at for at, row in enumerate(rows)}
    given = {
        at_place[name]: Decision("label", label)
        for name, label in _places_of(known, KEPT).items()
        if name in at_place and (not labels or set(label if isinstance(label, tuple) else [label]) <= {*labels})
    }
    folder = None if path is None else path if path.is_dir() else path.parent if path.suffix.lower() != ".zip" else None
    title = str(place) if path is None else path.stem if path.is_file() else path.name
    writable = folder is not None and os.access(folder, os.W_OK)
    return Photos(
        title,
        str(place if path is None else path),
        found,
        [everything[row] for row in rows],
        paths,
        given,
        known.kind if known is not None and given else None,
        folder if writable else None,
    )


def _places_of(splits: Splits | None, names: Sequence[str]) -> dict[str, Any]:
    """The label of each image of some splits, by where the image is."""
    found: dict[str, Any] = {}
    sets = [] if splits is None else [getattr(splits, name) for name in names]
    for images in (one for one in sets if isinstance(one, ImageSet)):
        for at in range(len(images)):
            found[images.where(at)] = label_of(images, at)
    return found


def label_of(images: ImageSet, at: int) -> Any:
    """The label of an image of a set, as a decision has it."""
    target = images.targets[at]
    if images.kind == "softmax":
        return images.labels[int(target)]
    if images.kind == "multilabel":
        return tuple(label for label, on in zip(images.labels, target.tolist(), strict=True) if on)
    return float(target.flatten()[0])
