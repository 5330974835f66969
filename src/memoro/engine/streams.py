"""Two streams: the backbone's plain pass, and a thin one of task tokens that reads its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from memoro.backbones import Anatomy, Context
from memoro.backbones.anatomy import Update
from memoro.engine.bank import Bank, LowRank
from memoro.engine.plan import Group, LayerPlan, Plan


@dataclass(frozen=True)
class Attention:
    """Attention of one group of tasks at one layer: the weights of all three together sum to one."""

    group: Group
    base: Tensor
    """(b, h, g, n)"""
    tokens: Tensor
    """(b, h, g, p)"""
    cells: Tensor | None
    """(b, h, g, m)"""


Watch = Callable[[int, Attention], None]


class BaseLayer(NamedTuple):
    """What tasks read of the base at one layer."""

    token: Tensor
    """(b, dim) where forks start from, as it enters the layer."""
    keys: Tensor
    """(b, h, n, d)"""
    values: Tensor
    bias: Tensor | None = None
    """(h, n) the class token's row of score biases."""

    def part(self, rows: slice) -> BaseLayer:
        """The same for some images of the batch."""
        return BaseLayer(self.token[rows], self.keys[rows], self.values[rows], self.bias)


class Ends(NamedTuple):
    """What a pass gives for a set of tasks."""

    stream: Tensor | None
    """(b, t, dim) the tasks' final-normed tokens, in plan order; None without tasks."""
    last: Tensor
    """(b, dim) the base's token that forks start from, after the last layer and before the final norm."""
    pooled: Tensor | None = None
    """(b, layers, statistics, dim) of the tokens after the last layers, see `Anatomy.pool`; None if not asked for"""
    base: Tensor | None = None
    """The base's own answer; None if not asked for."""


@dataclass(frozen=True)
class Features:
    """All that tasks read of a base pass, kept: layers from `first` on, and the final token (b, dim)."""

    first: int
    layers: Sequence[BaseLayer]
    token: Tensor
    pooled: Tensor | None = None
    """(b, layers, statistics, dim), see `Ends`."""

    @classmethod
    def of(cls, first: int, tokens: Tensor, pairs: Tensor, biases: Sequence[Tensor | None]) -> Features:
        """Class tokens (layers + 1, b, dim), the last of which is the final one, and keys and values
        (layers, 2, b, h, n, d) as features."""
        parts = zip(tokens[:-1], pairs, biases, strict=True)
        return cls(first, [BaseLayer(token, pair[0], pair[1], bias) for token, pair, bias in parts], tokens[-1])


class BasePass:
    """The backbone's plain pass. Iterate over its layers; the final token and its own answer are there afterwards.
    `tokens` (b, n, dim) are those after the layer that the iteration has reached.

    It runs without gradients, unless the pixels ask for them: then they flow back to the pixels. The tokens after layer
    `pool_from` and all later ones are pooled.
    """

    token: Tensor
    pooled: Tensor | None = None

    def __init__(self, anatomy: Anatomy, pixels: Tensor, pool_from: int | None = None) -> None:
        self._anatomy, self._pool_from = anatomy, anatomy.depth if pool_from is None else pool_from
        self._grad = pixels.requires_grad
        # Embedding and head run in the caller's grad mode, as in the original: some kernels are chosen by it.
        self.tokens, self.context = anatomy.embed(pixels)

    def __iter__(self) -> Iterator[BaseLayer]:
        anatomy, context, pooled = self._anatomy, self.context, []
        for layer, block in enumerate(anatomy.blocks):
            token = anatomy.base_token(self.tokens)
            with nullcontext() if self._grad else torch.no_grad():
                self.tokens, keys, values = block.run(self.tokens, context, layer)
                if layer >= self._pool_from:
                    pooled.append(anatomy.pool(self.tokens))
            yield BaseLayer(token, keys, values, layer_bias(context, layer))
        self.token = anatomy.base_token(self.tokens)
        self.pooled = torch.stack(pooled, dim=1) if pooled else None

    def answer(self) -> Tensor:
        base = self._anatomy.finish(self.tokens)
        return base if self._grad else base.detach()


def layer_bias(context: Context, layer: int) -> Tensor | None:
    return None if context.biases is None else context.biases[layer][0, :, 0].detach()


class TaskStream:
    """The thin stream of one plan over a base pass. It has gradients if the bank or the pixels have."""

    def __init__(self, anatomy: Anatomy, plan: Plan, bank: Bank, watch: Watch | None = None) -> None:
        self._anatomy, self._plan, self._bank, self._watch = anatomy, plan, bank, watch
        self._rows: Tensor | None = None

    def read(self, layer: int, base: BaseLayer) -> None:
        """Takes the tasks through one layer."""
        self._births(layer, base.token)
        if self._rows is None:
            return
        block, plan = self._anatomy.blocks[layer], self._plan.layers[layer]
        update = _find_update(plan, self._bank.lora[layer])
        normed = block.norm1(self._rows)
        q, k, v = block.qkv(normed, None if update is None else update("qkv", normed))
        q = q * block.scaling
        scores = q @ base.keys.transpose(-1, -2)
        if base.bias is not None:
            scores = scores + base.bias.unsqueeze(1)
        outs = [self._attend(layer, group, base, q, k, v, scores) for group in plan.groups]
        out = outs[0] if plan.restore is None else torch.cat(outs, dim=2).index_select(2, plan.restore)
        self._rows = block.mix(self._rows, out.transpose(1, 2).flatten(2), update)

    def _attend(
        self, layer: int, group: Group, base: BaseLayer, q: Tensor, k: Tensor, v: Tensor, scores: Tensor
    ) -> Tensor:
        """Attention of one group of task tokens, (b, h, g, d): to base tokens, task tokens and memory, in one softmax.

        `scores` are those of base tokens; like `q`, `k` and `v`, they are of the whole stream.
        """
        whole = len(self._plan.layers[layer].groups) == 1
        q, own_k, own_v, base_scores = (t if whole else t.index_select(2, group.rows) for t in (q, k, v, scores))
        if group.tokens is None:
            tokens = (q * own_k).sum(dim=-1, keepdim=True)
        else:
            tokens = (k[:, :, group.tokens] @ q.unsqueeze(-1)).squeeze(-1)
        if base.bias is not None:  # a task's token is a class token: the first entry is the bias towards those
            tokens = tokens + base.bias[:, :1].unsqueeze(1)
        parts = [base_scores, tokens]
        if group.cells is not None:
            memory = self._bank.memory[layer]
            assert memory is not None
            memory_k, memory_v = (side[:, group.cells] for side in memory)  # (h, g, m, d)
            parts.append((q.permute(1, 2, 0, 3) @ memory_k.transpose(-1, -2)).permute(2, 0, 1, 3))
        joined = torch.cat(parts, dim=-1)
        low = joined.dtype in {torch.float16, torch.bfloat16}
        weights = joined.softmax(dim=-1, dtype=torch.float32 if low else None).to(base.values.dtype)
        to_base, to_tokens, *to_cells = torch.split(weights, [part.shape[-1] for part in parts], dim=-1)
        out: Tensor = to_base @ base.values
        if group.tokens is None:
            out = out + to_tokens * own_v
        else:
            out = out + (to_tokens.unsqueeze(-2) @ v[:, :, group.tokens]).squeeze(-2)
        if to_cells:
            out = out + (to_cells[0].permute(1, 2, 0, 3) @ memory_v).permute(2, 0, 1, 3)
        if self._watch is not None:
            self._watch(layer, Attention(group, to_base, to_tokens, to_cells[0] if to_cells else None))
        return out

    def finish(self, token: Tensor) -> Tensor | None:
        """The tasks' final-normed tokens (b, t, dim) in plan order, None without tasks. `token` is the base's last."""
        self._births(self._anatomy.depth, token)
        return None if self._rows is None else self._anatomy.finish_token(self._rows)

    def _births(self, layer: int, token: Tensor) -> None:
        """Appends the tokens that start here: at layer 0 the tasks' own, later the base's plus theirs."""
        born = self._plan.layers[layer].born
        if not len(born):
            return
        own = self._bank.tokens[born]
        new = token.unsqueeze(1) + own if layer else self._anatomy.start(own).expand(token.shape[0], -1, -1)
        self._rows = new if self._rows is None else torch.cat([self._rows, new], dim=1)


def run_streams(
    anatomy: Anatomy,
    inputs: Sequence[Tensor | Features],
    streams: Sequence[TaskStream],
    *,
    pool_from: int | None = None,
    with_base: bool = False,
    seconds: list[float] | None = None,
) -> list[Ends]:
    """Takes each stream through its own images, given as pixels or as features; pixels of one size share a base pass.

    With `pool_from`, the tokens after that layer and all later ones are pooled; `with_base` asks for the base's own
    answer. `seconds` receives the time that each of the backbone's layers took; on a GPU, the time to launch it.
    """
    ends: dict[int, Ends] = {}
    sizes: dict[torch.Size, dict[int, Tensor]] = {}
    for number, given in enumerate(inputs):
        if isinstance(given, Tensor):
            sizes.setdefault(given.shape[1:], {})[number] = given
            continue
        for layer, base_layer in enumerate(given.layers, start=given.first):
            streams[number].read(layer, base_layer)
        ends[number] = Ends(streams[number].finish(given.token), given.token, given.pooled)
    for parts in sizes.values():
        pixels, rows = list(parts.values()), dict.fromkeys(parts, slice(None))
        if len(pixels) > 1:
            stops = list(accumulate(len(part) for part in pixels))
            rows = dict(zip(parts, map(slice, [0, *stops[:-1]], stops), strict=True))
        base = BasePass(anatomy, pixels[0] if len(pixels) == 1 else torch.cat(pixels), pool_from)
        for layer, base_layer in enumerate(base if seconds is None else _timed(base, seconds)):
            for number, part in rows.items():
                streams[number].read(layer, base_layer if len(rows) == 1 else base_layer.part(part))
        answer = base.answer() if with_base else None
        for number, part in rows.items():
            last = base.token[part]
            pooled, own_answer = (whole if whole is None else whole[part] for whole in (base.pooled, answer))
            ends[number] = Ends(streams[number].finish(last), last, pooled, own_answer)
    return [ends[number] for number in range(len(inputs))]


def pool_pass(anatomy: Anatomy, pixels: Tensor, pool_from: int) -> Tensor:
    """The pooled statistics (b, layers, statistics, dim) of a pass, from this layer on."""
    base = BasePass(anatomy, pixels, pool_from)
    for _ in base:
        pass
    assert base.pooled is not None
    return base.pooled


def _timed(layers: Iterable[BaseLayer], seconds: list[float]) -> Iterator[BaseLayer]:
    start = perf_counter()
    for layer in layers:
        seconds.append(perf_counter() - start)
        yield layer
        start = perf_counter()


def _find_update(plan: LayerPlan, lora: Mapping[int, LowRank]) -> Update | None:
    """What the low-rank weights add for each row of the stream; None if no row has any."""
    if not plan.ranks:
        return None
    groups = [
        (group.rows, lora[group.rank] if group.places is None else lora[group.rank].pick(group.places))
        for group in plan.ranks
    ]

    def update(matrix: str, inputs: Tensor) -> Tensor:
        whole: Tensor | None = None
        for rows, weights in groups:
            if rows is None:
                return weights.update(matrix, inputs)
            change = weights.update(matrix, inputs.index_select(1, rows))
            if whole is None:
                whole = change.new_zeros(*inputs.shape[:2], change.shape[-1])
            whole = whole.index_copy(1, rows, change)
        assert whole is not None
        return whole

    return update
