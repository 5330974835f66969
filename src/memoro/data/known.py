"""The paper's four sets by name: where they come from, and which images are for what."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from memoro.data.listing import Listing
from memoro.errors import DataError

_SUFFIXES = ("", ".zip", ".parquet", ".csv")


@dataclass(frozen=True)
class KnownSet:
    """One of the sets that the paper measures on."""

    name: str
    classes: int
    images: dict[str, int]
    """How many images the official splits have."""
    rule: str
    """Which split is used for what."""
    hub: str | None
    label_column: str | None
    fetch: str
    """What to download by hand, and how to lay it out."""
    val_is_test: bool = False
    """Its official test labels are secret, so that results are reported on its validation split."""


_CUT = "validation is cut from train: stratified, by the seed"

KNOWN = {
    known.name: known
    for known in (
        KnownSet(
            name="cifar100",
            classes=100,
            images={"train": 50_000, "test": 10_000},
            rule=f"the official train and test splits, fine labels; {_CUT}",
            hub="uoft-cs/cifar100",
            label_column="fine_label",
            fetch="the images of www.cs.toronto.edu/~kriz/cifar.html as train/CLASS/*.png and test/CLASS/*.png",
        ),
        KnownSet(
            name="inaturalist2017",
            classes=5_089,
            images={"train": 579_184, "val": 95_986},
            rule=f"the official validation split is the test split; {_CUT}",
            hub=None,
            label_column=None,
            fetch="train_val_images.tar.gz and train_val2017.zip from github.com/visipedia/inat_comp/tree/master/2017, "
            "unpacked into one folder, so that train2017.json and val2017.json lie beside train_val_images",
            val_is_test=True,
        ),
        KnownSet(
            name="places365",
            classes=365,
            images={"train": 1_803_460, "val": 36_500},
            rule=f"Places365-Standard, 256 px; the official validation split is the test split; {_CUT}",
            hub=None,
            label_column=None,
            fetch="places365standard_easyformat.tar from places2.csail.mit.edu/download.html, unpacked: it holds "
            "train/CLASS and val/CLASS",
            val_is_test=True,
        ),
        KnownSet(
            name="sun397",
            classes=397,
            images={"train": 76_128, "val": 10_875, "test": 21_750},
            rule="the fixed train, validation and test splits of TensorFlow Datasets",
            hub="dpdl-benchmark/sun397",
            label_column=None,
            fetch="SUN397.tar.gz from vision.princeton.edu/projects/2010/SUN as train/CLASS, val/CLASS and test/CLASS",
        ),
    )
}


def find_known(known: KnownSet) -> Path | None:
    """The local copy of a known set: a folder, zip or table of its name in $MEMORO_DATA or in ./data."""
    for place in _places():
        for suffix in _SUFFIXES:
            path = place / f"{known.name}{suffix}"
            if path.exists():
                return path
    return None


def explain_known(known: KnownSet, reason: str = "") -> DataError:
    """The error that says what to fetch and where to put it."""
    places = " or ".join(str(place) for place in _places())
    hub = f" Or download {known.hub} from the hub while online." if known.hub else ""
    return DataError(
        f"{known.name} is not here{reason}. Fetch {known.fetch}; put it into {places} as {known.name} (a folder), "
        f"{known.name}.zip, {known.name}.csv or {known.name}.parquet; $MEMORO_DATA names another place.{hub}"
    )


def with_rule(listing: Listing, known: KnownSet) -> Listing:
    """The listing with the set's splits used as its rule says, and notes on both."""
    parts = dict(listing.parts)
    notes = [f"{known.name}: {known.rule}."]
    for role, part in parts.items():
        official = known.images.get(role)
        if official is not None and official != len(part.rows):
            notes.append(
                f"{known.name}: this copy has {len(part.rows):,} {role} images, the official set {official:,}."
            )
    if known.val_is_test and "val" in parts and "test" not in parts:
        parts["test"] = parts.pop("val")
    return replace(listing, parts=parts, notes=(*notes, *listing.notes))


def _places() -> list[Path]:
    named = os.environ.get("MEMORO_DATA")
    return [*([Path(named)] if named else []), Path("data")]
