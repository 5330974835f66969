"""What a session knows of each photograph: whether it can be read, how it looks in small, and its pooled statistics."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data.dataset import ImageSet, as_rows
from memoro.data.screening import HASH_BYTES, hash_look
from memoro.errors import ImageError, TeachError
from memoro.images import Preprocessing, open_image
from memoro.tasks.spec import ReadOut
from memoro.teach.photos import Photos
from memoro.training.cached import read_statistics
from memoro.training.recipe import TrainOptions

SMALL, LARGE = 224, 1024
"""Pixels of the longer edge of a picture in the grid, and of one that is looked at alone."""
MAX_PIXELS = 50_000_000
"""Pixels that an image may have, by its header."""
CHUNK = 16
"""Images of one step of the background: what somebody waits for comes with the next one."""
SPARE = 256
"""Images that may be added to a session."""
KEPT = 8192
"""Small pictures in memory; others are made when they are asked for."""


class Gallery:
    """Pictures and statistics of the photographs, made in the background, first of those that are asked for."""

    def __init__(self, photos: Photos, backbone: Backbone, preprocessing: Preprocessing, options: TrainOptions) -> None:
        self.photos, self.backbone, self.preprocessing = photos, backbone, preprocessing
        self.reads = ReadOut.of(backbone.anatomy)
        self._cache = options.wanted_cache
        count = len(photos) + SPARE
        self.rows = np.zeros((count, self.reads.features(backbone.dim, backbone.depth)), dtype=np.float16)
        """(n, features) pooled statistics of those images that are `ready`."""
        self.ready = np.zeros(count, dtype=bool)
        self.unreadable: dict[int, str] = {}
        """Why images cannot be read."""
        self._looks = np.zeros((count, HASH_BYTES), dtype=np.uint8)
        self._digests = np.zeros((count, 32), dtype=np.uint8)
        self._small: dict[int, bytes] = {}
        self._lock = threading.Lock()
        # In an order that says nothing: the first ones are a sample of all, whatever the folders are.
        self._left = OrderedDict.fromkeys(sorted(range(len(photos)), key=photos.keys.__getitem__))

    @property
    def done(self) -> int:
        """How many images need nothing more."""
        return int(self.ready.sum()) + len(self.unreadable)

    def tokens(self) -> Tensor:
        """(n, dim) the class tokens after the last layer, of length 1: how alike images look; 0 if not `ready`."""
        dim = self.backbone.dim
        last = (self.backbone.depth - self.reads.from_layer - 1) * self.reads.statistics * dim
        return torch.nn.functional.normalize(torch.from_numpy(self.rows[:, last : last + dim]).float(), dim=1)

    def read(self, index: Tensor) -> Tensor:
        """(b, layers, features) the statistics of some images."""
        layers = self.backbone.depth - self.reads.from_layer
        return torch.from_numpy(self.rows[index.numpy()]).reshape(len(index), layers, self.rows.shape[1] // layers)

    def add(self, data: bytes) -> int:
        """Adds an image to the photographs, if there is room, and returns its position; raises if it cannot be read."""
        with self._lock:
            digest = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
            known = np.flatnonzero(self.ready & (self._digests == digest).all(axis=1))
            if len(known):
                return int(known[0])
            if len(self.photos) == len(self.ready):
                raise TeachError(f"{SPARE} images were added: start memoro teach again to add more.")
            _open(data, SMALL)
            at = self.photos.add(data)
            self._left[at] = None
            return at

    def want(self, index: Iterable[int]) -> None:
        """Computes the statistics of these images next, those that were asked for last before others."""
        with self._lock:
            for at in reversed(list(index)):
                if at in self._left:
                    self._left.move_to_end(at, last=False)

    def waiting(self) -> list[int]:
        """Images without statistics yet, those that come next first."""
        with self._lock:
            return list(self._left)

    def step(self) -> bool:
        """Computes the statistics of some more images; whether there were any left."""
        with self._lock:
            chunk = [self._left.popitem(last=False)[0] for _ in range(min(CHUNK, len(self._left)))]
        readable = [at for at in chunk if self._look(at)]
        try:
            self._compute(readable)
        except Exception:
            for at in readable:
                try:
                    self._compute([at])
                except Exception as error:  # decoders and disks fail in many ways: the other images go on
                    self.unreadable[at] = f"its statistics cannot be computed ({error or type(error).__name__})."
        return bool(chunk)

    def small(self, at: int) -> bytes:
        """The image as a JPEG file that fits into the grid; raises if it cannot be read."""
        return self._small.get(at) or _as_jpeg(_open(self.photos.read(at), SMALL), SMALL)

    def large(self, at: int) -> bytes:
        """The image as a JPEG file that fills a screen."""
        return _as_jpeg(_open(self.photos.read(at), LARGE), LARGE)

    def images(self, index: Sequence[int]) -> ImageSet:
        """Some readable images as a set, with what near-duplicates are found by."""
        rows = np.asarray(index, dtype=np.int64)
        digests, looks = self._digests[rows], self._looks[rows]
        keys, none = as_rows([self.photos.rows[at] for at in index]), torch.zeros(len(rows), 0, device="cpu")
        name, source = self.photos.name, self.photos.source
        return ImageSet(name, (), "regression", source, keys, none, digests=digests, looks=looks)

    def _look(self, at: int) -> bool:
        """Reads an image for the first time; whether it can be read."""
        try:
            data = self.photos.read(at)
            image = _open(data, SMALL)
        except ImageError as error:
            self.unreadable[at] = str(error).removeprefix("the image: ")
            return False
        self._digests[at] = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
        self._looks[at] = hash_look(image)
        if len(self._small) < KEPT:
            self._small[at] = _as_jpeg(image, SMALL)
        return True

    def _compute(self, index: Sequence[int]) -> None:
        if not index:
            return
        read = read_statistics(self.backbone, self.images(index), self.preprocessing, self._cache, workers=0)
        limit = float(np.finfo(np.float16).max)
        statistics = read(torch.arange(len(index), device="cpu")).flatten(1).float().clamp(-limit, limit)
        self.rows[list(index)] = statistics.numpy()
        self.ready[list(index)] = True


def _open(data: bytes, edge: int) -> Image.Image:
    white = attrgetter("white")  # of an image of more than 8 bits, its own
    return open_image(data, draft=2 * edge, name="the image", max_pixels=MAX_PIXELS, white=white)


def _as_jpeg(image: Image.Image, edge: int) -> bytes:
    image.thumbnail((edge, edge), Image.Resampling.BILINEAR, reducing_gap=2)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
