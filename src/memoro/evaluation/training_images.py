"""Which images a task learned from, according to the record in its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memoro.console import format_count
from memoro.data import ImageSet, Splits
from memoro.data.dataset import digest_keys
from memoro.tasks.record import SKETCH
from memoro.tasks.spec import Model
from memoro.tasks.task import Task

SKETCH_SIZE = 256


def sketch_images(images: ImageSet, earlier: Mapping[str, Any]) -> dict[str, list[str]]:
    """The training fact that says which images a task learned from: the smallest of their hashes, a few kilobytes.

    Any set that shares many images with them contains some of these. `earlier` are the facts of the task's earlier
    training, if it had one. Empty if the images are not known: those of a training before there was such a fact.
    """
    old = earlier.get(SKETCH, [] if not earlier.keys() - {"seed"} else None)
    if images.digests is None or not isinstance(old, list):
        return {}
    return {SKETCH: sorted({*filter(_is_text, old), *_short_hashes(images)})[:SKETCH_SIZE]}


def _is_text(entry: Any) -> bool:
    """A file may have filled its sketch with any JSON."""
    return isinstance(entry, str)


def _short_hashes(images: ImageSet) -> Iterator[str]:
    return (images.key(index)[:16] for index in range(len(images)))


def learned_from(
    task: Model,
    images: ImageSet | None,
    splits: Splits | None = None,
    others: Iterable[Model] = (),
    *,
    parents_only: bool = False,
) -> str | None:
    """A clause saying that a task, or one that it extends, learned from some images of a set, or may have; or None.

    `others` are tasks among which its ancestors are found if it has mere records of them. With `parents_only`, what
    the task itself learned from does not count.
    """
    if images is None:
        return None
    for one in _lineage(task, others)[1 if parents_only else 0 :]:
        reason = _learned_from(one, images, splits)
        if reason is not None:
            return reason if one is task else f"{task.name} extends {one.name}, and {reason}"
    return None


def on_record(task: Model, others: Iterable[Model] = ()) -> bool:
    """Whether the images that a task and its ancestors learned from are recorded."""
    return all(isinstance(one.spec.training.get(SKETCH), list) for one in _lineage(task, others))


def learned_images(task: Model, images: ImageSet, others: Iterable[Model] = ()) -> npt.NDArray[np.bool_] | None:
    """(n,) which images a task or its ancestors learned from; None if only some of them are recorded."""
    sketches = [one.spec.training.get(SKETCH) for one in _lineage(task, others)]
    if not all(isinstance(sketch, list) and len(sketch) < SKETCH_SIZE for sketch in sketches):
        return None
    known = {str(key) for sketch in sketches if isinstance(sketch, list) for key in sketch}
    return np.array([short in known for short in _short_hashes(images)], dtype=bool)


def _lineage(task: Model, others: Iterable[Model] = ()) -> list[Model]:
    """The task and its ancestors, each once, as far as they are known."""
    named = {other.name: other for other in others}
    found, waiting = [task], list(getattr(task, "extends", ()))
    while waiting:
        parent = waiting.pop()
        older = parent if isinstance(parent, Task) else named.get(parent.name)
        if older is not None and not any(older is one for one in found):
            found.append(older)
            waiting += getattr(older, "extends", ())
    return found


def _learned_from(task: Model, images: ImageSet, splits: Splits | None) -> str | None:
    training = task.spec.training
    sketch = training.get(SKETCH)
    if isinstance(sketch, list):
        if not set(filter(_is_text, sketch)).isdisjoint(_short_hashes(images)):
            return f"{task.name} was trained on some of these images"
        return None
    history = training.get("history")
    earlier = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    names = [entry.get("data") for entry in (training, *earlier)]
    if splits is not None and splits.val is None and splits.name in names:
        return (
            f"{task.name} may have been trained on these images, because its training data was also called "
            f"{splits.name} (if they are new, rename the folder or file)"
        )
    return None


def find_learned(
    splits: Splits, images: ImageSet, split: str, models: Sequence[Task], tasks: Sequence[Task]
) -> dict[str, npt.NDArray[np.bool_]]:
    """By the model's name which images of a test split it or its ancestors learned from, if that is known exactly and
    is a part of them only. If not all that it learned from is recorded, copies of training images are known if they
    explain what is recorded."""
    learned = {model.name: learned_images(model, images, tasks) for model in models} if split == "test" else {}
    new = splits.new_test
    if new is not None and new is not images:
        copies = ~np.isin(digest_keys(images), digest_keys(new))
        for model in models:
            if learned_some(model, images, tasks) and learned_from(model, new, others=tasks) is None:
                learned[model.name] = copies
    return {name: which for name, which in learned.items() if which is not None and 0 < which.sum() < len(images)}


def learned_some(model: Task, images: ImageSet, tasks: Sequence[Task]) -> bool:
    """Whether a model learned from some of the images, but too few of its images are recorded to know which."""
    return learned_images(model, images, tasks) is None and learned_from(model, images, others=tasks) is not None


def describe_learned(images: ImageSet, learned: npt.NDArray[np.bool_]) -> str:
    count = format_count(int(learned.sum()), "image")
    first = images.where(int(learned.argmax()))
    return f"{count} of {images.name}, such as {first}, were trained on: the metrics leave them out."


def describe_origin(images: ImageSet, split: str, models: Sequence[Task], tasks: Sequence[Task]) -> list[str]:
    """A note if these are not images of a test split; a warning if a model may have been trained on them."""
    if not models:
        return []
    reasons = [learned_from(model, images, others=tasks) for model in models]
    learned = "; ".join(reason for reason in reasons if reason is not None)
    optimistic = f"{learned}, so this overestimates accuracy on new images."
    if split == "test":
        return [f"warning: {images.name}: {optimistic}"] if learned else []
    count = format_count(len(images), "image")
    used, verb = (f"all {count}", "trained") if split == "all" else (f"the {count} of {split}", "selected")
    text = f"{images.name.rpartition(':')[0] or images.name} has no test split: evaluated on {used}."
    if learned:
        return [f"warning: {text} {optimistic}"]
    if split == "all" and all(on_record(model, tasks) for model in models):
        return [f"{text} None of them is among the recorded training images."]
    names = [model.name for model in models]
    were = f"{names[0]} was" if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} were"
    return [f"{text} If {were} {verb} on them, this overestimates accuracy on new images."]
