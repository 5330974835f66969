"""Who sees whom: the one definition that the engine and the tests' oracle share (the paper's mask, Table 1)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from memoro.errors import CompositionError


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

    def closure(self, tasks: Sequence[int]) -> tuple[int, ...]:
        """The tasks and everything that they need, in index order."""
        return tuple(sorted({index for task in tasks for index in (task, *self.ancestors[task])}))


def trace_lineage(names: Sequence[str], parents: Sequence[Sequence[str]], forks: Sequence[int]) -> Lineage:
    """The lineage of named tasks; raises if a name is doubled, a parent is missing or tasks form a cycle."""
    index: dict[str, int] = {}
    for position, name in enumerate(names):
        if name in index:
            raise CompositionError(f"two tasks are named {name!r}; names must be unique, so rename one.")
        index[name] = position
    for name, wanted in zip(names, parents, strict=True):
        for parent in wanted:
            if parent not in index:
                raise CompositionError(f"{name!r} extends {parent!r}, which is missing: attach {parent!r} too.")

    direct = [[index[parent] for parent in wanted] for wanted in parents]
    children: list[list[int]] = [[] for _ in names]
    missing = [len(set(older)) for older in direct]
    for task, older in enumerate(direct):
        for ancestor in set(older):
            children[ancestor].append(task)
    ready = [task for task, count in enumerate(missing) if not count]
    ancestors: dict[int, tuple[int, ...]] = {}
    while ready:
        task = ready.pop()
        found = dict.fromkeys(direct[task])
        for ancestor in direct[task]:
            found.update(dict.fromkeys(ancestors[ancestor]))
        ancestors[task] = tuple(found)
        for child in children[task]:
            missing[child] -= 1
            if not missing[child]:
                ready.append(child)
    if len(ancestors) < len(names):
        raise CompositionError(
            f"tasks extend each other in a cycle: {_cycle(names, direct, ancestors)}. "
            "Create one of them without extends."
        )
    return Lineage(tuple(ancestors[task] for task in range(len(names))), tuple(forks))


def _cycle(names: Sequence[str], direct: Sequence[Sequence[int]], done: Container[int]) -> str:
    path = [next(task for task in range(len(names)) if task not in done)]
    while path.count(path[-1]) < 2:
        path.append(next(parent for parent in direct[path[-1]] if parent not in done))
    return " -> ".join(repr(names[task]) for task in path[path.index(path[-1]) :])
