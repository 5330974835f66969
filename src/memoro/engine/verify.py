"""Check that a composition leaves its backbone's own answer unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import format_count
from memoro.engine.explain import read_views
from memoro.tasks.spec import TaskModule

if TYPE_CHECKING:
    from memoro.engine.composition import Composition

ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far rounding may move a task's logits, relative to the largest of them: products of other shapes sum in another
order. On a CPU, 21 tasks stayed below a tenth of it in float32 and float64; for half precision it is a guess."""


@dataclass(frozen=True)
class Verification:
    """What `Composition.verify` measured on one batch of images."""

    base_equal: bool
    """Whether the original model and the composition give the same base answer, to the bit."""
    base_difference: float
    """The largest difference between the two."""
    tasks: dict[str, float]
    """For each task, the largest difference between its logits alone and in the composition."""
    bounds: dict[str, float]
    """For each task, the largest difference that rounding explains; more is an error."""
    images: int
    backbone: str
    fingerprint: str
    dtype: str
    device: str

    @property
    def tasks_equal(self) -> bool:
        """Whether all tasks answer the same alone and composed, up to rounding."""
        return all(difference <= self.bounds[name] for name, difference in self.tasks.items())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tasks_equal": self.tasks_equal}

    def __str__(self) -> str:
        base = "bitwise equal" if self.base_equal else f"DIFFERENT, by up to {self.base_difference:.3g}"
        where = f"{self.dtype} on {self.device}, {format_count(self.images, 'image')}"
        return (
            f"backbone  {self.backbone} ({self.fingerprint[:12]}), {where}\n"
            f"base      {base}\n"
            f"tasks     {self._format_tasks()}"
        )

    def _format_tasks(self) -> str:
        if not self.tasks:
            return "none"
        if len(self.tasks) == 1:
            return f"1 ({next(iter(self.tasks))}): only one task, so there is nothing to compare"
        # One beyond its bound is worse than a larger difference of larger logits.
        name = max(self.tasks, key=lambda task: (not self.tasks[task] <= self.bounds[task], self.tasks[task]))
        found, bound = self.tasks[name], self.bounds[name]
        verdict = "within" if found <= bound else "DIFFERENT: above"
        return (
            f"{len(self.tasks)}; largest logit difference between a task alone and composed: {found:.2g} ({name}), "
            f"{verdict} the rounding bound of {bound:.2g}"
        )


def verify_composition(model: Composition, pixel_values: Tensor) -> Verification:
    """Runs the original model, the composition, and each task alone (with what it extends) on the same pixels."""
    backbone = model.backbone
    pixels = backbone.check_pixels(pixel_values)
    with torch.no_grad():
        together = model(pixels, any_size=True)
        original = backbone.original(pixels)
        alone = {name: model.alone(name)(pixels, [name], any_size=True)[name] for name in model.names}
    return Verification(
        base_equal=torch.equal(together["base"], original),
        base_difference=_difference(together["base"], original),
        tasks={name: _difference(together[name], logits) for name, logits in alone.items()},
        bounds={name: ROUNDING[backbone.dtype] * max(1.0, float(out.abs().max())) for name, out in alone.items()},
        images=len(pixels),
        backbone=backbone.name,
        fingerprint=backbone.fingerprint.digest,
        dtype=str(backbone.dtype).removeprefix("torch."),
        device=str(backbone.device),
    )


def sample_pixels(backbone: Backbone, images: Sequence[str | Path], tasks: Iterable[TaskModule[Any]] = ()) -> Tensor:
    """The images as the backbone takes them, or two of random pixels if there are none.

    Images of more than 8 bits have the scale of the first of the tasks that has one.
    """
    if images:
        whites = [task.spec.preprocessing.white for task in tasks if task.spec.preprocessing is not None]
        white = next((white for white in whites if white is not None), None)
        named = [(str(image), image) for image in images]
        return read_views(named, replace(backbone.preprocessing, white=white))[0]
    height, width = backbone.preprocessing.size or backbone.image_size
    return torch.randn(
        2, backbone.channels, height, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )


def _difference(first: Tensor, second: Tensor) -> float:
    # MPS has no float64.
    return float((first.cpu().double() - second.cpu().double()).abs().max())
