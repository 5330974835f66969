"""What each table measures, as a list of jobs. A job is one call of training, recorded as a whole when it is done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from memoro.backbones.load import TINY
from memoro.errors import DataError
from memoro.lab.reproduce.measure import Budget
from memoro.lab.reproduce.methods import (
    ADAPTER,
    ADAPTER_MEMORY,
    ADAPTER_WIDE,
    ADDITIVE,
    CLASS_FULL,
    FORKED,
    FORKED_SIZES,
    FULL,
    HEAD,
    LORA,
    MASKED,
    PROPAGATED,
    STABLE,
    STABLE_FULL,
    Method,
    as_in_paper,
    memory,
    memory_full,
    side,
)

Kind = Literal["accuracy", "concat", "extension", "counts"]
Key = dict[str, Any]
CHILDREN = ("classes", "groups")
"""The task that extends another: half of a set's classes, or two groups of its classes."""

MOST_RUNS = 24
"""Runs of a job that share a pass; more of them are several jobs, so that none takes much longer than 15 minutes."""


@dataclass(frozen=True)
class Job:
    """A set, a backbone and a group of methods that are measured together."""

    kind: Kind
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
        sets = ", ".join(self.sets) or ("" if self.backbone else "ViT-B/32")
        names = ", ".join(method.name for method in self.methods)
        number = {
            "concat": f"seed {self.number}",
            "extension": CHILDREN[self.number % 2],
            "counts": "parameters and FLOPs",
        }.get(self.kind, "")
        return ": ".join(filter(None, [", ".join(filter(None, [sets, self.backbone])), number or names]))

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
    adjust: Callable[[Method], Method] = field(default=lambda method: method, repr=False)

    def budget(self, masked: bool, name: str) -> Budget:
        return (self.masked if masked else self.unmasked).on_set(name)


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
    as_in_paper,
)
SCALES = {scale.name: scale for scale in (CPU, PAPER)}


@dataclass(frozen=True)
class Request:
    """What a plan is made for."""

    scale: Scale
    sets: tuple[str, ...]
    backbones: tuple[str, ...]

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

    @property
    def at_unmasked_budget(self) -> Request:
        """For methods with the mask that are compared with those without it: trained as long, on the same sets."""
        scale = replace(self.scale, masked=self.scale.unmasked)
        return replace(self, scale=scale, sets=self.few_sets, backbones=(self.main_backbone,))

    def masked(self, methods: Sequence[Method], sets: Sequence[str] | None = None, **changes: Any) -> Iterator[Job]:
        """Cells of methods that share passes, over all backbones and sets."""
        for backbone in self.backbones:
            for name in self.sets if sets is None else sets:
                budget = replace(self.scale.budget(True, name), **changes)
                for group in group_methods([self.scale.adjust(method) for method in methods], budget):
                    yield Job("accuracy", backbone, (name,), group, budget)

    def unmasked(self, methods: Sequence[Method], sets: Sequence[str] | None = None, **changes: Any) -> Iterator[Job]:
        """Cells of one method each, on the main backbone."""
        for name in self.few_sets if sets is None else sets:
            for method in methods:
                budget = replace(self.scale.budget(False, name), **changes)
                yield Job("accuracy", self.main_backbone, (name,), (self.scale.adjust(method),), budget)


def group_methods(methods: Sequence[Method], budget: Budget) -> Iterator[tuple[Method, ...]]:
    """The methods in order, in groups that share passes, cut where a group would have too many runs."""
    group: list[Method] = []
    for method in methods:
        both = [*group, method]
        shared = all(one.composes for one in both) and sum(runs_of(one, budget) for one in both) <= MOST_RUNS
        if group and not shared:
            yield tuple(group)
            group = []
        group.append(method)
    if group:
        yield tuple(group)


def runs_of(method: Method, budget: Budget) -> int:
    """Runs of a method that share a pass: of two folds, or of the seeds."""
    return max(len(method.rates) * budget.judging_seeds * (budget.folds or 2), budget.seeds)


def _table2(request: Request) -> Iterator[Job]:
    yield from request.masked(MASKED)
    yield from request.unmasked([FULL, CLASS_FULL, *map(memory_full, request.scale.cells)])
    yield from request.unmasked([LORA], request.few_sets if request.scale.name == "paper" else request.one_set)
    yield from request.at_unmasked_budget.masked([HEAD])  # the paper's ordering ends with it
    if request.scale.name == "cpu":  # the larger backbones have time for one set and fewer steps
        budget = replace(request.scale.unmasked, steps=max(1, 2 * (request.scale.unmasked.steps or 0) // 3))
        larger = tuple(name for name in request.backbones if name != request.main_backbone)
        for backbone in larger:
            yield Job("accuracy", backbone, request.one_set, (FULL,), budget)
        shorter = replace(request, scale=replace(request.scale, masked=budget), backbones=larger)
        yield from shorter.masked([HEAD, memory(0), memory(5), side()], request.one_set)


def _table4(request: Request) -> Iterator[Job]:
    sets = request.one_set if request.scale.name == "cpu" else ("inaturalist2017",)
    methods = (memory_full(5), ADAPTER, ADAPTER_WIDE, ADAPTER_MEMORY, PROPAGATED, ADDITIVE)
    yield from request.unmasked(methods, [name for name in sets if name in request.sets])


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
    methods = (request.scale.adjust(memory_full(5)), request.scale.adjust(memory(5)))
    for seed in range(request.scale.unmasked.seeds):
        yield Job("concat", request.main_backbone, sets, methods, request.scale.unmasked, seed)


def _masking(request: Request) -> Iterator[Job]:
    yield from request.at_unmasked_budget.masked([HEAD, *map(memory, (0, *request.scale.cells))])
    yield from request.unmasked([CLASS_FULL, *map(memory_full, request.scale.cells)])


def _extension(request: Request) -> Iterator[Job]:
    methods = tuple(map(request.scale.adjust, (memory(5), side())))
    # Steps, because ten epochs of 40 images are twenty of them; small sets need all folds to choose a rate.
    budget = replace(request.scale.unmasked, folds=request.scale.masked.folds)
    names = request.few_sets[-2:]  # each is the other one's parent
    for name in names:
        sets = (name, *(one for one in names if one != name))
        for child in range(len(CHILDREN)):
            yield Job("extension", request.main_backbone, sets, methods, budget, child)


def _fork(request: Request) -> Iterator[Job]:
    for backbone in request.backbones:
        yield Job("counts", backbone, (), (*FORKED, *FORKED_SIZES), Budget())
    yield from request.masked(FORKED, request.few_sets[-3:])
    yield from replace(request, backbones=(request.main_backbone,)).masked(FORKED_SIZES, request.few_sets[-2:])


def _models(request: Request) -> Iterator[Job]:
    yield from request.masked((HEAD, memory(0), memory(5), side()))


def _stability(request: Request) -> Iterator[Job]:
    here = replace(request, backbones=(request.main_backbone,), scale=replace(request.scale, adjust=lambda one: one))
    sets = request.one_set if request.scale.name == "cpu" else request.few_sets
    yield from here.masked(STABLE, sets, seeds=0, folds=1, judging_seeds=3)
    yield from here.unmasked(STABLE_FULL, sets, seeds=0, folds=1)


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


def plan_table(table: str, request: Request) -> list[Job]:
    """All jobs of a table. Tables may share measurements: one that is recorded is not repeated."""
    return list(TABLES[table](request))
