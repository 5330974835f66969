"""The forward pass of a set of tasks: what compositions and trainings run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from memoro.backbones import Backbone
from memoro.engine.bank import Bank, build_bank
from memoro.engine.plan import Plan, build_plan
from memoro.engine.streams import Ends, Features, TaskStream, Watch, run_streams
from memoro.tasks.mask import Lineage
from memoro.tasks.task import Task, split_members

MAX_PLANS = 256


class Forward:
    """The weights of some tasks, and who attends to whom: their part of a backbone's pass.

    Memory does not depend on the image, so its keys and values are computed once. With `live=True` everything is
    computed from the tasks' own parameters at every pass, and gradients flow to them.
    """

    def __init__(self, backbone: Backbone, tasks: Sequence[Task], lineage: Lineage, *, live: bool = False) -> None:
        self.backbone, self.tasks = backbone, tuple(tasks)
        self.streams = tuple(member for task in tasks for member in split_members(task))
        """A task of one token for each member of an ensemble."""
        self.lineage, self.members = lineage.split([task.members for task in tasks])
        """Of the streams; and the streams of each task."""
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._frozen: tuple[Bank, ReadOutBank] | None = None
        if not live:
            with torch.no_grad():
                self._frozen = self.bank, self.readouts

    @property
    def bank(self) -> Bank:
        return build_bank(self.backbone.anatomy, self.streams) if self._frozen is None else self._frozen[0]

    @property
    def readouts(self) -> ReadOutBank:
        return ReadOutBank(self.tasks) if self._frozen is None else self._frozen[1]

    def plan(self, wanted: tuple[int, ...]) -> Plan:
        """Who attends to whom where only these tasks, by number, and what they extend are computed."""
        plan = self._plans.get(wanted)
        if plan is None:
            members = [member for number in wanted for member in self.members[number]]
            plan = build_plan(self.lineage, self.streams, members, self.backbone.depth, self.backbone.device)
            # Threads may build the same plan twice: either one is right. A traced one has no values.
            if len(self._plans) < MAX_PLANS and not torch.compiler.is_exporting():
                self._plans[wanted] = plan
        return plan

    def stream(self, wanted: tuple[int, ...], watch: Watch | None = None) -> TaskStream:
        return TaskStream(self.backbone.anatomy, self.plan(wanted), self.bank, watch)

    def pool_from(self, wanted: Sequence[int]) -> int:
        """The first layer whose tokens the read-outs of these tasks read."""
        return self.readouts.first_layer(wanted, self.backbone.depth)

    def read(self, wanted: tuple[int, ...], ends: Ends) -> list[tuple[Tensor, Tensor]]:
        """For each wanted task the final-normed tokens (b, members * dim) that its head reads, and its logits."""
        row = {member: position for position, member in enumerate(self.plan(wanted).order)}
        added = {} if ends.pooled is None else self.readouts.answer(ends.pooled, wanted)
        answers = []
        for number in wanted:
            assert ends.stream is not None
            tokens = [ends.stream[:, row[member]] for member in self.members[number]]
            token, head = tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1), self.tasks[number].head
            logits = head(token.to(head.weight))
            answers.append((token, logits + added[number] if number in added else logits))
        return answers


Part = tuple[Forward, tuple[int, ...]]
"""The numbers of the tasks of a forward pass that are to answer."""


def answer_together(parts: Sequence[Part], inputs: Sequence[Tensor | Features]) -> list[list[Tensor]]:
    """The logits of several sets of tasks, each on its own images; pixels of one size share a base pass."""
    anatomy = parts[0][0].backbone.anatomy
    streams = [forward.stream(wanted) for forward, wanted in parts]
    pool_from = min(forward.pool_from(wanted) for forward, wanted in parts)
    ends = run_streams(anatomy, inputs, streams, pool_from=pool_from)
    return [
        [logits for _, logits in forward.read(wanted, end)] for (forward, wanted), end in zip(parts, ends, strict=True)
    ]


class ReadOutBank:
    """The read-outs of several tasks: linear layers on statistics of the base's tokens, as one product.

    They do not depend on the image: their weights are joined once.

    Differentiable with respect to the tasks.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._rows: dict[int, tuple[int, slice]] = {}
        """By the number of the task: the first layer that it reads, and its rows in the weights of that layer."""
        ends: dict[int, int] = {}
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for number, task in enumerate(tasks):
            if task.readout is None or task.spec.readout is None:
                continue
            layer = task.spec.readout.from_layer
            start = ends.get(layer, 0)
            ends[layer] = start + len(task.labels)
            self._rows[number] = layer, slice(start, ends[layer])
            parts.setdefault(layer, []).append((task.readout.weight, task.readout.bias))
        self._weights = {
            layer: same[0] if len(same) == 1 else (torch.cat([w for w, _ in same]), torch.cat([b for _, b in same]))
            for layer, same in parts.items()
        }

    def first_layer(self, wanted: Sequence[int], depth: int) -> int:
        """The first layer that these tasks read; the depth where none has a read-out."""
        return min([depth, *(self._rows[number][0] for number in wanted if number in self._rows)])

    def answer(self, pooled: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        """The logits (b, labels) of each of these tasks that has a read-out, from statistics
        (b, layers, statistics, dim) of the last layers."""
        answers: dict[int, Tensor] = {}
        asked = {number: self._rows[number] for number in wanted if number in self._rows}
        for layer, (weight, bias) in self._weights.items():
            rows = {number: own for number, (first, own) in asked.items() if first == layer}
            if not rows:
                continue
            layers = weight.shape[1] // pooled[0, 0].numel()
            inputs = pooled[:, pooled.shape[1] - layers :].flatten(1).to(weight)
            if sum(own.stop - own.start for own in rows.values()) == len(weight):
                whole = linear(inputs, weight, bias)
                answers |= {number: whole[:, own] for number, own in rows.items()}
            else:  # some of the tasks: no copy of their weights
                answers |= {number: linear(inputs, weight[own], bias[own]) for number, own in rows.items()}
        return answers
