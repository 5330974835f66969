"""A baseline: a model of a regime that changes base tokens. It answers in a pass of its own and is not composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from memoro.answer import AnswerDict
from memoro.backbones import Anatomy, Backbone
from memoro.engine.answers import (
    AnswerOptions,
    Outputs,
    Pass,
    Pictures,
    answer_pictures,
    list_pictures,
    read_predictions,
)
from memoro.errors import TrainingError
from memoro.lab.baselines.dense import Weights
from memoro.regimes.regime import RATES, Regime, TaskPlan, all_parameters
from memoro.tasks.spec import INIT_STD, MAX_CELLS, ModelSpec, TaskModule
from memoro.tasks.task import Task, new_task

LIMITS = {"cells": (0, MAX_CELLS), "width": (1, 4096), "rank": (1, 1024)}
"""What the sizes of a plan may be."""
DEFAULTS = {"cells": 5, "rank": 8}

ELSEWHERE = "save it with save_baseline, and load it with load_baseline for the other backbone."
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BaselinePlan(TaskPlan):
    """A plan with the sizes of baselines. `rank` is that of the matrices that LoRA adds to a copy of the backbone."""

    width: int = 5
    """Bottleneck of adapters."""
    checkpointing: bool = False
    """Of gradients: less memory and more time, for methods that train a copy of the backbone."""


@dataclass(frozen=True)
class Parts:
    """What one model is made of, besides its head."""

    anatomy: Anatomy
    """The backbone's own, or that of a copy."""
    parameters: Mapping[str, nn.Parameter]
    """What is trained."""
    stored: Weights | None = None
    """The parameters as a file holds them, where that is not what they are in the model: views of the same values."""


@dataclass(frozen=True)
class BaselineRegime:
    """A regime that changes base tokens: what it trains, and how it encodes an image."""

    name: str
    sizes: tuple[str, ...]
    """The sizes of a `BaselinePlan` that it reads."""
    shapes: Callable[[Backbone, Mapping[str, int]], Shapes]
    """What is trained, and stored in a file, besides the head."""
    encode: Callable[..., Tensor]
    """Anatomy, trained parameters and pixels to the final-normed token (b, dim) that the head reads."""
    copy: Callable[[Backbone, TaskPlan, torch.dtype], Parts] | None = None
    """For methods that train a copy of the backbone, and have `run_copy` as `encode`; the others add parameters to the
    frozen one."""
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: RATES)
    recipe: str = "paper"

    @property
    def regime(self) -> Regime:
        """What training knows of it."""
        from memoro.lab.baselines.file import read_hashes, save_baseline

        return Regime(
            self.name,
            self.make,
            lambda depth: {name: size for name, size in DEFAULTS.items() if name in self.sizes},
            self.trained,
            composes=False,
            rates=self.rates,
            recipe=self.recipe,
            save=save_baseline,
            read_hashes=read_hashes,
        )

    def trained(self, model: Baseline) -> dict[str, nn.Parameter]:
        """All parameters of a model that this regime built."""
        if model.spec.regime != self.name:
            raise TrainingError(
                f"{model.name!r} is a baseline of regime {model.spec.regime!r}; regime {self.name!r} only trains "
                "models that it built itself."
            )
        return all_parameters(model)

    def build(self, backbone: Backbone, plan: TaskPlan) -> Baseline:
        """An untrained model. Sizes that the plan leaves open are the regime's own."""
        model: Baseline = self.regime.build(backbone, plan)
        return model

    def make(self, backbone: Backbone, plan: TaskPlan) -> Baseline:
        """An untrained model from a plan with all sizes."""
        if not isinstance(plan, BaselinePlan):
            plan = BaselinePlan(**vars(plan))
        if plan.from_layer or plan.extends:
            raise TrainingError(
                f"{plan.name!r}: regime {self.name!r} changes the backbone's tokens, so from_layer and extends do "
                "not apply. Remove them, or use regime 'memory' or 'side'."
            )
        sizes = {name: getattr(plan, name) for name in self.sizes}
        for name, size in sizes.items():
            low, high = LIMITS[name]
            if not isinstance(size, int) or not low <= size <= high:
                raise TrainingError(f"{plan.name!r}: {name} must be between {low} and {high}, not {size!r}.")
        start = new_task(backbone, plan.name, plan.labels, cells=sizes.get("cells", 0), head=plan.head, seed=plan.seed)
        common = {name: getattr(start.spec, name) for name in ("name", "labels", "kind", "backbone")}
        spec = BaselineSpec(**common, regime=self.name, sizes=sizes)
        if self.copy is not None:
            encode = partial(self.encode, checkpointing=plan.checkpointing)
            return Baseline(spec, encode, backbone, self.copy(backbone, plan, start.head.weight.dtype), start.head)
        if plan.checkpointing:
            raise TrainingError(f"regime {self.name!r} trains no copy of the backbone: leave out `checkpointing`.")
        parts = Parts(backbone.anatomy, _start_values(self.shapes(backbone, sizes), start, plan.seed))
        return Baseline(spec, self.encode, backbone, parts, start.head)


def _start_values(shapes: Shapes, start: Task, seed: int) -> dict[str, nn.Parameter]:
    """Class token and memory as in a fresh task of regime `memory`, all else N(0, 0.02)."""
    generator, like = torch.Generator("cpu").manual_seed(seed), start.head.weight
    values: dict[str, Tensor] = {"class_token": start.class_token, "memory": start.memory}
    for name, shape in shapes.items():
        if name not in values:
            values[name] = INIT_STD * torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu").to(
                like.device
            )
    return {name: nn.Parameter(values[name].detach()[: shape[0]].clone()) for name, shape in shapes.items()}


@dataclass(frozen=True, kw_only=True)
class BaselineSpec(ModelSpec):
    """What a baseline is, without its weights."""

    regime: str
    sizes: Mapping[str, int]
    """Cells, adapter width or rank, as far as the regime has them."""

    @property
    def plan(self) -> BaselinePlan:
        """What gives an untrained model of the same shape."""
        sizes: dict[str, Any] = dict(self.sizes)
        return BaselinePlan(self.name, self.labels, self.kind, **sizes)

    def hash(self, tensors: Weights) -> str:
        """The content hash of the baseline with these weights."""
        return self.hash_content(tensors, regime=self.regime, sizes=dict(self.sizes))


class Baseline(TaskModule[BaselineSpec]):
    """A head over a backbone whose tokens the regime changes. Its own state is what the regime trains, no more."""

    def __init__(
        self, spec: BaselineSpec, encode: Callable[..., Tensor], backbone: Backbone, parts: Parts, head: nn.Linear
    ) -> None:
        super().__init__(spec)
        self._encode = encode
        self.backbone = backbone
        for name, parameter in parts.parameters.items():
            self.register_parameter(name.replace(".", "/"), parameter)  # torch allows no dots
        self.head = head
        self._parts = parts

    @property
    def regime(self) -> str:
        return self.spec.regime

    @property
    def not_composable(self) -> str:
        """Why it cannot be composed."""
        return (
            f"{self.name!r} was trained with regime {self.regime!r}, which changes the backbone's own tokens, so it "
            "needs a separate pass and cannot be composed with tasks. To compose it, train it with 'side' or 'memory'."
        )

    @property
    def cells(self) -> int:
        return self.spec.sizes.get("cells", 0)

    @property
    def rank(self) -> int:
        return self.spec.sizes.get("rank", 0)

    def features(self, pixel_values: Tensor) -> Tensor:
        """The final-normed token (b, dim) that the head reads; the mean of tokens where there is no class token."""
        return self._encode(self._parts.anatomy, self._parts.parameters, self.backbone.check_pixels(pixel_values))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (b, labels) for a batch of normalised images."""
        logits: Tensor = self.head(self.features(pixel_values).to(self.head.weight.dtype))
        return logits

    def predict(self, images: Pictures, *, batch_size: int = 32, top: int | None = None) -> list[dict[str, AnswerDict]]:
        """What it answers for each image, by its name, as a composition of one task would."""
        pictures, how = list_pictures(images), AnswerOptions(batch_size, top)
        return read_predictions(answer_pictures(pictures, self.prediction_passes(), [self.name], how))

    def prediction_passes(self) -> list[Pass]:
        """What `predict` runs: its one pass."""
        preprocessing = self.spec.preprocessing or self.backbone.preprocessing

        def run(pixels: Tensor) -> Outputs:
            token = self.features(pixels.to(self.backbone.dtype))
            return Outputs({self.name: self.head(token.to(self.head.weight.dtype))}, {}, {self.name: token})

        return [Pass(preprocessing, [self], run)]

    def stored(self) -> dict[str, Tensor]:
        """What a file holds: views of the trained values, under names that no library decides."""
        own = self._parts.parameters if self._parts.stored is None else self._parts.stored
        both = {**own, "head.weight": self.head.weight, "head.bias": self.head.bias}
        return {name: tensor.detach() for name, tensor in both.items()}

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "sizes": dict(self.spec.sizes)}

    def content_hash(self) -> str:
        return self.spec.hash(self.stored())

    def fill(self, tensors: Weights) -> None:
        """Copies in the values of `stored` of another model."""
        with torch.no_grad():
            for name, tensor in self.stored().items():
                tensor.copy_(tensors[name])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        # What to(), cuda(), half() and the like call.
        raise TrainingError(
            f"{self.name!r} reads the weights of its backbone, so it cannot be moved alone: {ELSEWHERE}"
        )

    def __reduce__(self) -> NoReturn:
        # A copied anatomy would go on reading the old parameters.
        raise TrainingError(f"{self.name!r} is a part of its backbone, so it cannot be copied or pickled: {ELSEWHERE}")
