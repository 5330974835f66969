"""The logits of models over all images of a set, from which metrics are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Batch, ImageSet, Loader
from memoro.engine.answers import Outputs, Recognition, copy_to_cpu
from memoro.engine.composition import Composition
from memoro.engine.streams import Features
from memoro.errors import TrainingError


@dataclass(frozen=True)
class CachedBatch:
    """A batch whose features are read from disk; the rest is as in `Batch`."""

    read: Callable[[], Features]
    """Its features, valid until another batch of the same loader is read: they share memory."""
    targets: Tensor
    index: Tensor
    total: int


AnyBatch = Batch | CachedBatch


class Batches(Protocol):
    """A loader of pixels or of features."""

    @property
    def images(self) -> ImageSet: ...

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[AnyBatch]: ...


def inputs_of(batch: AnyBatch, backbone: Backbone) -> Tensor | Features:
    """The model's input: pixels on the backbone's device, or features."""
    return batch.on(backbone.device, backbone.dtype) if isinstance(batch, Batch) else batch.read()


def collect_logits(
    answer: Callable[[Any], Sequence[Tensor]],
    backbone: Backbone,
    loader: Batches,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tick: Callable[[int], None] = lambda images: None,
    all_gather: Callable[[Any], list[Any]] = lambda value: [value],
    keep_dtype: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """The logits that `answer` gives for each of its tasks over all images of a loader, and the targets, on the CPU.

    With several processes, each one's loader yields its part of the images. `all_gather` collects the parts, and all
    processes return the whole, in the order of the images.
    """
    parts: list[tuple[list[Tensor], Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in loader.epoch(0):
            if not len(batch.targets):
                continue
            with autocast():
                out = answer(inputs_of(batch, backbone))
            found = [logits.cpu() for logits in out] if keep_dtype else copy_to_cpu([logits.float() for logits in out])
            parts.append((found, batch.targets, batch.index))
            tick(len(batch.targets))
    parts = [part for own in all_gather(parts) for part in own]
    if not parts:
        raise TrainingError(f"{loader.images.name}: there are no images to evaluate on.")
    answers, targets, index = zip(*parts, strict=True)
    order = torch.cat(index).argsort(stable=True)
    return [torch.cat(logits)[order] for logits in zip(*answers, strict=True)], torch.cat(targets)[order]


def collect_outputs(
    model: Composition,
    images: ImageSet,
    names: Sequence[str],
    *,
    batch_size: int = 32,
    workers: int | None = None,
    tick: Callable[[int], None] = lambda images: None,
) -> tuple[Outputs, Tensor]:
    """The logits of tasks for all images of a set, and the targets; one pass for each preprocessing."""
    logits: dict[str, Tensor] = {}
    recognition: dict[str, Recognition] = {}
    targets = torch.empty(0, device="cpu")
    for preprocessing, together in model.passes(names).items():
        known = [name for name in together if model.tasks[name].spec.familiarity is not None]

        def answer(pixels: Tensor, together: list[str] = together, known: list[str] = known) -> list[Tensor]:
            out = model.run(pixels, together)
            return [
                *(out.logits[name] for name in together),
                *(torch.stack(out.recognition[name], dim=1) for name in known),
            ]

        loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
        found, targets = collect_logits(answer, model.backbone, loader, tick=tick)
        logits |= dict(zip(together, found, strict=False))
        recognition |= {name: Recognition(*one.T) for name, one in zip(known, found[len(together) :], strict=True)}
    return Outputs(logits, recognition), targets
