"""How an image becomes a tensor: resize, centre crop, scale, normalise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.errors import DataError, TaskFileError

MAX_SIDE = 2048
"""The longest edge of a model's input: task files choose it, and a batch of 32 already takes 1.6 GB."""
MAX_PIXEL = 1e4
"""The largest normalised pixel: they are usually below 3, at most 255 without scaling; large ones overflow."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the pixels that a backbone takes. Equal values mean that two tasks can share a pass."""

    resize: int | tuple[int, int] | None = 224
    """Length of the shortest edge, or (height, width), or no resizing."""
    crop: tuple[int, int] | None = None
    """(height, width) cut out of the centre; smaller images are padded with black."""
    resample: int = 3
    """Pillow's number of the filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming."""
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    white: float | None = None
    """The value that becomes white in images of more than 8 bits, taken from the task's training set; None if that has
    no such images."""

    def __post_init__(self) -> None:
        resize = self.resize if self.resize is None else _side_or_pair(self.resize, "resize")
        crop = self.crop if self.crop is None else _side_or_pair(self.crop, "crop")
        values = {
            "resize": resize,
            "crop": (crop, crop) if isinstance(crop, int) else crop,
            "resample": _whole(self.resample, "resample", low=0, high=5),
            "scale": _number(self.scale, "scale"),
            "mean": _triple(self.mean, "mean"),
            "std": _triple(self.std, "std"),
            "white": self.white if self.white is None else _number(self.white, "white"),
        }
        if self.white is not None and self.white < 1:
            raise DataError("preprocessing: white is not a number of at least 1.")
        for name, value in values.items():
            object.__setattr__(self, name, value)
        with np.errstate(all="ignore"):
            extremes = np.abs(self._levels())
        if not (extremes <= MAX_PIXEL).all():  # NaN fails too
            raise DataError(
                f"preprocessing: scale {self.scale:g}, mean {self.mean} and std {self.std} do not give finite pixels "
                f"of at most {MAX_PIXEL:,.0f} in absolute value."
            )

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of a preprocessed image; None if that depends on the image."""
        if self.crop is not None:
            return self.crop
        return self.resize if isinstance(self.resize, tuple) else None

    @property
    def nbytes(self) -> int:
        """Bytes of an image before it is normalised; if its size depends on the image, those of a square one."""
        side = self.resize if isinstance(self.resize, int) else MAX_SIDE
        height, width = self.size or (side, side)
        return 3 * height * width

    @property
    def draft(self) -> int | None:
        """The shortest edge that a decoder has to deliver: twice what is needed, so that `resample` still decides."""
        if self.resize is None:
            return None
        return 2 * (self.resize if isinstance(self.resize, int) else max(self.resize))

    def at(self, side: int) -> Preprocessing:
        """The same steps for images of `side` pixels, resize and crop scaled alike."""
        if not 1 <= side <= MAX_SIDE:
            raise DataError(f"image size {side}: choose 1 to {MAX_SIDE} pixels.")
        now = self.size
        if now is None:
            return replace(self, resize=side, crop=(side, side))
        ratio = side / min(now)
        if max(now) * ratio > MAX_SIDE:
            raise DataError(f"image size {side}: the longer edge would have more than {MAX_SIDE} pixels.")

        def scaled(length: Any) -> Any:
            if length is None or isinstance(length, tuple):
                return length and tuple(map(scaled, length))
            return round(length * ratio)

        return replace(self, resize=scaled(self.resize), crop=scaled(self.crop))

    def fit(self, image: Image.Image) -> Image.Image:
        """The RGB image resized and cropped: what the model will see, as an image."""
        if self.resize is not None:
            image = image.resize(self._target(image.size), Image.Resampling(self.resample))
        if self.crop is not None:
            (height, width), (image_width, image_height) = self.crop, image.size
            top, left = (image_height - height) // 2, (image_width - width) // 2
            # Pillow fills what lies outside with black.
            image = image.crop((left, top, left + width, top + height))
        return image

    def to_tensor(self, image: Image.Image) -> Tensor:
        """An RGB image of any size as the (3, height, width) float32 tensor that a backbone takes."""
        return self.normalise(np.array(self.fit(image)))

    def on(self, images: Tensor, device: torch.device | None) -> Tensor:
        """Bytes (…, height, width, 3) normalised on a device; without one, where they are. A GPU copies them while it
        works, since they are pinned."""
        if device is None or device.type != "cuda":
            return self.normalise(images if device is None else images.to(device))
        return self.normalise(images.pin_memory().to(device, non_blocking=True))

    def normalise(self, images: Tensor | np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
        """Bytes (…, height, width, 3) as normalised pixels (…, 3, height, width) in float32, on the images' device.

        A byte gives the same float on every device.
        """
        images = torch.from_numpy(images) if isinstance(images, np.ndarray) else images
        if _divides_exactly(self, images.device):
            return self._divide(images)
        levels = torch.from_numpy(self._levels()).to(images.device)
        return torch.stack([levels[channel][images[..., channel].long()] for channel in range(3)], dim=-3)

    def _levels(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """(3, 256) what each byte becomes in each channel."""
        levels = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(values, dtype=np.float32)[:, None] for values in (self.mean, self.std))
        return np.asarray((levels - mean) / std)

    def _divide(self, images: Tensor) -> Tensor:
        """The pixels by arithmetic: several times faster than by a table."""
        values = torch.tensor((self.mean, self.std), dtype=torch.float32, device=images.device)
        mean, std = values.view(2, 3, 1, 1)
        planes = images.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format)
        return planes.div_(1 / self.scale).sub_(mean).div_(std)

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        assert self.resize is not None
        width, height = size
        short, long = min(size), max(size)
        # A strip of an image would blow up along its long edge: cap it, the crop takes the centre anyway.
        longest = min(int(self.resize * long / short), MAX_SIDE)
        return (self.resize, longest) if width <= height else (longest, self.resize)

    def to_json(self) -> dict[str, Any]:
        """All fields; white only if there is one, so that other tasks keep their hash."""
        return {name: value for name, value in asdict(self).items() if name != "white" or value is not None}

    @classmethod
    def from_json(cls, record: object) -> Preprocessing:
        """The spec of a task file's record, which is untrusted: every value is checked."""
        names = {"resize", "crop", "resample", "scale", "mean", "std"}
        if not isinstance(record, Mapping) or set(record) - {"white"} != names:
            raise TaskFileError("preprocessing: not a record of resize, crop, resample, scale, mean and std.")
        try:
            return cls(**record)
        except DataError as error:
            raise TaskFileError(str(error)) from None


@lru_cache(256)
def _divides_exactly(steps: Preprocessing, device: torch.device) -> bool:
    """Whether the arithmetic of a device gives the floats of the table for all bytes."""
    every = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1, 1).expand(256, 1, 3)
    levels = torch.from_numpy(steps._levels())
    return steps.scale != 0 and bool(torch.equal(steps._divide(every)[..., 0].cpu(), levels))


def _whole(value: object, what: str, low: int = 1, high: int = MAX_SIDE) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise DataError(f"preprocessing: {what} is not a whole number from {low} to {high}.")
    return int(value)


def _side_or_pair(value: object, what: str) -> int | tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        return _whole(value, what)
    if len(value) != 2:
        raise DataError(f"preprocessing: {what} is not a pair of sizes.")
    return _whole(value[0], what), _whole(value[1], what)


def _number(value: object, what: str) -> float:
    # An int may be too big for a float.
    known = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not known or not abs(value) <= sys.float_info.max:  # type: ignore[arg-type]
        raise DataError(f"preprocessing: {what} is not a finite number.")
    return float(value)  # type: ignore[arg-type]


def _triple(values: object, what: str) -> tuple[float, float, float]:
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != 3:
        raise DataError(f"preprocessing: {what} is not three numbers.")
    return _number(values[0], what), _number(values[1], what), _number(values[2], what)
