"""Images become predictions: decoded, run through the models in batches, answered with labels or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.errors import ImageError
from memoro.heads import HeadKind, probabilities
from memoro.images import MAX_PIXELS, PICTURE_TYPES, Picture, Preprocessing, open_image, walk_images
from memoro.tasks.spec import TaskModule

Pictures = Picture | Iterable[Picture]
"""An image, a folder of images, a batch of arrays, or several of these."""
Answers = dict[str, dict[str, Any]]
"""By the name of the task: what `read_answers` gives."""


@dataclass(frozen=True)
class Prediction:
    """What all tasks answer for one image, or why it could not be read."""

    image: str
    """Its path; `image 0`, `image 1`, … for images that have none."""
    answers: Answers
    error: str | None = None


class Pass(NamedTuple):
    """Models with the same preprocessing, which one function runs together."""

    preprocessing: Preprocessing
    models: Sequence[TaskModule[Any]]
    run: Callable[[Tensor], Mapping[str, Tensor]]
    """Pixels (b, 3, height, width) to the logits (b, labels) of each model, by name."""


def read_answers(kind: HeadKind, labels: Sequence[str], logits: Tensor, top: int | None = None) -> list[dict[str, Any]]:
    """One JSON-ready answer per row of logits (b, labels).

    softmax: `label`, its `probability`, and the `probabilities` of all labels or of the `top` ones, best first.
    multilabel: `labels` at or above one half, and `probabilities`. regression: `values`.
    """
    found = probabilities(kind, logits.detach()).cpu()
    if kind == "regression":
        return [{"values": dict(zip(labels, row, strict=True))} for row in found.tolist()]
    # Sorted for the whole batch at once: a row at a time is slow where there are many tasks.
    order = torch.argsort(found, dim=-1, descending=True, stable=True)
    answers: list[dict[str, Any]] = []
    for best, values in zip(order.tolist(), found.gather(-1, order).tolist(), strict=True):
        shown = {labels[i]: value for i, value in zip(best[:top], values[:top], strict=True)}
        if kind == "softmax":
            answers.append({"label": labels[best[0]], "probability": values[0], "probabilities": shown})
        else:
            above = [labels[i] for i, value in zip(best, values, strict=True) if value >= 0.5]
            answers.append({"labels": above, "probabilities": shown})
    return answers


def stream_predictions(
    images: Pictures, passes: Sequence[Pass], names: Sequence[str], *, batch_size: int = 32, top: int | None = None
) -> Iterator[Prediction]:
    """The prediction for each image, in order, with the answers in the order of `names`.

    One batch is in memory at a time, at the size that the models take; an image that cannot be read becomes a
    prediction with an error.
    """
    pictures = list_pictures(images)
    decode = Decoder(tuple(one.preprocessing for one in passes))
    while batch := list(islice(pictures, batch_size)):
        yield from _answer(batch, *decode(batch), passes, names, top)


def read_predictions(predictions: Iterable[Prediction]) -> list[Answers]:
    """All answers; an error for the first image that could not be read."""
    found = []
    for row in predictions:
        if row.error is not None:
            raise ImageError(f"{row.image}: {row.error}")
        found.append(row.answers)
    return found


def list_pictures(images: Pictures) -> Iterator[tuple[str, Picture]]:
    """Each image with its name: those of folders one by one, batches of arrays (4 axes) taken apart."""
    number = 0
    for item in [images] if isinstance(images, PICTURE_TYPES) else images:
        inside: Iterable[Picture] = [item]
        if isinstance(item, (str, Path)) and Path(item).is_dir():
            inside = walk_images(item)
        elif isinstance(item, (np.ndarray, Tensor)) and item.ndim == 4:
            inside = item
        for picture in inside:
            yield (str(picture) if isinstance(picture, (str, Path)) else f"image {number}"), picture
            number += 1


@dataclass(frozen=True)
class Decoder:
    """Opens images and prepares each for every pass; of the opened images, one is in memory at a time."""

    preprocessings: tuple[Preprocessing, ...]
    max_pixels: int = MAX_PIXELS

    def __call__(self, pictures: Sequence[tuple[str, Picture]]) -> tuple[list[list[Tensor]], dict[int, str]]:
        """For each preprocessing the pixels of all readable images, and why the others cannot be read, by position."""
        pixels: list[list[Tensor]] = [[] for _ in self.preprocessings]
        failures: dict[int, str] = {}
        for at, (name, picture) in enumerate(pictures):
            try:
                image = self._open(name, picture)
            except ImageError as error:
                failures[at] = str(error).removeprefix(f"{name}: ")
                continue
            for own, preprocessing in zip(pixels, self.preprocessings, strict=True):
                own.append(preprocessing.to_tensor(image))
        return pixels, failures

    def _open(self, name: str, picture: Picture) -> Image.Image:
        # Big JPEGs are decoded at a fraction of their size, as in training, where every pass allows it.
        edges = [preprocessing.draft for preprocessing in self.preprocessings]
        draft = max((edge for edge in edges if edge is not None), default=None) if None not in edges else None
        return open_image(picture, draft=draft, name=name, max_pixels=self.max_pixels)


def _answer(
    batch: Sequence[tuple[str, Picture]],
    pixels: Sequence[Sequence[Tensor]],
    failures: Mapping[int, str],
    passes: Sequence[Pass],
    names: Sequence[str],
    top: int | None,
) -> Iterator[Prediction]:
    found: dict[str, Iterator[dict[str, Any]]] = {}
    for one, own in zip(passes, pixels, strict=True) if len(failures) < len(batch) else ():
        # A preprocessing without a crop leaves images at different sizes.
        parts = [torch.stack(list(own))] if len({image.shape for image in own}) == 1 else [i[None] for i in own]
        with torch.no_grad():
            logits = [one.run(part) for part in parts]
        for model in one.models:
            answers = read_answers(model.kind, model.labels, torch.cat([part[model.name] for part in logits]), top)
            found[model.name] = iter(answers)
    for at, (name, _) in enumerate(batch):
        error = failures.get(at)
        yield Prediction(name, {} if error is not None else {key: next(found[key]) for key in names}, error)
