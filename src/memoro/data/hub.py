"""Datasets of the hub, and the paper's four by name: where they come from, and which split is for what."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memoro.backbones.load import is_hub_id
from memoro.data.columns import RawDataset
from memoro.errors import DataError, first_line


@dataclass(frozen=True)
class KnownSet:
    """One of the datasets that the paper measures on."""

    name: str
    images: dict[str, int]
    """How many images the official splits have."""
    rule: str
    """Which split is used for what."""
    fetch: str
    """What to download by hand, and how to arrange it."""
    hub: str | None = None
    label_column: str | None = None
    val_is_test: bool = False
    """Its official test labels are secret, so that results are reported on its validation split."""


_CUT = "validation is cut from train: stratified, by the seed"

KNOWN = {
    known.name: known
    for known in (
        KnownSet(
            name="cifar100",
            images={"train": 50_000, "test": 10_000},
            rule=f"the official train and test splits, fine labels; {_CUT}",
            hub="uoft-cs/cifar100",
            label_column="fine_label",
            fetch="the images of www.cs.toronto.edu/~kriz/cifar.html as train/CLASS/*.png and test/CLASS/*.png",
        ),
        KnownSet(
            name="inaturalist2017",
            images={"train": 579_184, "val": 95_986},
            rule=f"the official validation split is the test split; {_CUT}",
            fetch="train_val_images.tar.gz and train_val2017.zip from github.com/visipedia/inat_comp/tree/master/2017, "
            "unpacked into one folder, so that train2017.json and val2017.json lie beside train_val_images",
            val_is_test=True,
        ),
        KnownSet(
            name="places365",
            images={"train": 1_803_460, "val": 36_500},
            rule=f"Places365-Standard, 256 px; the official validation split is the test split; {_CUT}",
            fetch="places365standard_easyformat.tar from places2.csail.mit.edu/download.html, unpacked: it holds "
            "train/CLASS and val/CLASS",
            val_is_test=True,
        ),
        KnownSet(
            name="sun397",
            images={"train": 76_128, "val": 10_875, "test": 21_750},
            rule="the fixed train, validation and test splits of TensorFlow Datasets",
            hub="dpdl-benchmark/sun397",
            fetch="SUN397.tar.gz from vision.princeton.edu/projects/2010/SUN as train/CLASS, val/CLASS and test/CLASS",
        ),
    )
}


def find_known(known: KnownSet) -> Path | None:
    """The local copy of a known dataset: a folder, zip or table of its name in $MEMORO_DATA or in ./data."""
    paths = (place / f"{known.name}{suffix}" for place in _places() for suffix in ("", ".zip", ".parquet", ".csv"))
    return next((path for path in paths if path.exists()), None)


def explain_known(known: KnownSet, reason: str = "") -> DataError:
    """The error that says what to download and where to put it."""
    places = " or ".join(map(str, _places()))
    hub = f" Or download {known.hub} from the hub while online." if known.hub else ""
    return DataError(
        f"{known.name} was not found{reason}. Download {known.fetch}, and save it in {places} as {known.name} (a "
        f"folder), {known.name}.zip, {known.name}.csv or {known.name}.parquet. "
        f"Set $MEMORO_DATA to use another folder.{hub}"
    )


def apply_rule(raw: RawDataset, known: KnownSet) -> RawDataset:
    """The dataset with its splits used as the rule says, and notes on both."""
    splits = dict(raw.splits)
    notes = [f"{known.name}: {known.rule}."]
    for split, part in splits.items():
        here, official = len(part.rows), known.images.get(split)
        if official not in {None, here}:
            notes.append(f"{known.name}: this copy has {here:,} {split} images, the official set {official:,}.")
    if known.val_is_test and "val" in splits and "test" not in splits:
        splits["test"] = splits.pop("val")
    return replace(raw, splits=splits, notes=(*notes, *raw.notes))


def _places() -> list[Path]:
    named = os.environ.get("MEMORO_DATA")
    return [*([Path(named)] if named else []), Path("data")]


INATURALIST = "train2017.json"


def read_inaturalist(folder: Path) -> dict[str, list[str]]:
    """The columns path, label (the species) and split of both files, or of train alone if val is missing."""
    columns: dict[str, list[str]] = {"path": [], "label": [], "split": []}
    for split, path in (("train", folder / INATURALIST), ("val", folder / "val2017.json")):
        if not path.is_file():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            species = {category["id"]: category["name"] for category in record["categories"]}
            shown = {note["image_id"]: species[note["category_id"]] for note in record["annotations"]}
            for image in record["images"]:
                columns["path"].append(image["file_name"])
                columns["label"].append(shown[image["id"]])
                columns["split"].append(split)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not the annotations of iNaturalist 2017 ({error!r}); fetch it again.") from None
    return columns


def is_dataset_id(source: str) -> bool:
    """Whether it could be a dataset of the hub: owner/name, with a split behind a colon (:train, :train[:10%])."""
    return is_hub_id(source, r":[\w\[\]:%+. -]+")


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved this folder with `save_to_disk`."""
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()


def fetch(
    source: Any, split: str | None = None, config: str | None = None, *, streaming: bool = False
) -> tuple[dict[str, Any], str]:
    """({split: table}, name) of a `datasets` object, a folder it saved, or a hub id."""
    import datasets

    if isinstance(source, Path):
        name = str(source)
        try:
            loaded = datasets.load_from_disk(name)
        except Exception as error:  # a damaged file makes the libraries raise nearly every type
            raise DataError(f"{name}: cannot be read by datasets.load_from_disk ({first_line(error)}).") from None
    elif isinstance(source, str):
        name, _, own = source.partition(":")
        split = split or own or None
        try:
            loaded = datasets.load_dataset(name, config, split=split, streaming=streaming)
        except Exception as error:  # the network, the hub and the files each fail in their own ways
            reason = first_line(error).rstrip(".")
            raise DataError(
                f"{source!r} is not a file or folder, and could not be downloaded from the hub: {reason}. "
                f"Online, check the name at huggingface.co/datasets/{name}. Offline, run `hf download --repo-type "
                f"dataset {name} --local-dir FOLDER` on a machine with a network, and give that folder's images or "
                "Parquet file."
            ) from error
    else:
        loaded, name = source, "dataset"
    if not isinstance(loaded, dict):  # DatasetDict and IterableDatasetDict are dictionaries
        if not isinstance(loaded, (datasets.Dataset, datasets.IterableDataset)):
            raise DataError(f"{type(loaded).__name__} is not a dataset; give a folder, a zip, a table or a Dataset.")
        loaded = {split or "train": loaded}
    elif split is not None:
        if split not in loaded:
            raise DataError(f"{name}: no split {split!r}; it has {', '.join(loaded)}.")
        loaded = {split: loaded[split]}
    for key, table in loaded.items():
        if isinstance(table, datasets.IterableDataset) != streaming:
            raise DataError(
                f"{name}: the split {key!r} is a{' stored' if streaming else 'n iterable'} dataset: "
                f"{'leave out streaming' if streaming else 'make a datasets.Dataset of it first'}."
            )
    return dict(loaded), name
