"""Statistics of ordinary photographs, by which tasks learn what is unfamiliar: shipped, kept, or computed."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from memoro.backbones import Backbone
from memoro.backbones.load import WEIGHTS
from memoro.data import Loader
from memoro.data.unlabelled_set import load_any
from memoro.engine.featurestore import SUFFIX
from memoro.engine.streams import pool_pass
from memoro.errors import DataError
from memoro.evaluation.logits import collect_logits
from memoro.files import write_whole
from memoro.images import Preprocessing
from memoro.tasks.familiarity import Others
from memoro.tasks.taskspec import ReadOut

FILE = "photographs.safetensors"
"""Beside the weights of a backbone that ships with memoro."""
FOLDER = "photographs"
"""In the folder of cached features."""
FEWEST = 50
"""Fewer photographs do not tell what is ordinary."""
ENOUGH = 2000
"""More than this many change nothing."""


def find_photographs(backbone: Backbone, preprocessing: Preprocessing, folder: Path | None) -> Others | None:
    """What is known of photographs as this backbone sees them: kept in the folder of cached features (None: nothing
    is kept), or shipped with memoro."""
    key = _key(backbone, preprocessing)
    for path in (None if folder is None else _kept_at(folder, key), WEIGHTS / FILE):
        found = None if path is None else _read(path, key)
        if found is not None:
            if path is not None:
                with suppress(OSError):
                    os.utime(path)  # the cache evicts what was used longest ago
            return found
    return None


def read_photographs(
    backbone: Backbone, preprocessing: Preprocessing, source: Any, folder: Path | None, **reading: Any
) -> Others:
    """What these photographs look like to the backbone, kept in the folder of cached features if there is one.

    `reading` are options of `load_any`.
    """
    images, _ = load_any(source, **reading)
    if len(images) < FEWEST:
        raise DataError(
            f"{images.name}: {len(images)} photographs are too few to learn what is unfamiliar from: give {FEWEST} or "
            "more, of anything but what the tasks are about."
        )
    chosen = torch.linspace(0, len(images) - 1, min(len(images), ENOUGH), device="cpu").round().long().numpy()
    loader = Loader(images.subset(chosen), preprocessing, batch_size=32, workers=reading.get("workers"))
    first = ReadOut.of(backbone.anatomy).from_layer
    (found,), _ = collect_logits(lambda pixels: [pool_pass(backbone.anatomy, pixels, first)], backbone, loader)
    others = Others.of(found)
    if folder is not None:
        path = _kept_at(folder, _key(backbone, preprocessing))
        for place in (folder, path.parent):  # the mode is not that of parents
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_photographs(path, others, backbone, preprocessing)
    return others


def write_photographs(path: Path, others: Others, backbone: Backbone, preprocessing: Preprocessing) -> None:
    tensors = {"mean": others.mean.contiguous(), "directions": others.directions.contiguous()}
    write_whole(path, save(tensors, metadata={"key": _key(backbone, preprocessing)}))


def _key(backbone: Backbone, preprocessing: Preprocessing) -> str:
    """What statistics depend on besides the images, without the scale of deep images, which photographs do not have."""
    steps = {name: value for name, value in preprocessing.to_json().items() if name != "white"}
    return json.dumps([backbone.fingerprint.digest, backbone.family, steps], sort_keys=True)


def _kept_at(folder: Path, key: str) -> Path:
    return folder / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _read(path: Path, key: str) -> Others | None:
    """The statistics of a file, None where there is none or it is for another backbone or preprocessing."""
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return Others(file.get_tensor("mean"), file.get_tensor("directions"))
    return None
