"""Whether tasks can be together: each with the parents that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memoro.errors import CompositionError
from memoro.tasks.mask import Lineage, trace_lineage
from memoro.tasks.task import Task, content_hashes


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
        here = hashes[id(parent)]
        if here != recorded.content:
            raise CompositionError(
                f"{task.name!r} extends a different version of {parent.name!r} (content {recorded.content[:12]}; "
                f"this one has {here[:12]}): {parent.name!r} was trained or changed since. Attach the version that "
                f"{task.name!r} was trained with, or train {task.name!r} again."
            )
