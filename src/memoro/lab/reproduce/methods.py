"""The methods that tables compare: what is trained, its sizes and the learning rates to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memoro.backbones import Backbone
from memoro.data import Splits
from memoro.lab.baselines import REGIMES, BaselinePlan
from memoro.tasks.task import Task


@dataclass(frozen=True)
class Method:
    """What is trained and how. Of the rates, the best on held-out training images is used."""

    name: str
    regime: str
    rates: tuple[float, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    fork: float | None = None
    """The layer of the fork as a fraction of the depth; None: the regime's own."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Recipe` that differ from the budget's."""
    ensemble: int = 1
    """How many runs from different seeds answer together."""

    def to_json(self) -> dict[str, Any]:
        """All that decides its results; without ensembles, as in records of before there were any."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("ensemble", 1)}

    @property
    def composes(self) -> bool:
        """Whether its runs share every pass with those of other methods."""
        return REGIMES[self.regime].composes

    def sizes_on(self, depth: int) -> dict[str, Any]:
        """The sizes, with the layer of the fork on a backbone of this many layers."""
        return {**self.sizes, **({} if self.fork is None else {"from_layer": round(self.fork * depth)})}

    def build(self, backbone: Backbone, splits: Splits, seed: int, extends: Sequence[Task] = ()) -> Any:
        """An untrained Task or Baseline."""
        sizes = self.sizes_on(backbone.depth)
        plan = BaselinePlan(splits.name, splits.labels, splits.kind, seed=seed, extends=extends, **sizes)
        return REGIMES[self.regime].build(backbone, plan)


ADAMW = {"optimizer": "adamw", "weight_decay": 0.01}
MEMORY_RATES = (0.003, 0.01)
"""With AdamW, as for memory without the mask. In short trainings with SGD, some seeds collapse at 0.3."""
UNMASKED_RATES = (0.001, 0.003)
"""With AdamW, for cells that all tokens see: at 0.01, two of three seeds collapsed on rsscn7."""
FORKS = (1 / 3, 1 / 2, 2 / 3, 5 / 6)


def _with_forks(method: Method, forks: Sequence[float] = FORKS) -> list[Method]:
    return [method, *(replace(method, name=f"{method.name}, fork {fork:.2f}", fork=fork) for fork in forks)]


def _memory(cells: int) -> Method:
    """The paper's memory with its mask; with 0 cells, a new class token alone."""
    return Method(f"memory {cells}" if cells else "class", "memory", MEMORY_RATES, {"cells": cells}, recipe=ADAMW)


def _unmasked(name: str, regime: str, rates: tuple[float, ...] = UNMASKED_RATES, **sizes: int) -> Method:
    return Method(name, regime, rates, sizes, recipe=ADAMW)


METHODS = {
    method.name: method
    for method in (
        Method("head", "head", (0.01, 0.03, 0.1, 0.3, 1.0)),
        *(_memory(cells) for cells in (0, 10)),
        *(method for cells in (1, 5, 20) for method in _with_forks(_memory(cells))),
        *(
            method
            for rank in (2, 8)
            for method in _with_forks(
                Method(f"side {rank}", "side", (0.001, 0.003), {"rank": rank}, recipe=ADAMW), (0.0, *FORKS)
            )
        ),
        _unmasked("full", "full", (3e-5, 1e-4)),
        _unmasked("class-full", "class-full", MEMORY_RATES),
        *(_unmasked(f"memory-full {cells}", "memory-full", cells=cells) for cells in (1, 5, 10, 20)),
        _unmasked("lora 8", "lora", (0.001, 0.002), rank=8),
        *(_unmasked(f"adapter {width}", "adapter", width=width) for width in (5, 20)),
        _unmasked("adapter 5 + memory-full 5", "adapter+memory-full", width=5, cells=5),
        _unmasked("propagated 5", "propagated", cells=5),
        _unmasked("propagated-additive 5", "propagated-additive", cells=5),
    )
}

MASKED = ("head", "class", "memory 1", "memory 5", "memory 10", "memory 20", "side 8")
FEW = ("head", "class", "memory 5", "side 8")
"""For comparisons of backbones, which have many settings."""
ADAPTERS = (
    "memory-full 5", "adapter 5", "adapter 20", "adapter 5 + memory-full 5", "propagated 5", "propagated-additive 5",
)  # fmt: skip
FORKED = ("head", "class", *(name for name in METHODS if name.startswith(("memory 5", "side 8, fork"))))
"""The usual sizes over the layer of the fork."""
FORKED_SIZES = (
    *(name for name in METHODS if name.startswith("side 2, fork")),
    *(name for name in METHODS if name.partition(",")[0] in {"memory 1", "memory 20"}),
)
"""Other ranks and cells."""

DECADES = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Learning rates for SGD. AdamW's useful rates are a hundred times lower: its steps do not grow with the gradient."""
STABLE = (
    replace(METHODS["head"], rates=DECADES),
    replace(METHODS["memory 5"], rates=DECADES, recipe={}),
    replace(METHODS["side 8"], rates=tuple(rate / 100 for rate in DECADES)),
)
STABLE_FULL = (
    replace(METHODS["full"], rates=tuple(rate / 10 for rate in DECADES), recipe={}),  # 0.001 was the best of DECADES
    replace(METHODS["memory-full 5"], rates=DECADES, recipe={}),
)

PAPER_RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""The paper does not give its grid."""


def as_in_paper(method: Method) -> Method:
    """The method trained with SGD and a wide grid; `side` and LoRA, which the paper does not have, keep AdamW."""
    if method.regime in {"side", "lora"} or len(method.rates) >= len(DECADES):
        return method
    return replace(method, rates=PAPER_RATES, recipe={})
