"""Images as vectors: their statistics for any model that takes a matrix, an index of short vectors that is searched by
matrix products, and groups of near-duplicates."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from memoro.backbones import Backbone, BackboneRecord, load_backbone
from memoro.backbones.load import TINY
from memoro.data.dataset import ImageSet, Skipped, unlabelled
from memoro.data.open import open_source
from memoro.data.screening import drop_unreadable, find_connected, first_copies
from memoro.data.source import Objects
from memoro.engine.answers import Pictures, list_pictures
from memoro.errors import DataError, ImageError, TaskFileError
from memoro.files import write_whole
from memoro.tasks.record import Section, read_backbone
from memoro.tasks.ridge import MOST_DIMENSIONS, NEGLIGIBLE, Read, RidgeSystem
from memoro.training.cached import Cache, find_cache, read_statistics

READ_AT_ONCE = 1024
"""Images whose statistics are in memory at a time."""
MOST_VALUES = 512
"""The most values of a vector in an index: at 2 bytes each, 1 kB an image."""
BLOCK = 1 << 16
"""Vectors that are multiplied at a time."""
MOST_GROUPED = 100_000
"""The most images that are compared pair by pair for near-duplicates."""
LARGEST = 1_000_000
"""The most images of an index; with more, hand the vectors to a library for approximate search."""
SUFFIX = ".safetensors"
_FORMAT = "memoro image index 1"


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
    pictures = _list_images(images)
    if not len(pictures):
        raise DataError("there are no images to embed: give at least one.")
    read = _statistics_of(pictures, chosen, image_size=image_size, cache=cache, workers=workers)
    known = read(torch.arange(1))[0]
    if layers is not None and not 1 <= layers <= len(known):
        raise DataError(
            f"layers={layers}: {chosen.name} has statistics of its last {len(known)} layers; choose 1 to that."
        )
    kept = known[-layers:] if layers else known
    rows = np.empty((len(pictures), kept.numel()), dtype=np.float32)
    for block in torch.split(torch.arange(len(pictures)), READ_AT_ONCE):
        rows[block.numpy()] = read(block)[:, -len(kept) :].flatten(1).float().numpy()
    return rows


class Match(NamedTuple):
    """An image of an index, and how alike it is: the cosine of both vectors, 1 for the same image."""

    image: str
    similarity: float


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Short vectors of images, and the projection that new images get theirs by."""

    names: tuple[str, ...]
    vectors: Tensor
    """(n, values) float16, of length 1."""
    weight: Tensor
    """(values, features) from statistics to vectors, before they are scaled to length 1."""
    bias: Tensor
    backbone: Backbone
    image_size: int | None = None
    skipped: tuple[Skipped, ...] = ()
    """Images that could not be read."""

    @classmethod
    def build(
        cls,
        photos: Any,
        backbone: Any = TINY,
        *,
        image_size: int | None = None,
        device: str | None = None,
        cache: Any = None,
        workers: int | None = None,
        quiet: bool = True,
    ) -> ImageIndex:
        """The index of a folder, zip, table or hub id, or of a list of images. Statistics are kept on disk."""
        images = _open(photos, workers)
        if len(images) > LARGEST:
            raise DataError(
                f"{len(images):,} images: an index holds {LARGEST:,}. Pass memoro.embed() to FAISS or LanceDB."
            )
        chosen = open_backbone(backbone, device)
        read = _statistics_of(images, chosen, image_size=image_size, cache=cache, workers=workers, quiet=quiet)
        weight, bias = _find_projection(read, len(images))
        names = tuple(images.where(at) for at in range(len(images)))
        return cls(names, _project(read, len(images), weight, bias), weight, bias, chosen, image_size, images.skipped)

    def search(self, images: Pictures, top: int = 10, *, cache: Any = None) -> list[list[Match]]:
        """For each image, the `top` most similar ones of the index, the most similar first."""
        if top < 1:
            raise DataError(f"top={top}: ask for one image at least.")
        [pictures] = drop_unreadable([_list_images(images)], quiet=True)
        if pictures.skipped:
            raise ImageError(f"{pictures.skipped[0].where}: {pictures.skipped[0].reason}.")
        read = _statistics_of(pictures, self.backbone, image_size=self.image_size, cache=cache)
        best, place = search_vectors(self.vectors, _project(read, len(pictures), self.weight, self.bias).float(), top)
        rows = zip(place.tolist(), best.tolist(), strict=True)
        return [[Match(self.names[at], min(score, 1.0)) for at, score in zip(*row, strict=True)] for row in rows]

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file: vectors and names of the images, and which backbone they need."""
        facts = {"backbone": asdict(BackboneRecord.of(self.backbone)), "image_size": self.image_size}
        names = torch.frombuffer(bytearray(json.dumps(self.names).encode()), dtype=torch.uint8)
        tensors = {"vectors": self.vectors, "weight": self.weight, "bias": self.bias, "names": names}
        write_whole(Path(path), save(tensors, metadata={"format": _FORMAT, "facts": json.dumps(facts)}))

    @classmethod
    def load(cls, path: str | Path, backbone: Any = None, *, device: str | None = None) -> ImageIndex:
        """Reads an index, and finds the backbone that it was made with; or takes one that is given, if it is that."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                facts = json.loads(about["facts"])
                found = {name: file.get_tensor(name) for name in ("vectors", "weight", "bias", "names")}
            names = tuple(map(str, json.loads(found.pop("names").numpy().tobytes())))
            record, size = read_backbone(Section(facts["backbone"])), facts["image_size"]
            shapes = [(len(names), len(found["bias"])), (len(found["bias"]), found["weight"].shape[-1])]
            if about["format"] != _FORMAT or [found[name].shape for name in ("vectors", "weight")] != shapes:
                raise ValueError
        except (OSError, SafetensorError, TaskFileError, KeyError, TypeError, ValueError, IndexError):
            raise DataError(f"{path} is not a readable index of images: make it again.") from None
        chosen = load_backbone(record, device=device) if backbone is None else open_backbone(backbone, device)
        if record.fingerprint.match(chosen.fingerprint) == "different":
            raise DataError(f"{path} was made with {record}, {chosen} has other weights: pass that `backbone`.")
        return cls(names, **found, backbone=chosen, image_size=size)


def similar(images: Pictures, photos: Any, *, top: int = 10, **options: Any) -> list[list[Match]]:
    """For each image the `top` most similar ones of `photos`: a folder, zip, table, hub id, list of images, index, or
    the file of one.

    `options` are those of `ImageIndex.build`. To search the same images again, keep the index.
    """
    return open_index(photos, **options).search(images, top, cache=options.get("cache"))


def open_index(photos: Any, backbone: Any = None, **options: Any) -> ImageIndex:
    """The index itself, one that is read from its file, or a new one."""
    if isinstance(photos, ImageIndex):
        return photos
    if isinstance(photos, (str, Path)) and Path(photos).suffix == SUFFIX:
        return ImageIndex.load(photos, backbone, device=options.get("device"))
    return ImageIndex.build(photos, backbone or TINY, **options)


def duplicates(photos: Any, *, workers: int | None = None) -> list[list[str]]:
    """Groups of images that are copies or near-duplicates (scaled, compressed again, frames of a film), large ones
    first. No backbone is needed."""
    images = _open(photos, workers)
    numbers = first_copies(images)
    unique = np.unique(numbers)
    for group in find_connected(images, unique) if len(unique) <= MOST_GROUPED else []:
        numbers[np.isin(numbers, group)] = group[0]
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    groups = sorted((part for part in parts if len(part) > 1), key=len, reverse=True)
    return [[images.where(int(at)) for at in group] for group in groups]


def open_backbone(backbone: Any, device: str | None = None) -> Backbone:
    """The backbone; one that is named is loaded once, not for each call."""
    return (_load_named if isinstance(backbone, (str, Path)) else load_backbone)(backbone, device=device)


_load_named = lru_cache(maxsize=2)(load_backbone)


def search_vectors(vectors: Tensor, wanted: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest products (q, top) of rows of `wanted` (q, values) with vectors (n, values), and their numbers."""
    best, place = torch.empty(len(wanted), 0), torch.empty(len(wanted), 0, dtype=torch.long)
    for start in range(0, len(vectors), BLOCK):
        scores = wanted @ vectors[start : start + BLOCK].float().T
        numbers = torch.arange(start, start + scores.shape[1]).expand_as(scores)
        best, order = torch.cat([best, scores], dim=1).topk(min(top, best.shape[1] + scores.shape[1]), dim=1)
        place = torch.cat([place, numbers], dim=1).gather(1, order)
    return best, place


def _statistics_of(
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
    return read_statistics(backbone, images, preprocessing, find_cache(cache), workers=workers, quiet=quiet)


def _list_images(images: Pictures) -> ImageSet:
    """Images of any kind as a set without labels."""
    return unlabelled("images", Objects(tuple(picture for _, picture in list_pictures(images))))


def _open(photos: Any, workers: int | None) -> ImageSet:
    """The readable images; the others are `skipped`."""
    place = str(photos) if isinstance(photos, (str, Path)) else None
    named = _list_images(photos) if place is None else unlabelled(place, open_source([place]))
    [images] = drop_unreadable([named], workers, quiet=True)
    if not len(images):
        raise DataError("none of the images can be read.")
    return images


def _find_projection(read: Read, count: int) -> tuple[Tensor, Tensor]:
    """Weight and bias (float16) of the principal directions of some images' standardised statistics."""
    some = torch.linspace(0, count - 1, min(count, MOST_DIMENSIONS)).round().long()
    if count < 2:  # it has no directions: its own statistics, as they are
        features = read(some).flatten(1).shape[1]
        return torch.eye(min(features, MOST_VALUES), features), torch.zeros(min(features, MOST_VALUES))
    system = RidgeSystem(len(some), lambda index: read(some[index]).flatten(1))
    kept = system.values.argsort(descending=True)[:MOST_VALUES]
    kept = kept[system.values[kept] > NEGLIGIBLE * system.values.max()]
    chosen = torch.eye(len(system.values), dtype=torch.double)[:, kept]
    weight, bias = system.unfold(chosen, torch.zeros(len(kept), dtype=torch.double))
    return weight.float().contiguous(), bias.float()


def _project(read: Read, count: int, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, values) vectors of length 1."""
    blocks = torch.split(torch.arange(count), READ_AT_ONCE)
    return torch.cat(
        [normalize(linear(read(block).flatten(1).float(), weight, bias), dim=1).half() for block in blocks]
    )
