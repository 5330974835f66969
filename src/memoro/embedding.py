"""Images as vectors: pooled statistics of a frozen backbone, for any model that takes a matrix."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import TINY
from memoro.data.dataset import ImageSet
from memoro.data.source import Objects
from memoro.engine.answers import Pictures, list_pictures
from memoro.errors import DataError
from memoro.tasks.ridge import Read
from memoro.training.cached import Cache
from memoro.training.recipe import TrainOptions
from memoro.training.statistics import StatisticsReader

BLOCK = 1024
"""Images whose statistics are in memory at a time, besides the result."""


def embed(
    images: Pictures,
    backbone: str | Path | nn.Module | Backbone = TINY,
    *,
    layers: int | None = None,
    image_size: int | None = None,
    device: str | None = None,
    cache: Cache | bool | None = None,
    workers: int | None = None,
) -> npt.NDArray[np.float32]:
    """One row of statistics for each image: of each layer that is read the class token, and the mean and the standard
    deviation of the patch tokens, layer by layer.

    `images` are as `Composition.predict` takes them. Read-outs read the upper two thirds of the layers; `layers=1` is
    the last layer alone. `image_size` is the input size in pixels, by default the backbone's. Statistics are kept on
    disk by the images' content unless `cache` is False, so the second time no pass is run.
    """
    chosen = open_backbone(backbone, device)
    pictures = as_image_set(images)
    if not len(pictures):
        raise DataError("there are no images to embed: give at least one.")
    read = statistics_of(pictures, chosen, image_size=image_size, cache=cache, workers=workers)
    known = read(torch.arange(1))[0]
    if layers is not None and not 1 <= layers <= len(known):
        raise DataError(
            f"layers={layers}: {chosen.name} has statistics of its last {len(known)} layers; choose 1 to that."
        )
    kept = known[-layers:] if layers else known
    rows = np.empty((len(pictures), kept.numel()), dtype=np.float32)
    for block in torch.split(torch.arange(len(pictures)), BLOCK):
        rows[block.numpy()] = read(block)[:, -len(kept) :].flatten(1).float().numpy()
    return rows


def statistics_of(
    images: ImageSet,
    backbone: Backbone,
    *,
    image_size: int | None = None,
    cache: Cache | bool | None = None,
    workers: int | None = None,
    quiet: bool = True,
) -> Read:
    """A function from the numbers (b) of images to their statistics (b, layers, statistics, dim)."""
    preprocessing = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
    options = TrainOptions(cache=cache, workers=workers, quiet=quiet)
    return StatisticsReader(backbone, options).read(images, preprocessing)


def open_backbone(backbone: Any, device: str | None = None) -> Backbone:
    """The backbone; one that is named is loaded once, not for each call."""
    return (
        _load_named(str(backbone), device)
        if isinstance(backbone, (str, Path))
        else load_backbone(backbone, device=device)
    )


@lru_cache(maxsize=2)
def _load_named(name: str, device: str | None) -> Backbone:
    return load_backbone(name, device=device)


def as_image_set(images: Pictures) -> ImageSet:
    """Images of any kind as a set without labels."""
    source = Objects(tuple(picture for _, picture in list_pictures(images)))
    rows = np.arange(len(source.items))
    return ImageSet("images", (), "regression", source, rows, torch.zeros(len(rows), 0, device="cpu"))
