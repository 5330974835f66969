"""Images without labels as a set, for what is measured without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memoro.data.annotations import RawDataset, RawSplit
from memoro.data.dataset import DataOptions, ImageSet, Splits
from memoro.data.folders import FileImages
from memoro.data.load import load_data
from memoro.data.splits import build_splits
from memoro.data.unlabelled import Key, Unlabelled, open_unlabelled
from memoro.errors import DataError, ImageError
from memoro.images import NamedPicture


def load_unlabelled(place: Any, workers: int | None, **reading: Any) -> Splits:
    """The readable images of a place, as training images, for what needs no labels: each has a row of none.

    `reading` are options of `open_unlabelled`.
    """
    source = open_unlabelled([place], **reading)
    keys = tuple(source.keys())
    raw = RawDataset(
        "regression", {"train": RawSplit(UnlabelledImages(source, keys), range(len(keys)), [()] * len(keys))}, ()
    )
    how: dict[str, Any] = {"val_fraction": 0, "max_unreadable": 1.0, "workers": workers, "quiet": True}
    return build_splits(raw, str(place), DataOptions(**how))


def load_any(source: Any, workers: int | None, **reading: Any) -> tuple[ImageSet, int]:
    """The readable test images of a set, whatever its labels; all of them where it has no test split, or no labels. And
    how many cannot be read."""
    try:
        how: dict[str, Any] = {"val_fraction": 0, "measured_only": True, "workers": workers, "quiet": True}
        splits = source if isinstance(source, Splits) else load_data(source, max_unreadable=1.0, **how, **reading)
    except DataError:
        splits = load_unlabelled(source, workers, **reading)
    return splits.to_measure()[1], len(splits.skipped)


@dataclass(frozen=True)
class UnlabelledImages:
    """The images of a source by number, as sets read them."""

    images: Unlabelled
    numbered: tuple[Key, ...]

    def read(self, row: int) -> bytes:
        _, picture = self._find(row)
        if isinstance(picture, ImageError):
            raise picture
        return picture if isinstance(picture, bytes) else FileImages("", (str(picture),)).read(0)

    def where(self, row: int) -> str:
        return self._find(row)[0]

    def _find(self, row: int) -> NamedPicture:
        return next(iter(self.images.read([self.numbered[row]])))
