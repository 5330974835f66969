"""Which images a task learned from, as its file tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memoro.data import ImageSet, ImageStream, Splits
from memoro.regimes import Baseline
from memoro.tasks.task import Task

SKETCH = "image_sketch"
"""The training fact by which the images that a task learned from are recognised: see `sketch_images`."""
SKETCH_SIZE = 256


def sketch_images(images: ImageSet | ImageStream, earlier: Mapping[str, Any]) -> dict[str, list[str]]:
    """The training fact that tells which images a task learned from: the smallest of their hashes, a few kilobytes.

    Any set that shares many images with them contains some of these. `earlier` are the facts of the task's earlier
    training, if it had one. Empty where the images are not known: those of a stream, or of a training before there
    was such a fact.
    """
    old = earlier.get(SKETCH, [] if not earlier.keys() - {"seed"} else None)
    if not isinstance(images, ImageSet) or images.digests is None or not isinstance(old, list):
        return {}
    hashes = {*_texts(old), *(_short_hash(images, at) for at in range(len(images)))}
    return {SKETCH: sorted(hashes)[:SKETCH_SIZE]}


def _texts(sketch: list[Any]) -> Iterator[str]:
    """The hashes of a sketch, which a file may have filled with any JSON."""
    return (entry for entry in sketch if isinstance(entry, str))


def _short_hash(images: ImageSet, index: int) -> str:
    return images.key(index)[:16]


def learned_from(task: Task | Baseline, images: ImageSet, splits: Splits) -> str | None:
    """That a task learned from some images of a set, or may have; None where it did not."""
    training = task.spec.training
    sketch = training.get(SKETCH)
    if isinstance(sketch, list):
        known = set(_texts(sketch))
        if any(_short_hash(images, index) in known for index in range(len(images))):
            return f"{task.name} was trained on some of these images"
        return None
    history = training.get("history")
    earlier = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    if splits.val is None and splits.name in [entry.get("data") for entry in (training, *earlier)]:
        return (
            f"{task.name} may have been trained on these images, because its training data was also called "
            f"{splits.name} (if they are new, rename the folder or file)"
        )
    return None
