"""Two streams: the backbone's plain pass, and a thin one of task tokens that reads its keys and values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memoro.backbones import Anatomy, Block, Context
from memoro.tasks.lineage import Lineage
from memoro.tasks.task import Task


@dataclass(frozen=True)
class Group:
    """Tasks that see equally many tokens and cells at a layer: they attend as one dense batch, without padding."""

    rows: Tensor
    """(g) rows of the task stream."""
    tokens: Tensor | None
    """(g, p) rows whose tokens each one sees, itself first; None where it sees no other."""
    cells: Tensor | None
    """(g, m) places in the layer's bank that each one sees, its own cells first; None where there are none."""


@dataclass(frozen=True)
class LayerPlan:
    born: Tensor
    """Tasks (by index) whose stream starts at this layer; they are appended to the rows."""
    groups: tuple[Group, ...]
    restore: Tensor | None
    """Brings the rows of all groups, one after the other, back into stream order; None for a single group."""


@dataclass(frozen=True)
class Plan:
    """Who attends to whom at each layer, as index tensors. Built once for a set of tasks."""

    layers: tuple[LayerPlan, ...]
    """One a layer and a last one, for the tasks that are heads on the final class token."""
    order: tuple[int, ...]
    """The task (by index) in each row of the finished stream."""


@dataclass(frozen=True)
class Bank:
    """The tasks' weights as the engine reads them: class tokens (t, dim), memory keys and values for each layer."""

    tokens: Tensor
    memory: tuple[tuple[Tensor, Tensor] | None, ...]
    """Keys and values (h, cells, d) of all tasks at each layer. They do not depend on the image."""


@dataclass(frozen=True)
class Attention:
    """Where one group of tasks looked at one layer: weights that sum to one over the three together."""

    group: Group
    base: Tensor
    """(b, h, g, n)"""
    tokens: Tensor
    """(b, h, g, p)"""
    cells: Tensor | None
    """(b, h, g, m)"""


Watch = Callable[[int, Attention], None]


def build_plan(
    lineage: Lineage, tasks: Sequence[Task], wanted: Sequence[int], depth: int, device: torch.device
) -> Plan:
    """The plan for the wanted tasks and what they extend, over a bank of all `tasks`."""
    chosen = sorted(lineage.closure(wanted), key=lambda task: lineage.forks[task])
    forks = {task.from_layer for task in tasks}
    layers: list[LayerPlan] = []
    for layer in range(depth + 1):
        born = torch.tensor([t for t in chosen if lineage.forks[t] == layer], device=device, dtype=torch.long)
        if layer == depth:
            layers.append(LayerPlan(born, (), None))
        elif layer == 0 or layer in forks:
            groups = _plan_groups(lineage, tasks, chosen, layer, device)
            restore = torch.cat([group.rows for group in groups]).argsort() if len(groups) > 1 else None
            layers.append(LayerPlan(born, groups, restore))
        else:  # nothing starts here: the same tasks see each other as one layer before
            layers.append(LayerPlan(born, layers[-1].groups, layers[-1].restore))
    return Plan(tuple(layers), tuple(chosen))


def _plan_groups(
    lineage: Lineage, tasks: Sequence[Task], chosen: Sequence[int], layer: int, device: torch.device
) -> tuple[Group, ...]:
    row = {task: position for position, task in enumerate(chosen)}
    offsets = _bank_offsets(tasks, layer)
    alike: dict[tuple[int, int], list[tuple[int, list[int], list[int]]]] = defaultdict(list)
    for task in chosen:
        if lineage.forks[task] <= layer:
            seen = lineage.visible(task, layer)
            cells = [offsets[other] + cell for other in seen for cell in range(tasks[other].cells)]
            alike[len(seen), len(cells)].append((row[task], [row[other] for other in seen], cells))
    return tuple(
        Group(
            rows=torch.tensor([member[0] for member in members], device=device),
            tokens=torch.tensor([member[1] for member in members], device=device) if tokens > 1 else None,
            cells=torch.tensor([member[2] for member in members], device=device) if cells else None,
        )
        for (tokens, cells), members in sorted(alike.items())
    )


def build_bank(anatomy: Anatomy, tasks: Sequence[Task]) -> Bank:
    """The tasks' weights, memory already projected to keys and values. Differentiable with respect to the tasks."""
    dtype = anatomy.tensors["patch.weight"].dtype
    if not tasks:
        return Bank(anatomy.tensors["patch.weight"].new_zeros(0, anatomy.dim), (None,) * anatomy.depth)
    tokens = torch.stack([task.class_token for task in tasks]).to(dtype)
    return Bank(tokens, tuple(_layer_bank(block, tasks, layer, dtype) for layer, block in enumerate(anatomy.blocks)))


def _in_bank(tasks: Sequence[Task], layer: int) -> list[int]:
    """The tasks with cells at a layer, in the bank's order: first those whose memory passes the norm."""
    present = [i for i, task in enumerate(tasks) if task.from_layer <= layer and task.cells]
    return sorted(present, key=lambda i: tasks[i].spec.memory_norm != "pre")


def _bank_offsets(tasks: Sequence[Task], layer: int) -> dict[int, int]:
    offsets, at = dict.fromkeys(range(len(tasks)), 0), 0
    for i in _in_bank(tasks, layer):
        offsets[i] = at
        at += tasks[i].cells
    return offsets


def _layer_bank(block: Block, tasks: Sequence[Task], layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    present = [tasks[i] for i in _in_bank(tasks, layer)]
    if not present:
        return None
    cells = [task.memory[layer - task.from_layer].to(dtype) for task in present]
    pre = sum(task.spec.memory_norm == "pre" for task in present)
    normed = [block.norm1(torch.cat(cells[:pre]))] if pre else []
    keys, values = block.kv(torch.cat([*normed, *cells[pre:]]).unsqueeze(0))
    return keys[0], values[0]


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


@dataclass(frozen=True)
class Features:
    """All that tasks read of a base pass, kept: layers from `first` on, and the final token (b, dim)."""

    first: int
    layers: Sequence[BaseLayer]
    token: Tensor


class BasePass:
    """The backbone's plain pass. Iterate over its layers; the final token and its own answer are there afterwards.

    It runs without gradients, unless the pixels ask for them: then they flow back to the pixels.
    """

    token: Tensor

    def __init__(self, anatomy: Anatomy, pixels: Tensor) -> None:
        self._anatomy = anatomy
        self._grad = pixels.requires_grad
        # Embedding and head run in the caller's grad mode, as in the original: some kernels are chosen by it.
        self._tokens, self._context = anatomy.embed(pixels)

    def __iter__(self) -> Iterator[BaseLayer]:
        anatomy, context = self._anatomy, self._context
        for layer, block in enumerate(anatomy.blocks):
            token = anatomy.base_token(self._tokens)
            with nullcontext() if self._grad else torch.no_grad():
                self._tokens, keys, values = block.run(self._tokens, context, layer)
            yield BaseLayer(token, keys, values, layer_bias(context, layer))
        self.token = anatomy.base_token(self._tokens)

    def answer(self) -> Tensor:
        base = self._anatomy.finish(self._tokens)
        return base if self._grad else base.detach()


def layer_bias(context: Context, layer: int) -> Tensor | None:
    return None if context.biases is None else context.biases[layer][0, :, 0].detach()


class TaskStream:
    """The thin stream of one plan over a base pass. It has gradients where the bank or the pixels do."""

    def __init__(self, anatomy: Anatomy, plan: Plan, bank: Bank, watch: Watch | None = None) -> None:
        self._anatomy, self._plan, self._bank, self._watch = anatomy, plan, bank, watch
        self._rows: Tensor | None = None

    def read(self, layer: int, base: BaseLayer) -> None:
        """Takes the tasks through one layer."""
        self._births(layer, base.token)
        if self._rows is not None:
            watch = self._watch
            self._rows = step_stream(
                self._anatomy.blocks[layer],
                self._plan.layers[layer],
                self._bank.memory[layer],
                self._rows,
                base.keys,
                base.values,
                base.bias,
                watch and (lambda attention: watch(layer, attention)),
            )

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
        new = token.unsqueeze(1) + own if layer else self._anatomy.start(own).expand(len(token), -1, -1)
        self._rows = new if self._rows is None else torch.cat([self._rows, new], dim=1)


def run_streams(
    anatomy: Anatomy, pixels: Tensor, plan: Plan, bank: Bank, *, watch: Watch | None = None
) -> tuple[Tensor, Tensor | None]:
    """The base's own answer, and the tasks' final-normed tokens (b, t, dim) in plan order (None without tasks)."""
    base, stream = BasePass(anatomy, pixels), TaskStream(anatomy, plan, bank, watch)
    for layer, found in enumerate(base):
        stream.read(layer, found)
    rows = stream.finish(base.token)
    return base.answer(), rows


def step_stream(
    block: Block,
    plan: LayerPlan,
    memory: tuple[Tensor, Tensor] | None,
    stream: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None = None,
    watch: Callable[[Attention], None] | None = None,
) -> Tensor:
    """One layer of the task stream (b, t, dim), given the base's keys and values (b, h, n, d).

    `bias` (h, n) is the class token's row of score biases, its first entry the one towards class tokens.
    """
    q, k, v = block.qkv(block.norm1(stream))
    q = q * block.scaling
    scores = q @ keys.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    outs = []
    for group in plan.groups:
        whole = len(plan.groups) == 1
        own_q, own_k, own_v, base = (t if whole else t.index_select(2, group.rows) for t in (q, k, v, scores))
        outs.append(_attend(group, own_q, own_k, own_v, base, k, v, memory, values, bias, watch))
    out = outs[0] if plan.restore is None else torch.cat(outs, dim=2).index_select(2, plan.restore)
    return block.mix(stream, out.transpose(1, 2).flatten(2))


def _attend(
    group: Group,
    q: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    base: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, Tensor] | None,
    base_v: Tensor,
    bias: Tensor | None,
    watch: Callable[[Attention], None] | None,
) -> Tensor:
    """Attention of one group of task tokens, (b, h, g, d): to base tokens, task tokens and memory, in one softmax."""
    if group.tokens is None:
        tokens = (q * own_k).sum(dim=-1, keepdim=True)
    else:
        tokens = (k[:, :, group.tokens] @ q.unsqueeze(-1)).squeeze(-1)
    if bias is not None:
        tokens = tokens + bias[:, :1].unsqueeze(1)
    parts = [base, tokens]
    if group.cells is not None:
        assert memory is not None
        memory_k, memory_v = (side[:, group.cells] for side in memory)  # (h, g, m, d)
        parts.append((q.permute(1, 2, 0, 3) @ memory_k.transpose(-1, -2)).permute(2, 0, 1, 3))
    scores = torch.cat(parts, dim=-1)
    low = scores.dtype in {torch.float16, torch.bfloat16}
    weights = scores.softmax(dim=-1, dtype=torch.float32 if low else None).to(base_v.dtype)
    to_base, to_tokens, *to_cells = torch.split(weights, [part.shape[-1] for part in parts], dim=-1)
    out: Tensor = to_base @ base_v
    if group.tokens is None:
        out = out + to_tokens * own_v
    else:
        out = out + (to_tokens.unsqueeze(-2) @ v[:, :, group.tokens]).squeeze(-2)
    if to_cells:
        out = out + (to_cells[0].permute(1, 2, 0, 3) @ memory_v).permute(2, 0, 1, 3)
    if watch is not None:
        watch(Attention(group, to_base, to_tokens, to_cells[0] if to_cells else None))
    return out
