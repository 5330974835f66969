"""Random draws that depend on nothing but (seed, purpose, epoch, sample), and augmentation by them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from memoro.errors import DataError
from memoro.heads import HeadKind
from memoro.images.preprocessing import Preprocessing
from memoro.options import option

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """Keeps the draws of one use apart from those of another under the same seed."""

    AUGMENT = 1
    ORDER = 2
    SPLIT = 3


def raw(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.uint64]:
    """`count` random 64-bit words of a counter-based generator: same address, same words, in any process.

    Only raw words are used, since numpy promises those, and not its distributions, for all its versions.
    """
    key = np.array([seed & _MASK, purpose], dtype=np.uint64)
    counter = np.array([0, sample & _MASK, epoch & _MASK, 0], dtype=np.uint64)
    return np.asarray(np.random.Philox(key=key, counter=counter).random_raw(count), dtype=np.uint64)


def uniform(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.float64]:
    """`count` numbers from [0, 1)."""
    return (raw(count, seed, purpose, epoch, sample) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(count: int, seed: int, purpose: Purpose, epoch: int = 0, sample: int = 0) -> npt.NDArray[np.int64]:
    """The numbers 0 to count - 1, shuffled."""
    return np.argsort(raw(count, seed, purpose, epoch, sample), kind="stable").astype(np.int64)


Crop = Literal["inception", "pad", "none"]

_TRIES = 10


@dataclass(frozen=True)
class Augment:
    """How views of training images are drawn; `Recipe.views` says how many there are.

    Workers, processes and a resumed run all see the same view of a sample.
    """

    crop: Crop | None = option(
        None,
        "Random resized crops (inception), random shifts (pad) or none.",
        shown="inception in random views; none for numbers",
    )
    """`inception`: a part of the image, stretched to the input size (the paper's); `pad`: the whole image, shifted
    (the paper's random crop for CIFAR-100); `none`: as in evaluation. A crop changes what numbers measure."""
    scale: tuple[float, float] = option(
        (0.08, 1.0), "Smallest and largest fraction of the image area in an inception crop.", name="crop_scale"
    )
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width to height of an inception crop."""
    padding: float = 1 / 8
    """How far `pad` shifts at most, as a fraction of the input size: 4 of 32 pixels, as usual for CIFAR."""
    flip: float | None = option(
        None,
        "Probability of a horizontal flip. Use 0 if left and right matter or images show text.",
        shown="0.5 in random views; 0 for numbers",
    )

    def __post_init__(self) -> None:
        if self.crop is not None and self.crop not in get_args(Crop):
            raise DataError(f"unknown crop {self.crop!r}: choose one of {', '.join(get_args(Crop))}.")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise DataError(f"scale {self.scale}: give two fractions of the image's area, 0 < low ≤ high ≤ 1.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise DataError(f"ratio {self.ratio}: give two ratios of width to height, 0 < low ≤ high.")
        if not 0 <= self.padding < 1:
            raise DataError(f"padding {self.padding}: choose a fraction of the input size, from 0 to below 1.")
        if self.flip is not None and not 0 <= self.flip <= 1:
            raise DataError(f"flip {self.flip}: choose a probability from 0 to 1.")

    def for_kind(self, kind: HeadKind) -> Augment:
        """The same, with what is None decided by what the images are labelled with."""
        if self.crop is not None and self.flip is not None:
            return self
        random = kind != "regression"
        crop = self.crop or ("inception" if random else "none")
        return replace(self, crop=crop, flip=0.5 * random if self.flip is None else self.flip)

    @property
    def plain(self) -> bool:
        """Whether every view is the one of evaluation."""
        return self.crop == "none" and self.flip == 0


@dataclass(frozen=True)
class View:
    """One of the random views of a sample."""

    augment: Augment
    seed: int
    epoch: int
    sample: int

    @cached_property
    def draws(self) -> list[float]:
        draws = uniform(2 * _TRIES + 3, self.seed, Purpose.AUGMENT, self.epoch, self.sample)
        return [float(draw) for draw in draws]

    def apply(self, image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
        """The image's view, at the size that the backbone takes."""
        height, width = output_size(preprocessing)
        augment = self.augment.for_kind("softmax")  # a Loader has decided by its images already
        if augment.crop == "inception":
            image = image.resize((width, height), Image.Resampling(preprocessing.resample), box=self.box(image.size))
        else:
            image = preprocessing.fit(image)
        if augment.crop == "pad":
            # Pillow fills what lies outside with black.
            far = round(augment.padding * width), round(augment.padding * height)
            left, top = (math.floor(self.draws[at + 1] * (2 * far[at] + 1)) - far[at] for at in (0, 1))
            image = image.crop((left, top, left + width, top + height))
        mirrored = augment.flip is not None and self.draws[0] < augment.flip
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image

    def edge(self, preprocessing: Preprocessing, size: tuple[int, int]) -> int:
        """The shortest edge to decode an image of this size at, so that the view still has twice the input's pixels."""
        if self.augment.crop not in {None, "inception"}:
            return preprocessing.draft or min(size)
        height, width = output_size(preprocessing)
        left, top, right, bottom = self.box(size)
        return math.ceil(min(size) * max(2 * width / (right - left), 2 * height / (bottom - top)))

    def box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the crop, not in whole pixels: a smaller decode has the same one."""
        (width, height), draws = size, self.draws
        scale, ratios = self.augment.scale, self.augment.ratio
        low, high = math.log(ratios[0]), math.log(ratios[1])
        for area, shape in zip(draws[3::2], draws[4::2], strict=True):
            part = scale[0] + (scale[1] - scale[0]) * area
            ratio = math.exp(low + (high - low) * shape)
            crop = math.sqrt(width * height * part * ratio), math.sqrt(width * height * part / ratio)
            if crop[0] <= width and crop[1] <= height:
                break
        else:
            # A strip of an image has no crop of these ratios: its centre, as far as they allow.
            crop = min(width, height * ratios[1]), min(height, width / ratios[0])
            draws = [draws[0], 0.5, 0.5]
        left, top = (width - crop[0]) * draws[1], (height - crop[1]) * draws[2]
        return left, top, min(left + crop[0], width), min(top + crop[1], height)


def output_size(preprocessing: Preprocessing) -> tuple[int, int]:
    """(height, width) that all images come out at; without one they would not fit into a batch."""
    if preprocessing.size is None:
        raise DataError("images of this preprocessing come out at different sizes; fix one with preprocessing.at(224).")
    return preprocessing.size
