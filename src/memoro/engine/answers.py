"""Images to predictions: they are decoded, run through the models in batches, and answered."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.answer import Answer, AnswerDict
from memoro.errors import CompositionError, ImageError
from memoro.images import (
    PICTURE_TYPES,
    Decoded,
    Decoder,
    NamedPicture,
    Picture,
    Preprocessing,
    read_file,
    walk_images,
)
from memoro.options import option
from memoro.tasks.familiarity import FALSE_ALARMS
from memoro.tasks.spec import TaskModule

Pictures = Picture | Iterable[Picture]
"""An image, a folder of images, a batch of arrays, or several of these."""
Answers = dict[str, Answer]
"""By the name of the task."""


@dataclass(frozen=True)
class Prediction:
    """What all tasks answer for one image, or why it could not be read."""

    image: str
    """Its path; `image 0`, `image 1`, … for images that have none."""
    answers: Answers
    error: str | None = None
    embeddings: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """The final tokens (dim) of the base and of each task, if they were asked for."""

    def to_json(self) -> dict[str, AnswerDict]:
        """The answers as JSON values."""
        return {name: answer.to_json() for name, answer in self.answers.items()}


class Recognition(NamedTuple):
    """Whether images look like those that a task was trained on: see `FamiliarityBank.judge`."""

    score: Tensor
    """(b)"""
    familiarity: Tensor
    """(b)"""


class Outputs(NamedTuple):
    """What models give for a batch of images, by name."""

    logits: Mapping[str, Tensor]
    """(b, labels)"""
    recognition: Mapping[str, Recognition]
    """Only for tasks with a familiarity."""
    tokens: Mapping[str, Tensor] = MappingProxyType({})
    """(b, dim) after the final norm, which the heads read; for `base` too, if the pass has its plain tokens."""

    def on_cpu(self, names: Iterable[str], *, tokens: bool = False) -> Outputs:
        """The logits of these models in float32 at least, their recognition, and all tokens if they are wanted, on the
        CPU. All are copied at once: each copy would wait for the device."""
        kept = list(names)
        known = [name for name in kept if name in self.recognition]
        ends = list(self.tokens) if tokens else []
        flat = [self.logits[name] for name in kept]
        flat += [torch.stack(self.recognition[name], dim=1) for name in known] + [self.tokens[name] for name in ends]
        parts = iter(copy_to_cpu(flat))
        logits = {name: next(parts) for name in kept}
        recognition = {name: Recognition(*next(parts).unbind(dim=1)) for name in known}
        return Outputs(logits, recognition, {name: next(parts) for name in ends})

    def answers(self, model: TaskModule[Any], top: int | None = None) -> list[Answer]:
        """The answer of one of the models for each image, with `probabilities` of all labels or of the `top` ones.

        They are calibrated if the model is, and have `score` and `familiarity` if it knows what is familiar to it.
        """
        spec = model.spec
        limits = () if spec.calibration is None else spec.calibration.thresholds or spec.calibration.spread
        probabilities = model.probabilities(self.logits[model.name].detach()).cpu()
        rows = model.head_kind.answer(model.labels, probabilities, top, limits)
        if model.name not in self.recognition:
            return [Answer(**row) for row in rows]
        coarse = True if spec.familiarity is not None and spec.familiarity.coarse else None
        columns = (part.tolist() for part in self.recognition[model.name])
        return [
            Answer(**row, score=score, familiarity=familiarity, coarse=coarse)
            for row, score, familiarity in zip(rows, *columns, strict=True)
        ]


def copy_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors (b, …) of one device in float32 at least, as one copy."""
    wide = [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]
    if len(wide) < 2 or len({tensor.dtype for tensor in wide}) > 1:
        return [tensor.detach().cpu() for tensor in wide]
    rows = [tensor.detach().flatten(1) for tensor in wide]
    parts = torch.split(torch.cat(rows, dim=1).cpu(), [row.shape[1] for row in rows], dim=1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, wide, strict=True)]


class Pass(NamedTuple):
    """Models with the same preprocessing, which one function runs together."""

    preprocessing: Preprocessing
    models: Sequence[TaskModule[Any]]
    run: Callable[[Tensor], Outputs]
    """Pixels (b, 3, height, width) to what the models give."""
    device: torch.device | None = None
    """Where images are normalised."""


Unfamiliar = Literal["mark", "drop", "keep"]
"""What happens to answers about images that look unlike a task's own: they get `unfamiliar`, true or false; they are
left out; nothing."""


@dataclass(frozen=True)
class Routing:
    """How unfamiliar images are treated. `false_alarms` is the share of a task's own images that may be called
    unfamiliar."""

    unfamiliar: Unfamiliar = "mark"
    false_alarms: float = FALSE_ALARMS

    def __post_init__(self) -> None:
        if self.unfamiliar not in get_args(Unfamiliar):
            allowed = ", ".join(get_args(Unfamiliar))
            raise CompositionError(f"unfamiliar must be one of {allowed}, not {self.unfamiliar!r}.")
        if not 0 <= self.false_alarms <= 1:
            raise CompositionError(f"false_alarms must be between 0 and 1, not {self.false_alarms!r}.")

    def apply(self, answer: Answer) -> Answer | None:
        """The answer as it is given to the user; None if it is dropped."""
        if self.unfamiliar == "keep" or answer.familiarity is None:
            return answer
        # In float32, as the familiarity: 1 of 100 images is not less than 0.01.
        unfamiliar = answer.familiarity < float(np.float32(self.false_alarms))
        if self.unfamiliar == "drop":
            return None if unfamiliar else answer
        return replace(answer, unfamiliar=unfamiliar)


@dataclass(frozen=True)
class AnswerOptions:
    """How images are answered."""

    batch_size: int = option(32, "Images per batch.")
    top: int | None = None
    """The number of labels whose probabilities are given; None: all."""
    routing: Routing = Routing()
    embeddings: bool = False
    """Whether predictions have the final tokens."""

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("top", self.top)):
            if value is not None and value < 1:
                raise CompositionError(f"{name} must be at least 1, not {value}.")


Decode = Callable[[Iterable[list[NamedPicture]]], Iterable[tuple[list[NamedPicture], Decoded]]]
"""Decodes batches of images: gives each batch and what a `Decoder` gives for it, in order."""


def answer_pictures(
    pictures: Iterator[NamedPicture],
    passes: Sequence[Pass],
    names: Sequence[str],
    options: AnswerOptions,
    decode: Decode | None = None,
) -> Iterator[Prediction]:
    """The prediction for each image, in order, with the answers in the order of `names`.

    An image that cannot be read becomes a prediction with an error. `decode` may use other processes; without it, one
    batch at a time is decoded here, and in memory at the size that the models take.
    """
    batches = iter(lambda: list(islice(pictures, options.batch_size)), [])
    decoder = new_decoder(passes)
    for batch, decoded in decode(batches) if decode is not None else ((batch, decoder(batch)) for batch in batches):
        yield from _answer([name for name, _ in batch], decoded, passes, names, options)


def new_decoder(passes: Sequence[Pass]) -> Decoder:
    """Prepares images for all of the passes."""
    return Decoder(tuple(group.preprocessing for group in passes))


def read_predictions(predictions: Iterable[Prediction]) -> list[dict[str, AnswerDict]]:
    """All answers as JSON values; an error for the first image that could not be read."""
    answers = []
    for row in predictions:
        if row.error is not None:
            raise ImageError(f"{row.image}: {row.error}")
        answers.append(row.to_json())
    return answers


def list_pictures(images: Pictures) -> Iterator[tuple[str, Picture]]:
    """Each image with its name: those of folders one by one, batches of arrays (4 axes) taken apart."""
    number = 0
    for item in [images] if isinstance(images, PICTURE_TYPES) else images:
        inside: Iterable[Picture] = [item]
        if isinstance(item, (str, Path)) and Path(item).is_dir():
            inside = walk_images(item)
        elif isinstance(item, (np.ndarray, Tensor)) and item.ndim == 4:
            inside = item
        elif isinstance(item, io.IOBase):  # some can be read only once
            inside = [read_file(item)]
        for picture in inside:
            yield (str(picture) if isinstance(picture, (str, Path)) else f"image {number}"), picture
            number += 1


def _by_size(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[int]]]:
    """Images of one size as one batch, with their places among all."""
    sizes: dict[torch.Size, tuple[list[Tensor], list[int]]] = {}
    at = 0
    for part in parts:
        same, places = sizes.setdefault(part.shape[1:], ([], []))
        same.append(part)
        places += range(at, at + len(part))
        at += len(part)
    for same, places in sizes.values():
        yield same[0] if len(same) == 1 else torch.cat(same), places


def _answer(
    images: Sequence[str], decoded: Decoded, passes: Sequence[Pass], names: Sequence[str], options: AnswerOptions
) -> Iterator[Prediction]:
    readable = [at for at in range(len(images)) if at not in decoded.failures]
    answers: dict[int, Answers] = {at: {} for at in readable}
    tokens: dict[int, dict[str, npt.NDArray[np.float32]]] = {at: {} for at in readable}
    for group, parts in zip(passes, decoded.images, strict=True):
        for part, places in _by_size(parts):
            with torch.no_grad():
                pixels = group.preprocessing.on(part, group.device)
                outputs = group.run(pixels).on_cpu([model.name for model in group.models], tokens=options.embeddings)
            for model in group.models:
                for place, answer in zip(places, outputs.answers(model, options.top), strict=True):
                    answers[readable[place]][model.name] = answer
            for name, rows in outputs.tokens.items():
                for place, row in zip(places, rows.float().numpy(), strict=True):
                    tokens[readable[place]].setdefault(name, row)  # of the base, those of the first pass that has it
    for at, image in enumerate(images):
        if (error := decoded.failures.get(at)) is not None:
            yield Prediction(image, {}, error)
            continue
        routed = {name: options.routing.apply(answers[at][name]) for name in names}
        given = {name: answer for name, answer in routed.items() if answer is not None}
        yield Prediction(image, given, embeddings={n: tokens[at][n] for n in ("base", *names) if n in tokens[at]})
