"""Read-outs: linear layers on statistics of the base's tokens, those of several tasks as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from memoro.tasks.task import Task


class ReadOutBank:
    """The read-outs of several tasks. They do not depend on the image: their weights are joined once.

    Differentiable with respect to the tasks.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._first: dict[int, int] = {}
        """By the number of the task: the first layer that it reads."""
        self._rows: dict[int, tuple[int, slice]] = {}
        """By the number of the task: its place in the weights of that layer."""
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        ends: dict[int, int] = {}
        for number, task in enumerate(tasks):
            if task.readout is None or task.spec.readout is None:
                continue
            layer = task.spec.readout.from_layer
            start, self._first[number] = ends.get(layer, 0), layer
            ends[layer] = start + len(task.labels)
            self._rows[number] = layer, slice(start, ends[layer])
            found.setdefault(layer, []).append((task.readout.weight, task.readout.bias))
        self._weights = {
            layer: parts[0] if len(parts) == 1 else (torch.cat([w for w, _ in parts]), torch.cat([b for _, b in parts]))
            for layer, parts in found.items()
        }

    def first_layer(self, wanted: Sequence[int], depth: int) -> int:
        """The first layer that these tasks read; the depth where none has a read-out."""
        return min([depth, *(self._first[number] for number in wanted if number in self._first)])

    def answer(self, pooled: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        """The logits (b, labels) of each of these tasks that has a read-out, from statistics
        (b, layers, statistics, dim) of the last layers."""
        answers: dict[int, Tensor] = {}
        asked = [number for number in wanted if number in self._rows]
        for layer, (weight, bias) in self._weights.items():
            own = [number for number in asked if self._first[number] == layer]
            if not own:
                continue
            layers = weight.shape[1] // pooled[0, 0].numel()
            inputs = pooled[:, pooled.shape[1] - layers :].flatten(1).to(weight)
            rows = [self._rows[number][1] for number in own]
            if sum(row.stop - row.start for row in rows) == len(weight):
                whole = linear(inputs, weight, bias)
                answers |= {number: whole[:, row] for number, row in zip(own, rows, strict=True)}
            else:  # some of the tasks: no copy of their weights
                answers |= {n: linear(inputs, weight[row], bias[row]) for n, row in zip(own, rows, strict=True)}
        return answers
