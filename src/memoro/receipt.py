"""Proof that a composition left its backbone alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.images import open_image

if TYPE_CHECKING:
    from memoro.composition import Composition


@dataclass(frozen=True)
class Receipt:
    """What `verify` measured on one batch of images."""

    base_equal: bool
    """Whether the original model and the composition give the same base answer, to the bit."""
    base_difference: float
    """The largest difference between the two."""
    tasks: dict[str, float]
    """For each task, the largest difference between its logits alone and in the composition."""
    images: int
    backbone: str
    fingerprint: str
    dtype: str
    device: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        base = "equal to the bit" if self.base_equal else f"DIFFERENT, by up to {self.base_difference:.3g}"
        worst = max(self.tasks.items(), key=lambda item: item[1], default=None)
        lines = [
            f"backbone  {self.backbone} ({self.fingerprint[:12]}), {self.dtype} on {self.device}, {self.images} images",
            f"base      {base}",
            f"tasks     {len(self.tasks)}"
            + ("" if worst is None else f", alone against composed: at most {worst[1]:.3g} ({worst[0]})"),
        ]
        return "\n".join(lines)


def make_receipt(model: Composition, pixel_values: Tensor) -> Receipt:
    """Runs the original model, the composition, and each task alone (with what it extends) on the same pixels."""
    backbone = model.backbone
    pixels = backbone.check_pixels(pixel_values)
    with torch.no_grad():
        together = model(pixels, any_size=True)
        original = backbone.original(pixels)
        alone = {name: model.alone(name)(pixels, [name], any_size=True)[name] for name in model.names}
    return Receipt(
        base_equal=torch.equal(together["base"], original),
        base_difference=_difference(together["base"], original),
        tasks={name: _difference(together[name], logits) for name, logits in alone.items()},
        images=len(pixels),
        backbone=backbone.name,
        fingerprint=backbone.fingerprint.digest,
        dtype=str(backbone.dtype).removeprefix("torch."),
        device=str(backbone.device),
    )


def sample_pixels(backbone: Backbone, images: Sequence[str | Path]) -> Tensor:
    """The images as the backbone takes them, or two of random pixels where there are none."""
    if images:
        return torch.stack([backbone.preprocessing.to_tensor(open_image(image)) for image in images])
    height, width = backbone.preprocessing.size or backbone.image_size
    return torch.randn(2, backbone.channels, height, width, generator=torch.Generator().manual_seed(0))


def _difference(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).abs().max())
