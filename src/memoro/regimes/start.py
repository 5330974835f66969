"""Starting from an earlier task, with its weights, for the same labels, more or fewer; and building on earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from memoro.console import format_count
from memoro.data import Splits
from memoro.data.columns import first_few
from memoro.engine.plan import check_together
from memoro.errors import TrainingError
from memoro.regimes import Regime, find_regime
from memoro.tasks.record import SKETCH
from memoro.tasks.spec import Model
from memoro.tasks.task import Task, content_hashes, split_members
from memoro.tasks.taskfile import link_parents, load_tasks

MAX_HISTORY = 100
RECORDED = ("data", "images", "regime", "epochs", "lr")
"""What the history of a task has of each earlier training."""
OPTIMISTIC = (
    "the earlier training may have seen the images that runs are scored on, so scores may be optimistic, and the task "
    "is not calibrated: use memoro calibrate with new images."
)


def read_start(source: Task | str | Path, name: str | None) -> Task:
    """The task to start from: the only one of its file, or the one of this name."""
    if isinstance(source, Task):
        return source
    tasks = load_tasks(source)
    chosen = [task for task in tasks if len(tasks) == 1 or task.name == name]
    if not chosen:
        names = ", ".join(task.name for task in tasks)
        raise TrainingError(f"{source} contains {len(tasks)} tasks: choose one of {names} with `task`.")
    return chosen[0]


def compare_labels(old: Task, splits: Splits) -> str:
    """Says which labels are kept, new and dropped; raises where the data is of another kind, or has none of them."""
    if splits.kind != old.kind:
        raise TrainingError(f"{old.name!r} has a {old.kind} head, but {splits.name} is a {splits.kind} set.")
    new = [label for label in splits.labels if label not in old.labels]
    dropped = [label for label in old.labels if label not in splits.labels]
    if len(new) == len(splits.labels) or (splits.kind == "regression" and (new or dropped)):
        raise TrainingError(
            f"{splits.name} has other labels ({first_few(splits.labels)}) than {old.name!r} ({first_few(old.labels)}): "
            "leave out `start_from`."
        )
    parts = [f"{format_count(len(splits.labels) - len(new), 'label')} kept"]
    parts += [
        f"{len(names)} {what} ({first_few(names)})" for what, names in (("new", new), ("dropped", dropped)) if names
    ]
    return f"starting from {old.name!r} with its cells, rank and layers: {', '.join(parts)}."


def start_from(old: Task, fresh: Task, member: int = 0) -> Task:
    """The `fresh` task with the weights of the old one; rows of its head for new labels stay fresh.

    Of an ensemble, it has those of one member; numbers beyond the last one start again with the first.
    """
    history, old = _history(old), deepcopy(old)
    old.detach_readout()  # it is solved again
    part = split_members(old)[member % old.members]
    own, rows = fresh.state_dict(), {label: row for row, label in enumerate(old.labels)}
    known = [(at, rows[label]) for at, label in enumerate(fresh.labels) if label in rows]
    tensors = {}
    for name, value in part.state_dict().items():
        if name.startswith("head."):
            tensors[name] = own[name].clone()
            for at, row in known:
                tensors[name][at] = value[row] * old.members  # the head of an ensemble is divided among its members
        else:
            tensors[name] = value.detach().to(own["head.weight"], copy=True)
    spec = replace(part.spec, name=fresh.name, labels=fresh.spec.labels, backbone=fresh.spec.backbone, metrics={})
    task = Task.from_tensors(spec, tensors, fresh.extends)
    sketch = {SKETCH: old.spec.training[SKETCH]} if SKETCH in old.spec.training else {}
    task.update_spec(training={"history": history, **sketch}, calibration=None)
    return task


def _history(old: Task) -> list[dict[str, Any]]:
    """The trainings that led to the old task, the last one last."""
    facts = old.spec.training
    earlier: Sequence[Any] = facts["history"] if isinstance(facts.get("history"), list) else []
    about = {name: facts[name] for name in RECORDED if name in facts}
    return [*earlier, {"task": old.name, "labels": len(old.labels), **about, "content": old.content_hash()}][
        -MAX_HISTORY:
    ]


def load_parents(extends: Iterable[Task | str | Path], start: Task | None) -> list[Task]:
    """The tasks to build on. A task with mere records of its parents is replaced by a copy with the parents."""
    tasks = [task for source in extends for task in ([source] if isinstance(source, Task) else load_tasks(source))]
    unlinked = [task for task in tasks if any(not isinstance(parent, Task) for parent in task.extends)]
    if unlinked:
        check_together(tasks)
        tasks = [copy(task) if any(task is one for one in unlinked) else task for task in tasks]
        link_parents(tasks, content_hashes(tasks))
    missing = {parent.name for parent in start.extends} - {task.name for task in tasks} if start else ()
    if missing:
        parents = ", ".join(f"`extends={name}.safetensors`" for name in sorted(missing))
        raise TrainingError(f"the task to start from extends {', '.join(sorted(missing))}: add {parents}.")
    return tasks


def ancestors(tasks: Sequence[Model]) -> list[Task]:
    """All tasks that these extend, each once; raises if one is not loaded, or is among `tasks` itself."""
    found: dict[int, Task] = {}
    waiting = [(task, parent) for task in tasks for parent in task.extends]
    while waiting:
        child, parent = waiting.pop()
        if not isinstance(parent, Task):
            raise TrainingError(
                f"{child.name!r} was loaded from a file without its parent {parent.name!r}, so it cannot be trained "
                "further: create it again with new_task(…, extends=[…])."
            )
        if any(parent is task for task in tasks):
            raise TrainingError(f"{child.name!r} extends {parent.name!r}: train {parent.name!r} first.")
        if id(parent) not in found:
            found[id(parent)] = parent
            waiting += [(parent, older) for older in parent.extends]
    return list(found.values())


def regime_of(task: Model, regime: str | Regime | None) -> Regime:
    """The regime that is given; without one, that of the task."""
    if regime is None and isinstance(task, Task):
        reads = task.spec.readout
        if reads is not None:
            regime = "readout" if reads.share == 1 else "joint"
        else:
            regime = "head" if task.from_layer == task.spec.backbone.depth else "side" if task.rank else "memory"
    if regime is None:
        raise TrainingError(f"{task.name!r} is not a task: pass the regime that built it, regime=….")
    found = find_regime(regime)
    if found.composes != isinstance(task, Task):
        made = "a task" if isinstance(task, Task) else "not a task"
        raise TrainingError(f"{task.name!r} is {made}; regime {found.name!r} only trains models that it built itself.")
    return found
