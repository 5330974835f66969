"""Who sees whom: the one definition that the engine and the tests' oracle share (the paper's mask, Table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain

from memoro.errors import CompositionError

MAX_SEEN = 1 << 18
"""Tokens and memory cells of other tasks that all tasks together may see: a small file could ask for far more."""


@dataclass(frozen=True)
class Lineage:
    """Tasks by index, with all their ancestors and the layer at which each one's stream starts."""

    ancestors: tuple[tuple[int, ...], ...]
    """All ancestors of each task (parents of parents too), nearest first."""
    forks: tuple[int, ...]

    def visible(self, task: int, layer: int) -> tuple[int, ...]:
        """The tasks whose token and memory a task's token attends to at a layer, itself first.

        Beside these it sees all base tokens. Base tokens see no task, and a task never sees one that it does not
        extend. Two streams meet from the layer on where both exist.
        """
        return task, *(other for other in self.ancestors[task] if self.forks[other] <= layer)

    def split(self, counts: Sequence[int]) -> tuple[Lineage, list[range]]:
        """The lineage of the members of these tasks, `counts[i]` of task i, and the members of each task.

        A member sees all members of its task's ancestors, and none of its own task's.
        """
        ends = list(accumulate(counts))
        members = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
        older = [tuple(chain.from_iterable(members[task] for task in found)) for found in self.ancestors]
        tasks = [task for task, count in enumerate(counts) for _ in range(count)]
        return Lineage(tuple(older[task] for task in tasks), tuple(self.forks[task] for task in tasks)), members

    def check_size(self, members: Sequence[int], cells: Sequence[int]) -> None:
        """Raises if tasks with these numbers of members and memory cells see too much of each other."""
        sizes = [count * (1 + own) for count, own in zip(members, cells, strict=True)]
        seen = [sum(sizes[task] for task in older) for older in self.ancestors]
        if sum(count * others for count, others in zip(members, seen, strict=True)) > MAX_SEEN:
            raise CompositionError(
                f"these tasks extend each other so often that they would see more than {MAX_SEEN:,} tokens and memory "
                "cells: compose fewer of them."
            )

    def closure(self, tasks: Sequence[int]) -> tuple[int, ...]:
        """The tasks and everything that they need, in index order."""
        return tuple(sorted({index for task in tasks for index in (task, *self.ancestors[task])}))


def index_names(names: Iterable[str]) -> dict[str, int]:
    """The position of each name; raises if one is a duplicate."""
    index: dict[str, int] = {}
    for position, name in enumerate(names):
        if index.setdefault(name, position) != position:
            raise CompositionError(f"two tasks are named {name!r}; names must be unique: rename one with rename().")
    return index


def trace_lineage(names: Sequence[str], parents: Sequence[Sequence[str]], forks: Sequence[int]) -> Lineage:
    """The lineage of named tasks; raises if a name is a duplicate, a parent is missing or tasks form a cycle."""
    index = index_names(names)
    for name, wanted in zip(names, parents, strict=True):
        for parent in wanted:
            if parent not in index:
                raise CompositionError(f"{name!r} extends {parent!r}, which is missing: attach {parent!r} too.")

    direct = [[index[parent] for parent in wanted] for wanted in parents]
    ancestors: dict[int, tuple[int, ...]] = {}
    try:
        for task in TopologicalSorter(dict(enumerate(direct))).static_order():
            older = (ancestors[parent] for parent in direct[task])
            ancestors[task] = tuple(dict.fromkeys([*direct[task], *chain.from_iterable(older)]))
    except CycleError as error:
        cycle = " -> ".join(repr(names[task]) for task in reversed(error.args[1]))
        raise CompositionError(
            f"tasks extend each other in a cycle: {cycle}. Create one of them without extends."
        ) from None
    return Lineage(tuple(ancestors[task] for task in range(len(names))), tuple(forks))
