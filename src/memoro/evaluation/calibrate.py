"""`calibrate`: calibration and familiarity from new images; statistics of ordinary photographs."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFilter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memoro.backbones import Backbone
from memoro.backbones.load import WEIGHTS
from memoro.console import format_count
from memoro.data import ImageSet, Loader, Splits, load_data
from memoro.data.open import load_any
from memoro.engine.composition import compose
from memoro.engine.featurestore import SUFFIX, default_folder
from memoro.engine.streams import pool_pass
from memoro.errors import DataError
from memoro.evaluation.logits import collect_logits, collect_outputs
from memoro.evaluation.metrics import COLUMNS, measure, measure_task
from memoro.evaluation.training_images import learned_from
from memoro.files import write_whole
from memoro.images import Preprocessing, open_image
from memoro.tasks.calibration import decide_unseen, describe_calibration, fit_calibration
from memoro.tasks.familiarity import Others, fit_familiarity
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task

FILE = "photographs.safetensors"
"""Beside the weights of a backbone that ships with memoro."""
FOLDER = "photographs"
"""In the folder of cached features."""
FEWEST = 50
"""The fewest photographs that show what is ordinary."""
ENOUGH = 2000
"""More than this many change nothing."""
CHANGED = 8
"""Images of a task that are changed, each in all ways: 20 give the same results (LOG.md)."""
LARGEST = (2048, 2048)
"""Images that are changed are no larger: several copies are in memory, and JPEG has no side over 65,500."""


def _compress(image: Image.Image) -> Image.Image:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=40)
    return Image.open(data)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG, quality 40": _compress,
    "half the size": lambda image: image.resize((max(1, image.width // 2), max(1, image.height // 2))),
    "darker by 30 %": lambda image: image.point(lambda value: round(value * 0.7)),
    "slightly blurred": lambda image: image.filter(ImageFilter.GaussianBlur(max(image.size) / 224)),
}
"""Mild changes of an image, after which it should still be familiar."""


def find_photographs(backbone: Backbone, preprocessing: Preprocessing, folder: Path | None) -> Others | None:
    """Statistics of photographs as this backbone sees them: those in the folder of cached features, if there is one, or
    those that ship with memoro; None if neither fits."""
    key = _key(backbone, preprocessing)
    kept = [] if folder is None else [_kept_at(folder, key)]
    for path in (*kept, WEIGHTS / FILE):
        found = _read(path, key)
        if found is not None:
            with suppress(OSError):
                os.utime(path)  # the cache evicts what was used longest ago
            return found
    return None


def read_photographs(
    backbone: Backbone, preprocessing: Preprocessing, source: Any, folder: Path | None, **reading: Any
) -> Others:
    """Statistics of these photographs as the backbone sees them; kept in the folder of cached features if there is one.

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


def read_changes(backbone: Backbone, preprocessing: Preprocessing, images: ImageSet) -> Tensor:
    """What mild changes of some images add to their statistics (changes, layers, statistics, dim), on the CPU."""
    first, found = ReadOut.of(backbone.anatomy).from_layer, []
    for index in torch.linspace(0, len(images) - 1, min(len(images), CHANGED), device="cpu").round().long().tolist():
        picture, name = images.read(index), images.where(index)
        image = open_image(picture, draft=preprocessing.draft, white=preprocessing.white, name=name)
        image.thumbnail(LARGEST)
        pixels = torch.stack(
            [preprocessing.to_tensor(change(image)) for change in (lambda one: one, *CHANGES.values())]
        )
        with torch.no_grad():
            pooled = pool_pass(backbone.anatomy, pixels.to(backbone.device, backbone.dtype), first).float().cpu()
        found.append(pooled[1:] - pooled[0])
    return torch.cat(found)


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
    """The statistics of a file, None if there is none or it is for another backbone or preprocessing."""
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("key") == key:
            return Others(file.get_tensor("mean"), file.get_tensor("directions"))
    return None


def calibrate(
    backbone: Backbone,
    task: Task,
    data: Any,
    *,
    parents: Sequence[Task] = (),
    others: Any = None,
    batch_size: int = 32,
    workers: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    **reading: Any,
) -> None:
    """Gives a task a new calibration and familiarity, from images that look like those it is for.

    The calibration is fitted on the images that `evaluate` measures on: the test split, else the validation split, else
    all images. The familiarity is learned from all splits. If the task was trained on some of the images that are
    measured, the calibration is left as it is, and so is a familiarity that the task has. `others` are ordinary
    photographs, from which it is learned what is unfamiliar (see `find_photographs`). `reading` are options of
    `load_data`.
    """
    model = compose(backbone, [task, *parents])
    labels: dict[str, Any] = {"kind": task.kind, "labels": task.labels, "drop_unknown": True, "task": task.name}
    labels |= reading
    splits = data
    if not isinstance(data, Splits):
        splits = load_data(data, **labels, val_fraction=0, workers=workers, quiet=True)
    (preprocessing,) = model.passes([task.name])
    parts = [images for images in (splits.train, splits.val, splits.test) if images is not None]
    reason = learned_from(task, parts[-1], splits, parents)
    if reason is not None and task.spec.familiarity is not None:
        log(f"{reason}: nothing is changed. Pass images that the task was not trained on.")
        return
    statistics, targets = [], []
    first = ReadOut.of(backbone.anatomy).from_layer
    for images in parts:
        loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
        (found,), own = collect_logits(lambda x: [pool_pass(backbone.anatomy, x, first)], backbone, loader)
        statistics.append(found)
        targets.append(own)
    classes = torch.cat(targets) if task.head_kind.has_classes else None
    folder = default_folder()
    if others is None:
        photographs = find_photographs(backbone, preprocessing, folder)
    else:
        photographs = read_photographs(backbone, preprocessing, others, folder, workers=workers)
    moved = None if photographs is None else read_changes(backbone, preprocessing, parts[0])
    familiarity = fit_familiarity(torch.cat(statistics), classes, photographs, moved)
    changes: dict[str, Any] = {}
    facts = dict(task.spec.training)
    if familiarity is None:
        log("familiarity was not updated: there are too few images, or the backbone's features are out of range.")
    else:
        changes["familiarity"] = familiarity
        facts["familiarity"] = f"{familiarity.images} images of {splits.name}, out of fold"
        known = task.spec.familiarity
        before = "" if known is None else f" (before: {known.images})"
        log(f"familiarity: from {format_count(familiarity.images, 'image')}{before}")
    if reason is not None:
        log(f"{reason}: the calibration stays as it is. To calibrate, pass images that the task was not trained on.")
    else:
        answers, held = collect_outputs(model, parts[-1], [task.name], batch_size=batch_size, workers=workers)
        calibration = fit_calibration(task.kind, answers.logits[task.name], held, splits.name)
        if calibration is None:
            reason = describe_calibration(None, len(held)).removeprefix("none: ")
            log(f"the calibration stays as it is: {reason}.")
        else:
            changes["calibration"] = calibration
            facts["calibration"] = describe_calibration(calibration, len(held))
            log(f"calibration: from {format_count(calibration.images, 'image')} (do not train the task on them)")
            if splits.test is not None:
                log("they are the test split: from now on, the calibration error measured on it is too low.")
            former = measure_task(task, answers.logits[task.name], held)
            decided = decide_unseen(task.kind, answers.logits[task.name], held)
            after = {} if decided is None else measure(task.kind, task.labels, decided, held)
            for name in ("calibration_error", "f1"):
                if name in former and name in after:
                    log(
                        f"{COLUMNS[name]}: {former[name]:.3f} before, {after[name]:.3f} after (each quarter of the "
                        "images is evaluated with a calibration fitted on the others)"
                    )
    if changes:
        task.update_spec(**changes, training=facts)
