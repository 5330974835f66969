"""Where a task looked: its attention, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.answer import Attention
from memoro.backbones import Anatomy, Block, Context
from memoro.engine.forward import Forward
from memoro.engine.plan import Plan
from memoro.engine.streams import Attention as GroupAttention
from memoro.engine.streams import BaseLayer, layer_bias, read_head
from memoro.errors import DataError, ImageError
from memoro.images import Decoder, Picture, Preprocessing
from memoro.tasks.mask import Lineage
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
        parts = {
            "patches": self.patches.sum(dim=(-1, -2)),
            "base tokens": self.prefix.sum(dim=-1),
            "itself": self.itself,
            "memory": self.memory.sum(dim=-1),
        }
        parts |= {f"{name} (task)" if name in parts else name: weights for name, weights in self.parents.items()}
        return {name: float(weights[:, index].mean()) for name, weights in parts.items() if weights.any()}

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
        raise ImageError("no images to explain.")
    if len({image.size for image in seen}) > 1:
        raise ImageError("these images differ in size, and the preprocessing has no crop: explain them one by one.")
    return preprocessing.normalise(np.stack([np.asarray(image) for image in seen])), views


@dataclass
class Trace:
    """What is kept of one task while a pass runs, layer by layer."""

    task: Task
    members: Sequence[int]
    """Its tokens, by index."""
    ancestors: Mapping[int, str]
    """The tasks that it extends, by the index of each of their tokens."""
    layers: list[int] = field(default_factory=list)
    base: list[Tensor] = field(default_factory=list)
    itself: list[Tensor] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    parents: list[dict[str, Tensor]] = field(default_factory=list)
    evidence: Tensor | None = None
    """(b, labels, patches)"""

    @classmethod
    def of(cls, number: int, tasks: Sequence[Task], members: Sequence[range], lineage: Lineage) -> Trace:
        """An empty trace of a task, given all tasks, the members of each, and the lineage of these."""
        names = {at: task.name for task, own in zip(tasks, members, strict=True) for at in own}
        first = members[number][0]
        return cls(tasks[number], members[number], {at: names[at] for at in lineage.ancestors[first]})

    def watch(self, layer: int, attention: GroupAttention, plan: Plan, streams: Sequence[Task]) -> None:
        """Keeps the attention of the task's tokens, averaged over them, if they are in this group."""
        group = attention.group
        rows = [plan.order[row] for row in group.rows.tolist()]
        if self.members[0] not in rows:  # all members see equally much, so they are in one group
            return
        at = [rows.index(member) for member in self.members]
        seen = [self.members[0]] if group.tokens is None else [plan.order[row] for row in group.tokens[at[0]].tolist()]
        tokens = attention.tokens[:, :, at].mean(dim=2)
        cells = tokens.new_zeros(*tokens.shape[:2], 0)
        if attention.cells is not None:
            cells = attention.cells[:, :, at].mean(dim=2)
        memory, *others = torch.split(cells, [streams[i].cells for i in seen], dim=-1)
        parents = {name: torch.zeros_like(tokens[..., 0]) for name in self.ancestors.values()}
        for place, (i, part) in enumerate(zip(seen[1:], others, strict=True), start=1):
            parents[self.ancestors[i]] += tokens[..., place] + part.sum(dim=-1)
        self.layers.append(layer)
        self.base.append(attention.base[:, :, at].mean(dim=2))
        self.itself.append(tokens[..., 0])
        self.memory.append(memory)
        self.parents.append(parents)

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


def explain_tasks(forward: Forward, wanted: tuple[int, ...], pixels: Tensor) -> dict[str, Explanation]:
    """Where tasks, by number, looked in these images, from one pass."""
    anatomy, plan, readouts = forward.backbone.anatomy, forward.plan(wanted), forward.readouts
    traces = {number: Trace.of(number, forward.tasks, forward.members, forward.lineage) for number in wanted}

    def watch(layer: int, attention: GroupAttention) -> None:
        for trace in traces.values():
            trace.watch(layer, attention, plan, forward.streams)

    tokens, context = anatomy.embed(pixels)
    stream = forward.stream(wanted, watch)
    with_heads = any(trace.task.from_layer == anatomy.depth for trace in traces.values())
    first = readouts.first_layer(list(traces), anatomy.depth)
    base: list[Tensor] = []
    pooled: list[Tensor] = []
    for layer, block in enumerate(anatomy.blocks):
        start = anatomy.base_token(tokens)
        if with_heads:
            base.append(_base_attention(anatomy, block, tokens, context, layer))
        tokens, keys, values = block.run(tokens, context, layer)
        stream.read(layer, BaseLayer(start, keys, values, layer_bias(context, layer)))
        if layer >= first:
            pooled.append(anatomy.pool(tokens))
            for trace in traces.values():
                trace.add_evidence(layer, tokens, anatomy)
    rows = stream.finish(anatomy.base_token(tokens))
    read = readouts.answer(torch.stack(pooled, dim=1), list(traces)) if pooled else {}
    found = {}
    for number, trace in traces.items():
        evidence = None
        if trace.evidence is not None:
            assert rows is not None
            places = [plan.order.index(member) for member in trace.members]
            best = (read_head(trace.task.head, rows, places)[1] + read[number]).argmax(dim=-1)
            evidence = trace.evidence[torch.arange(len(best), device=best.device), best].reshape(-1, *context.grid)
        found[trace.task.name] = _explanation(anatomy, context, trace, base, evidence, pixels)
    return found


def _explanation(
    anatomy: Anatomy, context: Context, trace: Trace, base: Sequence[Tensor], evidence: Tensor | None, pixels: Tensor
) -> Explanation:
    task, is_head = trace.task, trace.task.from_layer == anatomy.depth
    empty = pixels.new_zeros(0, len(pixels), anatomy.heads)

    def stack(parts: Sequence[Tensor], *tail: int) -> Tensor:
        return torch.stack(list(parts)) if parts else empty.new_zeros(*empty.shape, *tail)

    rows, columns = context.grid
    weights = stack(base if is_head else trace.base, anatomy.prefix + rows * columns)
    none = weights.new_zeros(weights.shape[:-1])
    source = "all tokens of the base" if anatomy.class_token is None else "the base's class token"
    return Explanation(
        task=task.name,
        source=READ_OUT if evidence is not None else source if is_head else OWN_TOKEN,
        layers=tuple(range(anatomy.depth)) if is_head else tuple(trace.layers),
        patches=weights[..., anatomy.prefix :].reshape(*none.shape, rows, columns),
        prefix=weights[..., : anatomy.prefix],
        itself=none if is_head else stack(trace.itself),
        memory=none.unsqueeze(-1)[..., :0] if is_head else stack(trace.memory, task.cells),
        parents={}
        if is_head
        else {
            name: stack([layer[name] for layer in trace.parents]) for name in dict.fromkeys(trace.ancestors.values())
        },
        evidence=evidence,
    )


def _base_attention(anatomy: Anatomy, block: Block, tokens: Tensor, context: Context, layer: int) -> Tensor:
    """The attention (b, h, n) of the token that heads read at one layer: the base's class token, or the mean over all
    if it has none."""
    q, k, _ = block.qkv(block.norm1(tokens))
    if context.rotate is not None:
        q, k = context.rotate(q, k)
    if anatomy.class_token is not None:
        scores = block.scaling * q[:, :, :1] @ k.transpose(-1, -2)
        bias = layer_bias(context, layer)
        scores = scores if bias is None else scores + bias.unsqueeze(1)
    else:
        scores = block.scaling * q @ k.transpose(-1, -2)
    return scores.softmax(dim=-1).mean(dim=2)
