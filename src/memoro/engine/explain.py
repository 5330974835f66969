"""Where a task looked: its attention, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.backbones import Anatomy
from memoro.engine.answers import Pictures, list_pictures
from memoro.engine.bank import Bank
from memoro.engine.plan import Plan
from memoro.engine.streams import Attention, layer_bias, run_streams
from memoro.errors import DataError, ImageError
from memoro.images import Preprocessing, open_image
from memoro.tasks.task import Task

OWN_TOKEN = "the task's token"
READ_OUT = "the read-out"
VIEW = 448
"""Pixels of the shorter edge of an overlay."""
_RAMP = np.array([[20, 30, 80], [90, 45, 135], [195, 65, 105], [248, 150, 60], [255, 240, 140]], dtype=np.float32)
"""Colours from no attention to the most."""


@dataclass(frozen=True)
class Explanation:
    """Attention weights of one task's token. At each layer, image and head, all fields together sum to one."""

    task: str
    source: str
    """Whose attention it is: the task's token. A head has no layers of its own: there it is the base's class token, or
    the mean over all tokens where the base has none."""
    layers: tuple[int, ...]
    """The layers that this token passes; the first axis of every tensor below."""
    patches: Tensor
    """(layers, b, h, rows, columns): to each patch of the image."""
    prefix: Tensor
    """(layers, b, h, tokens): to the base's class token, registers and the like."""
    itself: Tensor
    """(layers, b, h)"""
    memory: Tensor
    """(layers, b, h, cells): to its own memory."""
    parents: dict[str, Tensor]
    """(layers, b, h) for each task that it extends: to that one's token and memory together."""
    images: tuple[Image.Image, ...] = ()
    """What the task saw of each image, in more pixels; empty where it was given a tensor."""
    evidence: Tensor | None = None
    """(b, rows, columns) of a task with a read-out: what each patch adds, by the means of the patch tokens, to the
    read-out's logit of the answer, compared with the mean over all labels. `source` is the read-out then."""

    @property
    def note(self) -> str | None:
        """What a reader has to know about a picture of `heatmap`; None for the attention of the task's own token."""
        if self.source == OWN_TOKEN:
            return None
        if self.source == READ_OUT:
            return "The map shows what each part of the image adds to the read-out's answer."
        return f"A head has no attention of its own: this is the attention of {self.source}."

    def heatmap(self) -> Tensor:
        """(b, rows, columns), for a plot: the read-out's evidence; without a read-out, attention to patches, averaged
        over heads and layers."""
        return self.patches.mean(dim=(0, 2)) if self.evidence is None else self.evidence

    def overlay(self, index: int = 0) -> Image.Image:
        """One of the images in grey under its heat map: from dark blue, no attention, to yellow, the most."""
        if not self.images:
            raise ImageError("an overlay needs the image: give explain() images or paths, not a tensor.")
        image, heat = self.images[index], self.heatmap()[index].float().cpu()
        low, high = heat.min(), heat.max()
        levels = Image.fromarray(((heat - low) / (high - low).clamp(min=1e-12)).numpy())
        places = np.linspace(0.0, 1.0, len(_RAMP))
        strength = np.asarray(levels.resize(image.size, Image.Resampling.BICUBIC))
        colors = np.stack([np.interp(strength, places, channel) for channel in _RAMP.T], axis=-1)
        grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None]
        return Image.fromarray((0.5 * grey + 0.5 * colors).round().astype(np.uint8))

    def shares(self, index: int = 0) -> dict[str, float]:
        """What one of the images' attention went to, averaged over heads and layers; the values sum to one."""
        parts = {
            "patches": self.patches.sum(dim=(-1, -2)),
            "base tokens": self.prefix.sum(dim=-1),
            "itself": self.itself,
            "memory": self.memory.sum(dim=-1),
        }
        parts |= {f"{name} (task)" if name in parts else name: weights for name, weights in self.parents.items()}
        return {name: float(weights[:, index].mean()) for name, weights in parts.items() if weights.any()}


def read_views(images: Pictures, preprocessing: Preprocessing) -> tuple[Tensor, list[Image.Image]]:
    """The images as a batch of pixels, and what the model sees of each as an image of at least `VIEW` pixels."""
    size = preprocessing.size
    view = preprocessing
    if size is not None and min(size) < VIEW:
        with suppress(DataError):  # one that is long and thin would be too large
            view = preprocessing.at(VIEW)
    pixels: list[Tensor] = []
    views: list[Image.Image] = []
    for name, picture in list_pictures(images):
        how: dict[str, Any] = {"name": name, "opened": {}, "white": preprocessing.white}
        pixels.append(preprocessing.to_tensor(open_image(picture, draft=preprocessing.draft, **how)))
        views.append(view.fit(open_image(picture, draft=view.draft, **how)))
    if not pixels:
        raise ImageError("no images to explain.")
    if len({one.shape for one in pixels}) > 1:
        raise ImageError("these images differ in size, and the preprocessing has no crop: explain them one by one.")
    return torch.stack(pixels), views


def explain_task(
    anatomy: Anatomy, pixels: Tensor, plan: Plan, bank: Bank, tasks: Sequence[Task], members: Sequence[int]
) -> Explanation:
    """The attention of a task on these images, from a plan that computes it: the mean over its members."""
    task, batch, heads = tasks[members[0]], len(pixels), anatomy.heads
    if task.from_layer == anatomy.depth:
        return explain_base(anatomy, pixels, task.name)
    layers: list[int] = []
    base: list[Tensor] = []
    itself: list[Tensor] = []
    memory: list[Tensor] = []
    parents: dict[str, list[Tensor]] = {tasks[i].name: [] for i in plan.order if i not in members}

    def watch(layer: int, attention: Attention) -> None:
        group = attention.group
        rows = [plan.order[row] for row in group.rows.tolist()]
        if members[0] not in rows:  # all members see equally much, so they are in one group
            return
        at = [rows.index(member) for member in members]
        seen = [members[0]] if group.tokens is None else [plan.order[row] for row in group.tokens[at[0]].tolist()]
        tokens = attention.tokens[:, :, at].mean(dim=2)
        cells = tokens.new_zeros(batch, heads, 0) if attention.cells is None else attention.cells[:, :, at].mean(dim=2)
        own, *others = torch.split(cells, [tasks[i].cells for i in seen], dim=-1)
        layers.append(layer)
        base.append(attention.base[:, :, at].mean(dim=2))
        itself.append(tokens[..., 0])
        memory.append(own)
        found = {name: torch.zeros_like(tokens[..., 0]) for name in parents}
        for place, (i, part) in enumerate(zip(seen[1:], others, strict=True), start=1):
            found[tasks[i].name] += tokens[..., place] + part.sum(dim=-1)
        for name, weights in parents.items():
            weights.append(found[name])

    def stack(parts: list[Tensor], *tail: int) -> Tensor:
        return torch.stack(parts) if parts else pixels.new_zeros(0, batch, heads, *tail)

    _, context = anatomy.embed(pixels)
    run_streams(anatomy, pixels, plan, bank, watch=watch)
    rows, columns = context.grid
    everything = stack(base, anatomy.prefix + rows * columns)
    return Explanation(
        task=task.name,
        source=OWN_TOKEN,
        layers=tuple(layers),
        patches=everything[..., anatomy.prefix :].reshape(len(layers), batch, heads, rows, columns),
        prefix=everything[..., : anatomy.prefix],
        itself=stack(itself),
        memory=stack(memory, task.cells),
        parents={name: stack(weights) for name, weights in parents.items()},
    )


def read_evidence(anatomy: Anatomy, pixels: Tensor, task: Task, logits: Tensor) -> Tensor:
    """What each patch adds to the read-out's logit of each image's best label, by these logits (b, labels), compared
    with the mean over all labels: (b, rows, columns). Means of patch tokens are sums over patches, so this part of the
    read-out splits into them exactly."""
    assert task.readout is not None
    assert task.spec.readout is not None
    each = task.readout.weight.reshape(len(task.labels), -1, anatomy.statistics, anatomy.dim)
    weight = each[:, :, anatomy.statistics - 2]
    weight = weight - weight.mean(dim=0) if len(weight) > 1 else weight  # (labels, layers, dim)
    chosen = weight[logits.argmax(dim=-1)]
    tokens, context = anatomy.embed(pixels)
    patches = tokens.shape[1] - anatomy.prefix
    found = chosen.new_zeros(len(pixels), patches)
    for layer, block in enumerate(anatomy.blocks):
        tokens, _, _ = block.run(tokens, context, layer)
        if layer >= task.spec.readout.from_layer:
            own = chosen[:, layer - task.spec.readout.from_layer, :, None]
            found = found + (tokens[:, anatomy.prefix :].to(own) @ own)[..., 0] / patches
    return found.reshape(len(pixels), *context.grid)


def explain_base(anatomy: Anatomy, pixels: Tensor, task: str) -> Explanation:
    """The attention of the token that heads read: the base's class token, or the mean over all where it has none."""
    tokens, context = anatomy.embed(pixels)
    found: list[Tensor] = []
    for layer, block in enumerate(anatomy.blocks):
        q, k, _ = block.qkv(block.norm1(tokens))
        if context.rotate is not None:
            q, k = context.rotate(q, k)
        if anatomy.class_token is not None:
            scores = block.scaling * q[:, :, :1] @ k.transpose(-1, -2)
            bias = layer_bias(context, layer)
            scores = scores if bias is None else scores + bias.unsqueeze(1)
        else:
            scores = block.scaling * q @ k.transpose(-1, -2)
        found.append(scores.softmax(dim=-1).mean(dim=2))
        tokens, _, _ = block.run(tokens, context, layer)
    weights, (rows, columns) = torch.stack(found), context.grid
    none = weights.new_zeros(weights.shape[:-1])
    return Explanation(
        task=task,
        source="all tokens of the base" if anatomy.class_token is None else "the base's class token",
        layers=tuple(range(anatomy.depth)),
        patches=weights[..., anatomy.prefix :].reshape(*none.shape, rows, columns),
        prefix=weights[..., : anatomy.prefix],
        itself=none,
        memory=none.unsqueeze(-1)[..., :0],
        parents={},
    )
