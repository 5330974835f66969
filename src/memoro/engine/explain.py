"""Where a task looked: its attention, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.answer import Attention
from memoro.backbones import Anatomy, Block, Context
from memoro.engine.forward import Forward
from memoro.engine.plan import Plan
from memoro.engine.streams import Attention as GroupAttention
from memoro.engine.streams import BasePass, Ends
from memoro.errors import DataError, ImageError
from memoro.images import Decoder, Picture, Preprocessing

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
    """Whose attention it is: the task's token. A head has no layers of its own, so it is the base's class token, or the
    mean over all tokens if the base has none."""
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
    """What the task saw of each image, in more pixels; empty if it was given a tensor."""
    evidence: Tensor | None = None
    """(b, rows, columns) if the task has a read-out: what each patch adds, by the means of the patch tokens, to the
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
        seen = self.describe(index)
        parts = {"patches": seen.patches, "base tokens": seen.prefix, "itself": seen.itself, "memory": seen.memory}
        parts |= {f"{name} (task)" if name in parts else name: shares for name, shares in seen.parents.items()}
        return {name: fmean(shares) for name, shares in parts.items() if any(shares)}

    def describe(self, index: int = 0) -> Attention:
        """The map and the shares of one of the images, as an answer has them."""

        def shares(weights: Tensor) -> list[float]:
            layers, _, heads, *rest = weights.shape
            by_head = weights[:, index].reshape(layers, heads, math.prod(rest)).sum(dim=-1)
            means: list[float] = by_head.mean(dim=-1).tolist()
            return means

        return Attention(
            layers=list(self.layers),
            source=self.source,
            note=self.note,
            heatmap=self.heatmap()[index].tolist(),
            patches=shares(self.patches),
            prefix=shares(self.prefix),
            itself=shares(self.itself),
            memory=shares(self.memory),
            parents={name: shares(weights) for name, weights in self.parents.items()},
        )


def read_views(images: Iterable[tuple[str, Picture]], preprocessing: Preprocessing) -> tuple[Tensor, list[Image.Image]]:
    """The images as a batch of pixels, and what the model sees of each as an image of at least `VIEW` pixels."""
    size = preprocessing.size
    view = preprocessing
    if size is not None and min(size) < VIEW:
        with suppress(DataError):  # one that is long and thin would be too large
            view = preprocessing.at(VIEW)
    decoder = Decoder((preprocessing, view))
    seen, views = list[Image.Image](), list[Image.Image]()
    for name, picture in images:
        own, shown = decoder.open(name, picture)
        seen.append(own)
        views.append(shown)
    if not seen:
        raise ImageError("no images were given.")
    if len({image.size for image in seen}) > 1:
        raise ImageError("these images differ in size, and the preprocessing has no crop: give them one by one.")
    return preprocessing.normalise(np.stack([np.asarray(image) for image in seen])), views


class Seen(NamedTuple):
    """What a task's token attends to at one layer, averaged over the tokens of an ensemble."""

    base: Tensor
    """(b, h, n)"""
    itself: Tensor
    """(b, h)"""
    memory: Tensor
    """(b, h, cells)"""
    parents: dict[str, Tensor]
    """(b, h) for each task that it extends"""


class Trace:
    """What is kept of one task while a pass runs."""

    def __init__(self, forward: Forward, plan: Plan, number: int) -> None:
        self.task, self._members, self._plan = forward.tasks[number], forward.members[number], plan
        self._cells = [stream.cells for stream in forward.streams]
        names = {at: task.name for task, own in zip(forward.tasks, forward.members, strict=True) for at in own}
        self._ancestors = {at: names[at] for at in forward.lineage.ancestors[self._members[0]]}
        self.seen: dict[int, Seen] = {}
        """By layer."""
        self.evidence: Tensor | None = None
        """(b, labels, patches)"""

    def watch(self, layer: int, attention: GroupAttention) -> None:
        """Keeps the attention of the task's tokens, if they are in this group."""
        group, order = attention.group, self._plan.order
        rows = [order[row] for row in group.rows.tolist()]
        if self._members[0] not in rows:  # all members see equally much, so they are in one group
            return
        at = [rows.index(member) for member in self._members]
        visible = [self._members[0]] if group.tokens is None else [order[row] for row in group.tokens[at[0]].tolist()]
        tokens = attention.tokens[:, :, at].mean(dim=2)
        cells = tokens[..., :0] if attention.cells is None else attention.cells[:, :, at].mean(dim=2)
        memory, *others = torch.split(cells, [self._cells[i] for i in visible], dim=-1)
        parents = {name: torch.zeros_like(tokens[..., 0]) for name in self._ancestors.values()}
        for place, (i, part) in enumerate(zip(visible[1:], others, strict=True), start=1):
            parents[self._ancestors[i]] += tokens[..., place] + part.sum(dim=-1)
        self.seen[layer] = Seen(attention.base[:, :, at].mean(dim=2), tokens[..., 0], memory, parents)

    def add_evidence(self, layer: int, tokens: Tensor, anatomy: Anatomy) -> None:
        """Adds what each patch of a layer adds to each label's logit by the read-out, compared with the mean over all
        labels. Means of patch tokens are sums over patches, so this part of the read-out splits into them exactly."""
        readout, reads = self.task.readout, self.task.spec.readout
        if readout is None or reads is None or layer < reads.from_layer:
            return
        weight = readout.weight.reshape(len(self.task.labels), -1, anatomy.statistics, anatomy.dim)
        weight = weight[:, layer - reads.from_layer, anatomy.statistics - 2]
        weight = weight - weight.mean(dim=0) if len(weight) > 1 else weight
        patches = tokens[:, anatomy.prefix :].to(weight)
        part = weight @ patches.transpose(-1, -2) / patches.shape[1]
        self.evidence = part if self.evidence is None else self.evidence + part

    def explanation(self, anatomy: Anatomy, grid: tuple[int, int], logits: Tensor) -> Explanation:
        """All that was seen, and the evidence for the answer that these logits (b, labels) give."""
        source, evidence = OWN_TOKEN, None
        if self.task.from_layer == anatomy.depth:
            source = "all tokens of the base" if anatomy.class_token is None else "the base's class token"
        if self.evidence is not None:
            source, best = READ_OUT, logits.argmax(dim=-1)
            evidence = self.evidence[torch.arange(len(best), device=best.device), best].reshape(-1, *grid)
        base, itself, memory, parents = zip(*self.seen.values(), strict=True)
        weights = torch.stack(base)
        return Explanation(
            task=self.task.name,
            source=source,
            layers=tuple(self.seen),
            patches=weights[..., anatomy.prefix :].reshape(*weights.shape[:-1], *grid),
            prefix=weights[..., : anatomy.prefix],
            itself=torch.stack(itself),
            memory=torch.stack(memory),
            parents={name: torch.stack([layer[name] for layer in parents]) for name in parents[0]},
            evidence=evidence,
        )


def explain_tasks(forward: Forward, wanted: tuple[int, ...], pixels: Tensor) -> dict[str, Explanation]:
    """Where tasks, by number, looked in these images, from one pass."""
    anatomy, plan = forward.backbone.anatomy, forward.plan(wanted)
    traces = [Trace(forward, plan, number) for number in wanted]

    def watch(layer: int, attention: GroupAttention) -> None:
        for trace in traces:
            trace.watch(layer, attention)

    base, stream = BasePass(anatomy, pixels, forward.pool_from(wanted)), forward.stream(wanted, watch)
    heads = [trace for trace in traces if trace.task.from_layer == anatomy.depth]
    entering = base.tokens
    for layer, base_layer in enumerate(base):
        if heads:
            attention = _base_attention(anatomy, anatomy.blocks[layer], entering, base.context, base_layer.bias)
            none = torch.zeros_like(attention[..., 0])
            for trace in heads:
                trace.seen[layer] = Seen(attention, none, attention[..., :0], {})
        stream.read(layer, base_layer)
        for trace in traces:
            trace.add_evidence(layer, base.tokens, anatomy)
        entering = base.tokens
    answers = forward.read(wanted, Ends(stream.finish(base.token), base.token, base.pooled))
    return {
        trace.task.name: trace.explanation(anatomy, base.context.grid, logits)
        for trace, (_, logits) in zip(traces, answers, strict=True)
    }


def _base_attention(anatomy: Anatomy, block: Block, tokens: Tensor, context: Context, bias: Tensor | None) -> Tensor:
    """The attention (b, h, n) of the token that heads read at one layer: the base's class token, or the mean over all
    if it has none."""
    q, k, _ = block.qkv(block.norm1(tokens))
    if context.rotate is not None:
        q, k = context.rotate(q, k)
    q = q if anatomy.class_token is None else q[:, :, :1]
    scores = block.scaling * q @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias.unsqueeze(1)  # families with biases have a class token
    return scores.softmax(dim=-1).mean(dim=2)
