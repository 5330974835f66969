"""iNaturalist 2017 as its authors publish it: one tree of images, and the splits in two JSON files."""

from __future__ import annotations

import json
from pathlib import Path

from memoro.errors import DataError

TRAIN = "train2017.json"
VAL = "val2017.json"


def read_inaturalist(folder: Path) -> dict[str, list[str]]:
    """The columns path, label (the species) and split of both files, or of train alone where val is missing."""
    columns: dict[str, list[str]] = {"path": [], "label": [], "split": []}
    for split, path in (("train", folder / TRAIN), ("val", folder / VAL)):
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
