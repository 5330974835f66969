"""Loaders that read a base pass back instead of computing it again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import format_bytes
from memoro.data import ImageSet, Loader
from memoro.data.augment import output_size
from memoro.engine.featurestore import (
    FeatureStore,
    RecordFormat,
    StoreDtype,
    default_folder,
    make_room,
    total_bytes,
    touch,
)
from memoro.engine.streams import BasePass, Features, layer_bias
from memoro.errors import CacheError, DataError

GIGABYTE = 10**9

Buffers = dict[tuple[RecordFormat, int], tuple[Tensor, Tensor]]
"""Memory to read batches into, by what a record holds and how many there are to a batch."""


@dataclass(frozen=True)
class Cache:
    """Where features are kept, how much buffers they may take, and how exactly."""

    folder: Path = field(default_factory=default_folder)
    budget: float = 20.0
    """Gigabytes, over all backbones and sets; what was used longest ago makes buffers."""
    dtype: StoreDtype = "float16"
    required: bool = True
    """Whether features that do not fit are an error; else they are computed anew every epoch."""

    def __post_init__(self) -> None:
        if self.dtype not in get_args(StoreDtype):
            raise CacheError(f"features cannot be kept as {self.dtype!r}: choose {', '.join(get_args(StoreDtype))}.")


@dataclass(frozen=True)
class CachedBatch:
    """A batch whose base pass is read from disk; else as `Batch`."""

    read: Callable[[], Features]
    """Its features. They are good until those of another batch of the same loader are read: memory is used again."""
    targets: Tensor
    index: Tensor
    total: int


class CachedLoader:
    """The batches of a loader, in its order, with features in place of pixels. Call `fill` before the first epoch.

    Loaders that are never read at the same time may share a `buffers` to read into.
    """

    def __init__(
        self, loader: Loader, backbone: Backbone, cache: Cache, first: int, buffers: Buffers | None = None
    ) -> None:
        assert isinstance(loader.images, ImageSet)
        self.loader, self.images, self.batch_size = loader, loader.images, loader.batch_size
        self._backbone = backbone
        size = output_size(loader.preprocessing)
        sample = torch.zeros(1, 3, *size, device=backbone.device, dtype=backbone.dtype)
        with torch.no_grad():
            tokens, context = backbone.anatomy.embed(sample)
        self._biases = [layer_bias(context, layer) for layer in range(first, backbone.depth)]
        layout = RecordFormat(first, backbone.depth, backbone.dim, backbone.heads, tokens.shape[1], cache.dtype)
        about = {
            "backbone": backbone.fingerprint.digest,
            "family": backbone.family,
            "functions": backbone.functions,
            "computed": str(backbone.dtype),
            "preprocessing": loader.preprocessing.to_json(),
        }
        self.store = FeatureStore(cache.folder, layout, about)
        self._buffers: Buffers = {} if buffers is None else buffers
        self._contents = [bytes.fromhex(self.images.key(sample)) for sample in range(len(self.images))]
        self.keys = [[self._key(content, at, view) for at, content in enumerate(self._contents)] for view in self.views]
        """Of every image, a list for each view."""

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def views(self) -> range:
        return range(self.loader.views or 1)

    def missing(self) -> list[dict[bytes, int]]:
        """What has no features yet, a sample for each key, in each view. Copies of an image share a record."""
        return [{keys[at]: at for at in self.store.missing(keys)} for keys in self.keys]

    def fill(self, tick: Callable[[int], None] = lambda images: None) -> None:
        """Computes what is missing; `tick` hears of every batch."""
        checked: set[int] = set()
        with self.store.writer() as writer, torch.no_grad():
            for view, absent in enumerate(self.missing()):
                for batch in self.loader.pick(list(absent.values()), view) if absent else ():
                    pixels = batch.pixels.to(self._backbone.device, self._backbone.dtype)
                    self._check(batch.index.tolist(), checked)
                    keys = [self.keys[view][int(sample)] for sample in batch.index]
                    writer.add(keys, keep_features(self._backbone, pixels, self.store.layout.first))
                    tick(len(keys))
        self.loader.close()

    def _check(self, samples: Sequence[int], checked: set[int]) -> None:
        """Whether the images still are what their keys say: what is kept under a key is kept for long."""
        for sample in samples:
            if sample not in checked and hashlib.sha256(self.images.read(sample)).digest() != self._contents[sample]:
                raise DataError(f"{self.images.where(sample)} has changed since it was screened: load the data again.")
        checked.update(samples)

    def epoch(self, number: int, start: int = 0) -> Iterator[CachedBatch]:
        """The batches of one epoch, without the first `start`."""
        view = self.loader.view(number) if self.loader.views else 0
        for samples, total in self.loader.parts(number, start):
            keys = [self.keys[view][int(sample)] for sample in samples]
            index = torch.from_numpy(samples)
            yield CachedBatch(partial(self._read, keys), self.images.targets[index], index, total)

    def _read(self, keys: Sequence[bytes]) -> Features:
        place = (self.store.layout, self.batch_size)
        if place not in self._buffers:
            self._buffers[place] = self.store.buffer(self.batch_size, self._backbone.dtype)
        return self.store.read(keys, self._biases, self._backbone.device, self._buffers[place])

    def _key(self, content: bytes, sample: int, view: int) -> bytes:
        """What the features depend on beside backbone and preprocessing: the image's content and its view."""
        loader = self.loader
        if loader.augment is None or (loader.views is not None and view == 0):
            return content
        random = json.dumps([asdict(loader.augment), loader.seed, view, sample])
        return hashlib.sha256(content + random.encode()).digest()


def keep_features(backbone: Backbone, pixels: Tensor, first: int) -> Features:
    """A base pass with what tasks read of it from layer `first` on."""
    base = BasePass(backbone.anatomy, pixels)
    layers = [layer for number, layer in enumerate(base) if number >= first]
    return Features(first, layers, base.token)


def fill_caches(loaders: Sequence[CachedLoader], cache: Cache, tick: Callable[[int], None]) -> None:
    """Makes buffers and fills all of them; an error that names the choices where they do not fit."""
    records = {(loader.store.folder, key): loader for loader in loaders for keys in loader.keys for key in keys}
    whole = sum(loader.store.layout.size for loader in records.values())
    if whole > cache.budget * GIGABYTE:
        raise CacheError(_too_big(loaders, whole, f"the budget is {cache.budget:g} GB", "--cache-budget"))
    _, needed = estimate(loaders)
    budget = int(cache.budget * GIGABYTE)
    keep = {file for loader in loaders for keys in loader.keys for file in loader.store.files_of(keys)}
    touch(keep)
    removed = make_room(cache.folder, needed, budget, keep)
    if total_bytes(cache.folder) + needed > budget:
        # The files in use hold more than is needed of them: other images, earlier layers. Better to compute anew.
        removed |= make_room(cache.folder, whole, budget, set())
    for loader in loaders:
        loader.store.forget(removed)
    _, needed = estimate(loaders)
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache.folder).free
    except OSError as error:
        raise CacheError(
            f"cannot keep features in {cache.folder} ({error.strerror}): choose another --cache-folder, or train with "
            "--no-cache."
        ) from None
    if needed > 0.95 * free:
        raise CacheError(_too_big(loaders, needed, f"the disk has {format_bytes(free)} left", "--cache-folder"))
    for loader in loaders:
        loader.store.refresh()  # what one has computed may serve another
        loader.fill(tick)


def estimate(loaders: Sequence[CachedLoader]) -> tuple[int, int]:
    """How many views are to be computed, and how many bytes they take."""
    absent = {(loader.store.folder, key): loader for loader in loaders for view in loader.missing() for key in view}
    return len(absent), sum(loader.store.layout.size for loader in absent.values())


def _too_big(loaders: Sequence[CachedLoader], size: int, limit: str, option: str) -> str:
    views, layers = max(len(loader.views) for loader in loaders), loaders[0].store.layout.layers
    choices = [f"a larger one ({option})", "--no-cache, which computes each pass anew"]
    if views > 1:
        choices.insert(0, f"fewer views (--views 1: {format_bytes(size / views)})")
    if layers > 4:
        choices.insert(0, f"a later fork (4 layers: {format_bytes(size * 4 / layers)})")
    return f"the features take {format_bytes(size)}, and {limit}. Choose {', '.join(choices[:-1])} or {choices[-1]}."
