"""Which tasks can be together, and the mask of tasks in a fixed order as index tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memoro.engine.bank import bank_offsets, lora_members
from memoro.errors import CompositionError
from memoro.tasks.mask import Lineage, trace_lineage
from memoro.tasks.task import Task, content_hashes


@dataclass(frozen=True)
class Group:
    """Tasks that see equally many tokens and cells at a layer: they attend as one dense batch, without padding."""

    rows: Tensor
    """(g) rows of the task stream."""
    tokens: Tensor | None
    """(g, p) rows whose tokens each one sees, itself first; None if it sees no other."""
    cells: Tensor | None
    """(g, m) places in the layer's bank that each one sees, its own cells first; None if there are none."""


@dataclass(frozen=True)
class RankGroup:
    """Tasks of one rank at a layer: their low-rank weights are one batched product."""

    rank: int
    rows: Tensor | None
    """(g) rows of the task stream; None: all of them, in order."""
    places: Tensor | None
    """(g) places among the bank's tasks of this rank; None: all of them, in order."""


@dataclass(frozen=True)
class LayerPlan:
    born: Tensor
    """Tasks (by index) whose stream starts at this layer; they are appended to the rows."""
    groups: tuple[Group, ...]
    restore: Tensor | None
    """Brings the rows of all groups, one after the other, back into stream order; None for a single group."""
    ranks: tuple[RankGroup, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan for a set of tasks, built once."""

    layers: tuple[LayerPlan, ...]
    """One per layer and a last one, for the tasks that are heads on the final class token."""
    order: tuple[int, ...]
    """The task (by index) in each row of the finished stream."""


def build_plan(
    lineage: Lineage, tasks: Sequence[Task], wanted: Sequence[int], depth: int, device: torch.device
) -> Plan:
    """The plan for the wanted tasks and what they extend, over a bank of all `tasks`."""
    chosen = sorted(lineage.closure(wanted), key=lambda task: lineage.forks[task])
    layers: list[LayerPlan] = []
    for layer in range(depth + 1):
        born = torch.tensor([t for t in chosen if lineage.forks[t] == layer], device=device, dtype=torch.long)
        if layer == depth:
            layers.append(LayerPlan(born, (), None))
        elif layer == 0 or layer in lineage.forks:
            groups = _plan_groups(lineage, tasks, chosen, layer, device)
            restore = torch.cat([group.rows for group in groups]).argsort() if len(groups) > 1 else None
            layers.append(LayerPlan(born, groups, restore, _plan_ranks(lineage, tasks, chosen, layer, device)))
        else:  # no stream starts here: every task sees what it saw one layer before
            layers.append(replace(layers[-1], born=born))
    return Plan(tuple(layers), tuple(chosen))


def _plan_groups(
    lineage: Lineage, tasks: Sequence[Task], chosen: Sequence[int], layer: int, device: torch.device
) -> tuple[Group, ...]:
    row = {task: position for position, task in enumerate(chosen)}
    offsets = bank_offsets(tasks, layer)
    alike: dict[tuple[int, int], list[tuple[int, list[int], list[int]]]] = defaultdict(list)
    for task in chosen:
        if lineage.forks[task] <= layer:
            seen = lineage.visible(task, layer)
            cells = [offsets[other] + cell for other in seen for cell in range(tasks[other].cells)]
            alike[len(seen), len(cells)].append((row[task], [row[other] for other in seen], cells))
    groups = []
    for (tokens, cells_seen), members in sorted(alike.items()):
        rows, seen_rows, places = (torch.tensor(part, device=device) for part in zip(*members, strict=True))
        groups.append(Group(rows, seen_rows if tokens > 1 else None, places if cells_seen else None))
    return tuple(groups)


def _plan_ranks(
    lineage: Lineage, tasks: Sequence[Task], chosen: Sequence[int], layer: int, device: torch.device
) -> tuple[RankGroup, ...]:
    present = [task for task in chosen if lineage.forks[task] <= layer]
    row = {task: position for position, task in enumerate(present)}

    def unless_all(positions: Sequence[int], count: int) -> Tensor | None:
        return None if list(positions) == list(range(count)) else torch.tensor(positions, device=device)

    groups = []
    for rank, members in lora_members(tasks, layer).items():
        places = [place for place, task in enumerate(members) if task in row]
        if places:
            rows = [row[members[place]] for place in places]
            groups.append(RankGroup(rank, unless_all(rows, len(present)), unless_all(places, len(members))))
    return tuple(groups)


def check_together(tasks: Sequence[Task]) -> None:
    """Raises if tasks cannot be in one bundle: duplicate names, missing or different parents, cycles, two backbones."""
    check_parents(tasks)
    for task in tasks[1:]:
        first, other = tasks[0].spec.backbone, task.spec.backbone
        if first.fingerprint.match(other.fingerprint) == "different":
            raise CompositionError(
                f"{task.name!r} was trained for {other.name} ({other.fingerprint.short}), {tasks[0].name!r} for "
                f"{first.name} ({first.fingerprint.short}): all tasks need the same backbone. Retrain one of them."
            )


def check_parents(tasks: Sequence[Task]) -> tuple[Lineage, dict[int, str]]:
    """The lineage of the tasks, and the content hashes of parents.

    Raises if the lineage is impossible, or a parent is not the version that its child was trained with.
    """
    lineage = trace_lineage(
        [task.name for task in tasks],
        [[parent.name for parent in task.extends] for task in tasks],
        [task.from_layer for task in tasks],
    )
    by_name = {task.name: task for task in tasks}
    parents = [parent for task in tasks for parent in task.extends]
    hashes = content_hashes(
        [*(by_name[parent.name] for parent in parents), *(p for p in parents if isinstance(p, Task))]
    )
    for task in tasks:
        check_versions(task, [by_name[parent.name] for parent in task.extends], hashes)
    return lineage, hashes


def check_versions(task: Task, parents: Sequence[Task], hashes: Mapping[int, str]) -> None:
    """Raises if one of its parents is not the version that the task was trained with."""
    for parent, recorded in zip(parents, task.parents_among(hashes), strict=True):
        content = hashes[id(parent)]
        if content != recorded.content:
            raise CompositionError(
                f"{task.name!r} extends a different version of {parent.name!r} (content {recorded.content[:12]}; "
                f"this one has {content[:12]}): {parent.name!r} was trained or changed since. Attach the version that "
                f"{task.name!r} was trained with, or train {task.name!r} again."
            )
