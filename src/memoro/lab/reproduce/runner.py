"""What jobs are run with: backbones and sets by name, loaded when they are needed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memoro.backbones import load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.clock import best_times
from memoro.data import Splits, load_data
from memoro.data.hub import KNOWN, find_known
from memoro.errors import DataError, need
from memoro.images import output_size
from memoro.lab.bench.models import random_vit
from memoro.lab.reproduce.costs import Size, base_passes, count_methods, count_vit
from memoro.lab.reproduce.measure import (
    Bench,
    Budget,
    count_parameters,
    describe_splits,
    limit_training,
    measure_methods,
)
from memoro.lab.reproduce.plan import CHILDREN, CPU, SCALES, TABLES, Job, Key, Request
from memoro.lab.reproduce.records import Records
from memoro.lab.reproduce.several import measure_concat, measure_extension
from memoro.processes import Processes, find_processes
from memoro.training import Cache, TrainOptions
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


def make_request(
    table: str,
    scale_name: str,
    data: Sequence[str],
    backbones: Sequence[str],
    out: Path | None,
    *,
    command: str,
    image_size: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    methods: Sequence[str] = (),
    changes: Mapping[str, Any] = {},
) -> tuple[Request, Runner]:
    """What to run and what with. `changes` are fields of `Budget`: epochs of masked regimes, steps of the others."""
    need("accelerate", "matplotlib", "datasets")
    scale, small = SCALES[scale_name], scale_name == "cpu"
    kept = {name: value for name, value in changes.items() if name != "steps" or scale.masked.steps is not None}
    others = {name: value for name, value in changes.items() if name != "epochs"}
    scale = replace(scale, masked=replace(scale.masked, **kept), unmasked=replace(scale.unmasked, **others))
    sets = find_sets(data) if data or small else {name: name for name in scale.sets}
    if not sets and table != "table5":
        raise DataError(
            "--scale cpu needs sets of images: --data FOLDER or --data SET.zip, each with train/ and test/."
        )
    names = [*(name for name in scale.sets if name in sets), *(name for name in sets if name not in scale.sets)]
    # The names that `load_backbone` gives them.
    sources = {
        Path(source).resolve().name if source != TINY and Path(source).is_dir() else source: source
        for source in backbones or scale.backbones
    }
    tables, folder = tuple(TABLES) if table == "all" else (table,), out or Path("results") / scale.name
    request = Request(scale, tuple(names), tuple(sources), tables, folder, command, frozenset(methods))
    # Kept features serve every job of a set. At the paper's scale every epoch has new views, so nothing is kept.
    options = TrainOptions(cache=Cache() if small else False, folder=folder / "runs", workers=workers, quiet=True)
    return request, Runner(sets, sources, options, image_size, MOST_PIXELS if small else None, device)


@dataclass
class Runner:
    """Runs jobs. Sets and backbones are kept once loaded."""

    sets: dict[str, str]
    """Sources by name."""
    backbones: dict[str, str]
    options: TrainOptions
    """With a `folder`: a job that was cut off continues from its checkpoints in it."""
    image_size: int | None = None
    most_pixels: int | None = MOST_PIXELS
    device: str | None = None
    _benches: dict[str, Bench] = field(default_factory=dict)
    _splits: dict[str, Splits] = field(default_factory=dict)
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
        return nullcontext() if self.processes.world > 1 else lock_folder(self.checkpoints(job))

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
        if name not in self._splits:
            how: dict[str, Any] = {"val_fraction": budget.val_fraction, "workers": self.options.workers}
            self._splits[name] = load_data(self.sets[name], quiet=True, **how)
        return limit_training(self._splits[name], budget.most)

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
            backbone, pixels = self.bench(job.backbone).backbone, self.zeros(job.backbone, 8)
            with torch.no_grad():
                best = best_times({"base": lambda: backbone.original(pixels)}, rounds=3)
            self._speeds[job.backbone] = best["base"] / len(pixels)
        return base_passes(job, sizes) * self._speeds[job.backbone]

    def zeros(self, name: str, batch: int = 1) -> torch.Tensor:
        """Images for a backbone, to time or to count a pass."""
        bench = self.bench(name)
        pixels = torch.zeros(batch, bench.backbone.channels, *output_size(bench.preprocessing))
        return pixels.to(bench.backbone.device, bench.backbone.dtype)

    def run(self, job: Job, records: Records) -> dict[str, dict[str, Any]]:
        """The results of the job's parts, by the name of the method; a job with one result has it under ``."""
        if job.kind == "counts" and not job.backbone:
            return {"": count_vit()}
        bench = self.bench(job.backbone)
        if job.kind == "counts":
            rows = [(one.name, one.regime, one.sizes_on(bench.backbone.depth)) for one in job.methods]
            return {"": {"rows": count_methods(bench.backbone, rows, output_size(bench.preprocessing))}}
        bench = replace(bench, options=replace(bench.options, folder=self.checkpoints(job)))
        splits, *others = (self.splits(name, job.budget) for name in job.sets)
        if job.kind == "accuracy":
            found = measure_methods(bench, splits, job.methods, job.budget)
            return {
                one.name: {**found[one.name], **describe_splits(splits), **count_parameters(bench, splits, one)}
                for one in job.methods
            }
        if job.kind == "concat":
            known = _known_rates(self.key(job), records)
            return {"": measure_concat(bench, [splits, *others], job.methods, job.budget, job.number, known)}
        other = others[0] if others else None
        return {"": measure_extension(bench, splits, other, job.methods, job.budget, CHILDREN[job.number])}

    def checkpoints(self, job: Job) -> Path:
        """The folder of a job's checkpoints."""
        assert isinstance(self.options.folder, Path)
        return self.options.folder / hashlib.sha256(json.dumps(self.key(job)).encode()).hexdigest()[:16]

    def remove_checkpoints(self, job: Job) -> None:
        """Once a job is recorded."""
        folder = self.checkpoints(job)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other jobs have checkpoints
            folder.parent.rmdir()


def _hash(splits: Splits) -> str:
    whole = hashlib.sha256(json.dumps(splits.labels).encode())
    for part in (splits.train, splits.val, splits.test):
        images = (
            [] if part is None else [(Path(part.where(at)).name, part.targets[at].tolist()) for at in range(len(part))]
        )
        whole.update(json.dumps(images).encode())
    return whole.hexdigest()[:12]


def _known_rates(key: Key, records: Records) -> dict[str, Any]:
    """Rates by set and method that an earlier seed of the same job chose."""
    same = (one for one in records.entries if {**one.key, "number": 0} == {**key, "number": 0})
    return next((dict(record.result["rates"]) for record in same), {})
