"""Images as bytes, at the size that models take: the only decoder, for training, predictions and the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.errors import ImageError
from memoro.images.augment import View
from memoro.images.opening import MAX_PIXELS, Picture, open_image
from memoro.images.preprocessing import Preprocessing

NamedPicture = tuple[str, Picture | ImageError]
"""An image with its name, or why there is none."""


class Decoded(NamedTuple):
    """A batch of images, before they are normalised."""

    images: list[list[Tensor]]
    """For each preprocessing all readable images as bytes (n, height, width, 3): one tensor, or one for each image if
    they differ in size. `Preprocessing.normalise` makes pixels of them."""
    failures: dict[int, str]
    """Why the others cannot be read, by position."""


@dataclass(frozen=True)
class Decoder:
    """Opens images and prepares each for every preprocessing, as if it were alone; one image is in memory at a time."""

    preprocessings: tuple[Preprocessing, ...]
    max_pixels: int = MAX_PIXELS

    def __call__(self, pictures: Iterable[NamedPicture], views: Sequence[View] | None = None) -> Decoded:
        """The images; with `views`, those views of them."""
        batches: list[list[Tensor]] = [[] for _ in self.preprocessings]
        failures: dict[int, str] = {}
        for at, (name, picture) in enumerate(pictures):
            try:
                images = self.open(name, picture, None if views is None else views[at])
            except ImageError as error:
                failures[at] = str(error).removeprefix(f"{name}: ")
                continue
            for batch, image in zip(batches, images, strict=True):
                batch.append(torch.from_numpy(np.array(image)))
        return Decoded([_stack(batch) for batch in batches], failures)

    def open(self, name: str, picture: Picture | ImageError, view: View | None = None) -> list[Image.Image]:
        """The image for each preprocessing, at its size. Raises ImageError.

        Big JPEGs are decoded at a fraction of their size: at that of each preprocessing, so that an answer does not
        depend on the other tasks.
        """
        if isinstance(picture, ImageError):
            raise picture
        options: dict[str, Any] = {"name": name, "max_pixels": self.max_pixels, "opened": {}}
        found = []
        for spec in self.preprocessings:
            draft = spec.draft if view is None else partial(view.edge, spec)
            image = open_image(picture, draft=draft, white=spec.white, **options)
            found.append(spec.fit(image) if view is None else view.apply(image, spec))
        return found


def _stack(images: list[Tensor]) -> list[Tensor]:
    """Images (height, width, 3) as batches. A preprocessing without a crop leaves them at different sizes."""
    if len({image.shape for image in images}) == 1:
        return [torch.stack(images)]
    return [image[None] for image in images]
