"""What jobs are run with: backbones and sets by name, loaded when they are needed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memoro.backbones import load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.data import Splits, load_data
from memoro.data.hub import KNOWN, find_known
from memoro.errors import DataError
from memoro.images import output_size
from memoro.lab.bench.models import random_vit
from memoro.lab.reproduce.concat import measure_concat
from memoro.lab.reproduce.counts import count_costs, count_methods
from memoro.lab.reproduce.estimate import Size, base_passes, seconds_per_pass
from memoro.lab.reproduce.extension import measure_extension
from memoro.lab.reproduce.measure import Bench, Budget, limit_training, measure_methods
from memoro.lab.reproduce.plan import CHILDREN, CPU, Job, Key
from memoro.lab.reproduce.records import Records
from memoro.processes import Processes, find_processes
from memoro.training import TrainOptions
from memoro.training.runfolder import lock_folder

MOST_PIXELS = 112
"""At CPU scale, backbones see images of at most this size: their own would take hours."""


def find_sets(data: Sequence[str]) -> dict[str, str]:
    """Sources by the name of the set; a folder of sets stands for those that are in it."""
    found: dict[str, str] = {}
    for source in data:
        path = Path(source).expanduser()
        places = _sets_inside(path) or [path]
        for place in places:
            name = source if not place.exists() else place.stem if place.is_file() else place.resolve().name
            if name in found:
                raise DataError(f"two sets are called {name!r}: rename one of the files.")
            found[name] = str(place) if place.exists() else source
    return found


def _sets_inside(folder: Path) -> list[Path]:
    """The sets of `CPU.sets` in a folder; if there are none, its folders with train/ and test/."""
    if not folder.is_dir() or (folder / "train").is_dir():
        return []
    known = [place for name in CPU.sets for place in (folder / f"{name}.zip", folder / name) if place.exists()]
    others = [place for place in sorted(folder.iterdir()) if (place / "train").is_dir() and (place / "test").is_dir()]
    return known or others


def name_backbone(source: str) -> str:
    """The name that `load_backbone` gives it."""
    return Path(source).resolve().name if source != TINY and Path(source).is_dir() else source


@dataclass
class Runner:
    """Runs jobs. Sets and backbones are kept once loaded."""

    sets: dict[str, str]
    """Sources by name."""
    backbones: dict[str, str]
    options: TrainOptions
    """With a `folder`, a job that was cut off continues from its checkpoints in it."""
    image_size: int | None = None
    most_pixels: int | None = MOST_PIXELS
    device: str | None = None
    _benches: dict[str, Bench] = field(default_factory=dict)
    _splits: dict[tuple[str, float], Splits] = field(default_factory=dict)
    _listed: dict[str, Splits | None] = field(default_factory=dict)
    _digests: dict[str, str] = field(default_factory=dict)
    _speeds: dict[str, float] = field(default_factory=dict)

    @property
    def processes(self) -> Processes:
        """This process among those that train together."""
        return find_processes(own_device(self.device))

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.processes.main

    def lock(self, job: Job) -> AbstractContextManager[None]:
        """Keeps other commands with the same folder from running a job; `InUseError` if one does. Processes of one
        command run it together, so there it does nothing."""
        folder = self.checkpoints(job)
        return nullcontext() if folder is None or self.processes.world > 1 else lock_folder(folder)

    def bench(self, name: str) -> Bench:
        if name not in self._benches:
            backbone = load_backbone(self.backbones[name], device=own_device(self.device), dtype=torch.float32)
            preprocessing, side = backbone.preprocessing, self.image_size
            if side is None and self.most_pixels is not None and min(output_size(preprocessing)) > self.most_pixels:
                side = self.most_pixels
            if side is not None:
                preprocessing = preprocessing.at(side)
            self._benches[name] = Bench(backbone, preprocessing, self.options)
        return self._benches[name]

    def stand_in(self, name: str) -> None:
        """Puts a ViT-B/32 with random weights in the place of a backbone that cannot be loaded, for estimates."""
        backbone = load_backbone(random_vit(32))
        self._benches[name] = Bench(backbone, backbone.preprocessing, self.options)

    def splits(self, name: str, budget: Budget) -> Splits:
        """A set within the budget: images are checked, so that copies are in the same fold."""
        key = name, budget.val_fraction
        if key not in self._splits:
            how: dict[str, Any] = {"quiet": True, "workers": self.options.workers}
            found = load_data(self.sets[name], val_fraction=budget.val_fraction, **how)
            self._splits[key] = found
        return limit_training(self._splits[key], budget.most)

    def size(self, name: str) -> Size:
        """How many images a set has, without opening them; of a known set that is not here, the official numbers."""
        splits = self.listed(name)
        if splits is None:
            images = KNOWN[name].images
            return Size(images["train"], images.get("test", images.get("val", 0)))
        return Size(*(0 if part is None else len(part) for part in (splits.train, splits.test)))

    def listed(self, name: str) -> Splits | None:
        """A set whose images have not been opened; None for a known set that is not here."""
        if name not in self._listed:
            here = name not in KNOWN or self.sets[name] != name or find_known(KNOWN[name]) is not None
            found = load_data(self.sets[name], val_fraction=0, screen=False, quiet=True) if here else None
            self._listed[name] = found
        return self._listed[name]

    def key(self, job: Job) -> Key:
        if not job.backbone:
            return job.key("", 224)
        bench = self.bench(job.backbone)
        images = {name: self.digest(name) for name in job.sets}
        return job.key(bench.backbone.fingerprint.short, min(output_size(bench.preprocessing)), images)

    def digest(self, name: str) -> str:
        """A hash of the file names and labels of a set: another set of the same name has another one. Empty for a known
        set that is not here."""
        if name not in self._digests:
            splits = self.listed(name)
            self._digests[name] = "" if splits is None else _hash(splits)
        return self._digests[name]

    def seconds(self, job: Job, sizes: dict[str, Size]) -> float:
        """An estimate, from passes that are timed here."""
        if not job.backbone:
            return 5.0
        if job.backbone not in self._speeds:
            bench = self.bench(job.backbone)
            self._speeds[job.backbone] = seconds_per_pass(bench.backbone, bench.preprocessing)
        return base_passes(job, sizes) * self._speeds[job.backbone]

    def run(self, job: Job, records: Records) -> dict[str, dict[str, Any]]:
        """The results of the job's parts, by the name of the method; a job with one result has it under ``."""
        if job.kind == "counts":
            return {"": self._count(job) if job.backbone else count_costs()}
        bench = self.bench(job.backbone)
        bench = replace(bench, options=replace(bench.options, folder=self.checkpoints(job)))
        sets = [self.splits(name, job.budget) for name in job.sets]
        if job.kind == "accuracy":
            return measure_methods(bench, sets[0], job.methods, job.budget)
        if job.kind == "concat":
            known = _known_rates(self.key(job), records)
            return {"": measure_concat(bench, sets, job.methods, job.budget, job.number, known)}
        other = sets[1] if len(sets) > 1 else None
        child = CHILDREN[job.number]
        return {"": measure_extension(bench, sets[0], other, job.methods, job.budget, child)}

    def checkpoints(self, job: Job) -> Path | None:
        """The folder of a job's checkpoints."""
        if self.options.folder is None:
            return None
        return self.options.folder / hashlib.sha256(json.dumps(self.key(job)).encode()).hexdigest()[:16]

    def remove_checkpoints(self, job: Job) -> None:
        """Once a job is recorded."""
        folder = self.checkpoints(job)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other jobs have checkpoints
                folder.parent.rmdir()

    def _count(self, job: Job) -> dict[str, Any]:
        bench = self.bench(job.backbone)
        return {"rows": count_methods(bench.backbone, job.methods, output_size(bench.preprocessing))}


def _hash(splits: Splits) -> str:
    whole = hashlib.sha256(json.dumps(splits.labels).encode())
    for part in (splits.train, splits.val, splits.test):
        images = (
            [] if part is None else [(Path(part.where(at)).name, part.targets[at].tolist()) for at in range(len(part))]
        )
        whole.update(json.dumps(images).encode())
    return whole.hexdigest()[:12]


def _known_rates(key: Key, records: Records) -> dict[str, Any]:
    """Rates by set and method that an earlier seed of a job chose, or table 2 for the same method and budget."""
    found: dict[str, Any] = {}
    for record in records.entries:
        own = record.key
        if own["kind"] == "concat" and {**own, "number": 0} == {**key, "number": 0}:
            return dict(record.result["rates"])
        same = all(own[name] == key[name] for name in ("backbone", "fingerprint", "image_size"))
        same = same and own["images"].items() <= key["images"].items()
        # `Budget.on_set` gives a set its augmentation, here and there.
        same = same and {**own["budget"], "augment": None} == {**key["budget"], "augment": None}
        if own["kind"] == "accuracy" and same and own["methods"][0] in key["methods"]:
            found.setdefault(own["sets"][0], {})[record.method] = record.result["lr"]
    return found
