"""A baseline: a model of a regime that changes base tokens. It answers alone, in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from memoro.backbones import Backbone
from memoro.engine.answers import read_answers
from memoro.errors import CompositionError, TrainingError
from memoro.heads import HeadKind
from memoro.images import Preprocessing, open_image
from memoro.regimes.regime import Regime, TaskPlan
from memoro.tasks.task import MAX_CELLS, BackboneRecord, Task, hash_content, new_task, say_apart

LIMITS = {"cells": (0, MAX_CELLS), "width": (1, 4096), "rank": (1, 1024)}
"""What the sizes of a plan may be."""

Picture = str | Path | Image.Image
Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Parts:
    """What a method gives for one model."""

    parameters: Mapping[str, nn.Parameter]
    """What is trained beside the head."""
    encode: Callable[[Weights, Tensor], Tensor]
    """Those parameters and pixels to the final-normed token (b, dim) that the head reads."""
    stored: Weights | None = None
    """The parameters as a file holds them, where that is not what they are in the model: views of the same values."""


@dataclass(frozen=True)
class Method:
    """What tells the regimes that change base tokens apart."""

    name: str
    summary: str
    sizes: tuple[str, ...]
    """The sizes of a plan that it reads."""
    shapes: Callable[[Backbone, Mapping[str, int]], Shapes]
    """What a file holds beside the head."""
    parts: Callable[[Backbone, TaskPlan, Task], Parts]
    """The task is a fresh one with this plan's cells: where class token and memory start, as in regime `memory`."""

    @property
    def regime(self) -> Regime:
        return Regime(self.name, self.summary, self.build, Baseline.trained, composes=False)

    def build(self, backbone: Backbone, plan: TaskPlan) -> Baseline:
        """An untrained model."""
        if plan.from_layer or plan.extends:
            raise TrainingError(
                f"{plan.name!r}: regime {self.name!r} changes base tokens, so it neither forks nor extends a task. "
                "Leave out from_layer and extends, or take regime 'memory'."
            )
        sizes = {name: getattr(plan, name) for name in self.sizes}
        for name, size in sizes.items():
            low, high = LIMITS[name]
            if not isinstance(size, int) or not low <= size <= high:
                raise TrainingError(f"{plan.name!r}: {name} {size!r} is not a number from {low} to {high}.")
        start = new_task(backbone, plan.name, plan.labels, cells=sizes.get("cells", 0), head=plan.head, seed=plan.seed)
        spec = BaselineSpec(start.name, start.spec.labels, start.kind, self.name, sizes, start.spec.backbone)
        return Baseline(spec, self, backbone, self.parts(backbone, plan, start), start.head)


@dataclass(frozen=True)
class BaselineSpec:
    """What a baseline is, without its weights."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    regime: str
    sizes: Mapping[str, int]
    """Cells, adapter width or rank, as far as the regime has them."""
    backbone: BackboneRecord
    preprocessing: Preprocessing | None = None
    """How its training images were prepared; None as long as nobody trained it: then the backbone's own."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Facts about its training (JSON values)."""
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> TaskPlan:
        """What gives an untrained model of the same shape."""
        sizes = {name: self.sizes.get(name, low) for name, (low, _) in LIMITS.items()}
        return TaskPlan(
            self.name, self.labels, self.kind, cells=sizes["cells"], width=sizes["width"], rank=sizes["rank"]
        )


class Baseline(nn.Module):
    """A head over a backbone whose tokens the regime changes. Its own state is what the regime trains, no more."""

    extends: tuple[Task, ...] = ()
    """It builds on no other, and has all layers to itself: what a training asks of every task."""
    from_layer = 0

    def __init__(self, spec: BaselineSpec, method: Method, backbone: Backbone, parts: Parts, head: nn.Linear) -> None:
        super().__init__()
        self.spec = spec
        self.method = method
        self.backbone = backbone
        for name, parameter in parts.parameters.items():
            _plant(self, name, parameter)
        self.head = head
        self._names = tuple(parts.parameters)
        self._encode = parts.encode
        self._stored = parts.stored

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def labels(self) -> list[str]:
        return list(self.spec.labels)

    @property
    def kind(self) -> HeadKind:
        return self.spec.kind

    @property
    def regime(self) -> str:
        return self.spec.regime

    @property
    def cells(self) -> int:
        return self.spec.sizes.get("cells", 0)

    @property
    def apart(self) -> str:
        """Why it cannot be composed."""
        return say_apart(self.name, self.regime)

    def features(self, pixel_values: Tensor) -> Tensor:
        """The final-normed token (b, dim) that the head reads; the mean of tokens where there is no class token."""
        weights = {name: self.get_parameter(name) for name in self._names}
        return self._encode(weights, self.backbone.check_pixels(pixel_values))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (b, labels) for a batch of normalised images."""
        logits: Tensor = self.head(self.features(pixel_values).to(self.head.weight.dtype))
        return logits

    def predict(self, images: Picture | Iterable[Picture], *, batch_size: int = 32) -> list[dict[str, dict[str, Any]]]:
        """What it says of each image (PIL images or paths), as a composition of one would: by its name."""
        given = [images] if isinstance(images, (str, Path, Image.Image)) else list(images)
        preprocessing = self.spec.preprocessing or self.backbone.preprocessing
        said: list[dict[str, Any]] = []
        for at in range(0, len(given), batch_size):
            opened = [open_image(image, draft=preprocessing.draft) for image in given[at : at + batch_size]]
            pixels = torch.stack([preprocessing.to_tensor(image) for image in opened])
            with torch.no_grad():
                said += read_answers(self.kind, self.labels, self(pixels.to(self.backbone.dtype)))
        return [{self.name: answer} for answer in said]

    def trained(self) -> dict[str, nn.Parameter]:
        """All that the regime trains, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.numel()}

    def stored(self) -> dict[str, Tensor]:
        """What a file holds: views of the trained values, under names that no library decides."""
        own = {name: self.get_parameter(name) for name in self._names} if self._stored is None else self._stored
        both = {**own, "head.weight": self.head.weight, "head.bias": self.head.bias}
        return {name: tensor.detach() for name, tensor in both.items()}

    def content_hash(self) -> str:
        """SHA-256 of all that decides its answers. Training facts and metrics are left out."""
        return hash_baseline(self.spec, self.stored())

    def describe(self, **changes: Any) -> None:
        """Replaces fields of the spec that say how the model came about: preprocessing, training, metrics."""
        self.spec = replace(self.spec, **changes)

    def fill(self, tensors: Weights) -> None:
        """Takes over the values of `stored` of another model."""
        with torch.no_grad():
            for name, tensor in self.stored().items():
                tensor.copy_(tensors[name])

    def __deepcopy__(self, memo: dict[int, Any]) -> Baseline:
        # Built anew: functions that read the parameters of a copied backbone would go on reading the old ones.
        spec = self.spec
        copy = self.method.build(self.backbone, spec.plan)
        copy.spec = spec
        copy.fill(self.stored())
        flags = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(flags[name])
        return copy

    def extra_repr(self) -> str:
        sizes = "".join(f", {size} {name}" for name, size in self.spec.sizes.items())
        return f"{self.name!r}, {len(self.labels)} labels, regime {self.regime!r}{sizes}"


def by_name(models: Iterable[Task | Baseline]) -> dict[str, Task | Baseline]:
    """Tasks and baselines that answer side by side, each under its own name."""
    named: dict[str, Task | Baseline] = {}
    for model in models:
        if model.name in named:
            raise CompositionError(f"two tasks are called {model.name!r}: rename one, a name stands for one answer.")
        named[model.name] = model
    return named


def hash_baseline(spec: BaselineSpec, tensors: Weights) -> str:
    record = {
        "name": spec.name,
        "labels": spec.labels,
        "kind": spec.kind,
        "regime": spec.regime,
        "sizes": dict(spec.sizes),
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "backbone": spec.backbone.fingerprint.digest,
    }
    return hash_content(record, tensors)


def _plant(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a name with dots."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module.register_parameter(leaf, parameter)
