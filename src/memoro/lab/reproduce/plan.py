"""What each table measures, as a list of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from memoro.backbones.load import TINY
from memoro.errors import DataError
from memoro.lab.reproduce.measure import Budget
from memoro.lab.reproduce.methods import (
    ADAPTERS,
    FEW,
    FORKED,
    FORKED_SIZES,
    MASKED,
    METHODS,
    STABLE,
    STABLE_FULL,
    Method,
    as_in_paper,
)

Key = dict[str, Any]
CHILDREN = ("classes", "groups")
"""The task that extends another: half of a set's classes, or two groups of its classes."""
MOST_RUNS = 24
"""Runs of a job that share a pass; more of them are several jobs, so that none takes much longer than 15 minutes."""


@dataclass(frozen=True)
class Job:
    """What is measured in one call of training: a set, a backbone, and methods that share its passes.

    Plans have a job for each method of `accuracy`; `group_jobs` puts them together.
    """

    kind: Literal["accuracy", "concat", "extension", "counts"]
    backbone: str
    sets: tuple[str, ...]
    """Names of the sets; all kinds but `accuracy` use several."""
    methods: tuple[Method, ...]
    budget: Budget
    number: int = 0
    """The seed of `concat`; which of `CHILDREN` of `extension`."""

    @property
    def title(self) -> str:
        """For progress: `rsscn7, dinov2-small-reg: head, class, memory 1`."""
        what = {
            "accuracy": ", ".join(method.name for method in self.methods),
            "concat": f"seed {self.number}",
            "extension": CHILDREN[self.number % 2],
            "counts": "parameters and FLOPs",
        }
        return f"{', '.join([*self.sets, self.backbone or 'ViT-B/32'])}: {what[self.kind]}"

    def parts(self) -> list[Job]:
        """What is recorded on a line of its own: each method of an accuracy job, else the job."""
        return [replace(self, methods=(method,)) for method in self.methods] if self.kind == "accuracy" else [self]

    def key(self, fingerprint: str, image_size: int, images: Mapping[str, str] = {}) -> Key:
        """All that decides the result: a record with the same key is this measurement. `images` has a digest of each
        set."""
        own = {name: images.get(name, "") for name in self.sets}
        found = {**asdict(self), "methods": [method.to_json() for method in self.methods]}
        found |= {"fingerprint": fingerprint, "image_size": image_size, "images": own}
        return dict(json.loads(json.dumps(found)))  # as it is read back: lists for tuples


@dataclass(frozen=True)
class Scale:
    """The numbers of a plan: small ones for two CPU cores, or the paper's."""

    name: str
    masked: Budget
    unmasked: Budget
    sets: tuple[str, ...]
    unmasked_sets: tuple[str, ...]
    """Regimes that change base tokens need passes of their own: few sets, of different kinds."""
    backbones: tuple[str, ...]
    cells: tuple[int, ...]
    """Memory cells of regimes that change base tokens."""

    def methods(self, names: Iterable[str | Method]) -> tuple[Method, ...]:
        """The methods as this scale has them."""
        methods = (METHODS[name] if isinstance(name, str) else name for name in names)
        return tuple(as_in_paper(method) if self.name == "paper" else method for method in methods)

    @property
    def unmasked_memory(self) -> list[str]:
        """Class token and memory without the mask."""
        return ["class-full", *(f"memory-full {cells}" for cells in self.cells)]


CPU = Scale(
    "cpu",
    Budget(epochs=10),
    Budget(steps=150, folds=1),
    ("cifar10", "cifar100", "flowers102", "dtd10", "rsscn7", "intel_scenes6", "pacs_sketch", "ants_bees"),
    ("cifar10", "dtd10", "rsscn7", "pacs_sketch"),
    (TINY,),
    (1, 5, 20),
)
_PAPER_BUDGET = Budget(steps=20_000, batch_size=512, views=None, most=None, val_fraction=0.1)
PAPER = Scale(
    "paper",
    _PAPER_BUDGET,
    _PAPER_BUDGET,
    *(("sun397", "inaturalist2017", "cifar100", "places365"),) * 2,
    ("google/vit-base-patch32-224-in21k",),
    (1, 5, 10, 20),
)
SCALES = {scale.name: scale for scale in (CPU, PAPER)}


@dataclass(frozen=True)
class Request:
    """What a command asks for: tables at a scale, of which sets and backbones, and where results are."""

    scale: Scale
    sets: tuple[str, ...]
    backbones: tuple[str, ...]
    tables: tuple[str, ...] = ()
    out: Path = Path()
    command: str = ""
    """As the user typed it, for the records."""
    methods: frozenset[str] = frozenset()
    """The only ones to measure; empty: all."""

    @property
    def few_sets(self) -> tuple[str, ...]:
        """The sets for regimes that need passes of their own: those of the scale that are here, or the first four."""
        return tuple(name for name in self.scale.unmasked_sets if name in self.sets) or self.sets[:4]

    @property
    def one_set(self) -> tuple[str, ...]:
        """The set for what takes most passes at CPU scale: satellite images, or the first set."""
        return ("rsscn7",) if "rsscn7" in self.few_sets else self.few_sets[:1]

    @property
    def main_backbone(self) -> str:
        """The one that they run on."""
        return TINY if TINY in self.backbones else self.backbones[0]

    def accuracy(
        self,
        methods: Iterable[str | Method],
        budget: Budget,
        sets: Sequence[str] | None = None,
        backbones: Sequence[str] | None = None,
    ) -> Iterator[Job]:
        """A job for each backbone, set and method: on the main backbone and few sets unless others are given."""
        chosen = self.scale.methods(methods)
        for backbone in backbones or [self.main_backbone]:
            for name in self.few_sets if sets is None else sets:
                yield from (Job("accuracy", backbone, (name,), (one,), budget.on_set(name)) for one in chosen)

    def jobs(self) -> list[tuple[str, Job]]:
        """The jobs of each table, in order; only those whose methods were all asked for."""
        jobs = [(table, job) for table in self.tables for job in TABLES[table](self)]
        if not self.methods:
            return jobs
        known = dict.fromkeys(method.name for _, job in jobs for method in job.methods)
        if unknown := sorted(self.methods - known.keys()):
            there = f"choose from {', '.join(known)}" if known else "this table has no choice of methods"
            raise DataError(f"{', '.join(self.tables)}: no method {unknown[0]!r}; {there}.")
        chosen = [(table, job) for table, job in jobs if self.methods >= {method.name for method in job.methods}]
        if not chosen:
            raise DataError(f"{', '.join(self.tables)} compares {', '.join(known)}: name all of them, or none.")
        return chosen


def group_jobs(jobs: Iterable[tuple[str, Job]]) -> list[tuple[str, Job]]:
    """The jobs of each table, with methods that share passes together, unless they would have too many runs."""
    grouped = []
    for (table, blank), some in groupby(jobs, key=lambda one: (one[0], replace(one[1], methods=()))):
        groups: list[list[Method]] = []
        for methods in ([*job.methods] for _, job in some):
            both = [*groups[-1], *methods] if groups and blank.kind == "accuracy" else []
            if (
                both
                and all(one.composes for one in both)
                and sum(runs_of(one, blank.budget) for one in both) <= MOST_RUNS
            ):
                groups[-1] = both
            else:
                groups.append(methods)
        grouped += [(table, replace(blank, methods=tuple(group))) for group in groups]
    return grouped


def runs_of(method: Method, budget: Budget) -> int:
    """Runs of a method that share a pass: of two folds, or of the seeds."""
    return max(len(method.rates) * budget.judging_seeds * (budget.folds or 2), budget.seeds)


def _table2(request: Request) -> Iterator[Job]:
    scale = request.scale
    yield from request.accuracy(MASKED, scale.masked, request.sets, request.backbones)
    yield from request.accuracy(["full", *scale.unmasked_memory], scale.unmasked)
    yield from request.accuracy(["lora 8"], scale.unmasked, None if scale.name == "paper" else request.one_set)
    yield from request.accuracy(["head"], scale.unmasked)  # the paper's ordering ends with it
    larger = [name for name in request.backbones if name != request.main_backbone]
    if scale.name == "cpu" and larger:  # they have time for one set and fewer steps
        budget = replace(scale.unmasked, steps=max(1, 2 * (scale.unmasked.steps or 0) // 3))
        for methods in (["full"], FEW):
            yield from request.accuracy(methods, budget, request.one_set, larger)


def _table4(request: Request) -> Iterator[Job]:
    sets = request.one_set if request.scale.name == "cpu" else ("inaturalist2017",)
    yield from request.accuracy(ADAPTERS, request.scale.unmasked, [name for name in sets if name in request.sets])


def _table5(request: Request) -> Iterator[Job]:
    yield Job("counts", "", (), (), Budget())


def _naive(request: Request) -> Iterator[Job]:
    # The paper measures i-Naturalist, then adds Places, CIFAR and SUN.
    order = ("inaturalist2017", "places365", "cifar100", "sun397")
    sets = tuple(name for name in order if name in request.sets)
    if request.scale.name == "cpu":
        sets = request.few_sets[-3:]  # two models that are added show whether it goes on falling
    if len(sets) < 2:
        raise DataError("naive-concat needs two sets or more: repeat --data.")
    methods, budget = request.scale.methods(["memory-full 5", "memory 5"]), request.scale.unmasked
    for seed in range(budget.seeds):
        yield Job("concat", request.main_backbone, sets, methods, budget, seed)


def _masking(request: Request) -> Iterator[Job]:
    scale = request.scale
    yield from request.accuracy(["head", "class", *(f"memory {cells}" for cells in scale.cells)], scale.unmasked)
    yield from request.accuracy(scale.unmasked_memory, scale.unmasked)


def _extension(request: Request) -> Iterator[Job]:
    methods = request.scale.methods(["memory 5", "side 8"])
    # Steps, because ten epochs of 40 images are twenty of them; small sets need all folds to choose a rate.
    budget = replace(request.scale.unmasked, folds=request.scale.masked.folds)
    names = request.few_sets[-2:]  # each is the other one's parent
    for name in names:
        sets = (name, *(one for one in names if one != name))
        for child in range(len(CHILDREN)):
            yield Job("extension", request.main_backbone, sets, methods, budget, child)


def _fork(request: Request) -> Iterator[Job]:
    budget, few = request.scale.masked, request.few_sets
    for backbone in request.backbones:
        yield Job("counts", backbone, (), tuple(METHODS[name] for name in (*FORKED, *FORKED_SIZES)), Budget())
    yield from request.accuracy(FORKED, budget, few[-3:], request.backbones)
    yield from request.accuracy(FORKED_SIZES, budget, few[-2:])


def _models(request: Request) -> Iterator[Job]:
    yield from request.accuracy(FEW, request.scale.masked, request.sets, request.backbones)


def _stability(request: Request) -> Iterator[Job]:
    scale, sets = request.scale, request.one_set if request.scale.name == "cpu" else request.few_sets
    yield from request.accuracy(STABLE, replace(scale.masked, seeds=0, folds=1, judging_seeds=3), sets)
    yield from request.accuracy(STABLE_FULL, replace(scale.unmasked, seeds=0, folds=1), sets)


TABLES: dict[str, Callable[[Request], Iterator[Job]]] = {
    "table2": _table2,
    "naive-concat": _naive,
    "masking": _masking,
    "fork": _fork,
    "extension": _extension,
    "table4": _table4,
    "lr-stability": _stability,
    "models": _models,
    "table5": _table5,
}
"""In order of value: `all` runs them in this order."""
