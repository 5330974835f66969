"""What a session knows of each photograph: whether it can be read, how it looks in small, and its pooled statistics."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data.dataset import ImageSet, as_rows
from memoro.data.screening import HASH_BYTES, hash_look
from memoro.errors import ImageError, TeachError
from memoro.images import Levels, Preprocessing, open_image
from memoro.images.finding import HEAD_BYTES, is_heif
from memoro.tasks.spec import ReadOut
from memoro.teach.photos import Photos
from memoro.training.recipe import TrainOptions
from memoro.training.statistics import StatisticsReader

SMALL, LARGE = 224, 1024
"""Pixels of the longer edge of a picture in the grid, and of one that is looked at alone."""
MAX_PIXELS = 50_000_000
"""Of one image, by its header."""
CHUNK = 16
"""Images of one step of the background: what somebody waits for comes with the next one."""
SPARE = 256
"""Images that may be added to a session."""
MOST_BYTES = 128 << 20
"""Of small pictures in memory; the others are made again."""


class Gallery:
    """Pictures and statistics of the photographs, made in the background, first of those that are asked for."""

    def __init__(self, photos: Photos, backbone: Backbone, preprocessing: Preprocessing, options: TrainOptions) -> None:
        self.photos, self.backbone, self.preprocessing = photos, backbone, preprocessing
        self.reads = ReadOut.of(backbone.anatomy)
        self._options = replace(options, quiet=True, workers=0)
        count = len(photos) + SPARE
        self.rows = np.zeros((count, self.reads.features(backbone.dim, backbone.depth)), dtype=np.float16)
        """(n, features) pooled statistics of those images that are `ready`."""
        self.ready = np.zeros(count, dtype=bool)
        self.unreadable: dict[int, str] = {}
        """Why images cannot be read."""
        self._looks = np.zeros((count, HASH_BYTES), dtype=np.uint8)
        self._digests = np.zeros((count, 32), dtype=np.uint8)
        self._seen = np.zeros(count, dtype=bool)
        self._small: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._wanted: deque[int] = deque()
        # In an order that says nothing: the first ones are a sample of all, whatever the folders are.
        self._order = deque(sorted(range(len(photos)), key=photos.keys.__getitem__))

    @property
    def done(self) -> int:
        """How many images need nothing more."""
        return int(self.ready.sum()) + len(self.unreadable)

    def token(self, index: Sequence[int] | np.ndarray) -> Tensor:
        """(b, dim) the class tokens after the last layer, of length 1: how alike images look."""
        dim = self.backbone.dim
        last = (self.backbone.depth - self.reads.from_layer - 1) * self.reads.statistics * dim
        tokens = torch.from_numpy(self.rows[:, last : last + dim][np.asarray(index, dtype=np.int64)]).float()
        return torch.nn.functional.normalize(tokens, dim=1)

    def read(self, index: Tensor) -> Tensor:
        """(b, features) the statistics of some images."""
        return torch.from_numpy(self.rows[index.numpy()])

    def add(self, data: bytes) -> int:
        """Adds an image to the photographs, if there is room, and returns its position; raises if it cannot be read."""
        with self._lock:
            digest = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
            known = np.flatnonzero(self.ready & (self._digests == digest).all(axis=1))
            if len(known):
                return int(known[0])
            if len(self.photos) == len(self.ready):
                raise TeachError(f"{SPARE} images were added: start memoro teach again to add more.")
            open_image(data, draft=SMALL, name="the image", max_pixels=MAX_PIXELS, white=_own_white)
            return self.photos.add(data, _suffix(data))

    def want(self, index: Iterable[int]) -> None:
        """Computes the statistics of these images next, those that were asked for last before others."""
        new = [at for at in index if not self.ready[at] and at not in self.unreadable]
        with self._lock:
            self._wanted.extendleft(reversed(new))

    def waiting(self) -> list[int]:
        """Images without statistics yet, those that come next first."""
        with self._lock:
            return [at for at in [*self._wanted, *self._order] if not self.ready[at] and at not in self.unreadable]

    def step(self) -> list[int]:
        """Computes the statistics of some more images, and returns which; none where all are done."""
        chunk = self._take()
        readable = [at for at in chunk if self._look(at)]
        if readable:
            try:
                self._compute(readable)
            except Exception:
                for at in readable:
                    self._compute_alone(at)
        return chunk

    def small(self, at: int) -> bytes:
        """The image as a JPEG file that fits into the grid; raises where it cannot be read."""
        with self._lock:
            known = self._small.get(at)
        if known is not None:
            return known
        if at in self.unreadable:
            raise ImageError(self.unreadable[at])
        image = self._open(at, SMALL)
        return self._keep_small(at, image)

    def large(self, at: int) -> bytes:
        """The image as a JPEG file that fills a screen."""
        return _as_jpeg(self._open(at, LARGE), LARGE)

    def images(self, index: Sequence[int]) -> ImageSet:
        """Some readable images as a set, with what near-duplicates are found by."""
        rows = np.asarray(index, dtype=np.int64)
        digests, looks = self._digests[rows], self._looks[rows]
        keys, none = as_rows([self.photos.rows[at] for at in index]), torch.zeros(len(rows), 0, device="cpu")
        return ImageSet(
            self.photos.name, (), "regression", self.photos.source, keys, none, digests=digests, looks=looks
        )

    def _take(self) -> list[int]:
        chunk: list[int] = []
        with self._lock:
            while self._wanted and len(chunk) < CHUNK:
                at = self._wanted.popleft()
                if not self.ready[at] and at not in self.unreadable and at not in chunk:
                    chunk.append(at)
            while self._order and len(chunk) < CHUNK:
                at = self._order.popleft()
                if not self.ready[at] and at not in self.unreadable and at not in chunk:
                    chunk.append(at)
        return chunk

    def _look(self, at: int) -> bool:
        """Reads an image for the first time; whether it can be read."""
        try:
            data = self.photos.read(at)
            image = open_image(data, draft=2 * SMALL, name="the image", max_pixels=MAX_PIXELS, white=_own_white)
        except ImageError as error:
            self.unreadable[at] = str(error)
            return False
        self._digests[at] = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
        self._looks[at] = hash_look(image)
        self._keep_small(at, image)
        return True

    def _compute(self, index: Sequence[int]) -> None:
        reader = StatisticsReader(self.backbone, self._options)
        read = reader.read(self.images(index), self.preprocessing)
        limit = float(np.finfo(np.float16).max)
        found = read(torch.arange(len(index), device="cpu")).flatten(1).float().clamp(-limit, limit)
        self.rows[list(index)] = found.numpy()
        self.ready[list(index)] = True

    def _compute_alone(self, at: int) -> None:
        try:
            self._compute([at])
        except Exception as error:  # decoders and disks fail in many ways: the other images go on
            self.unreadable[at] = f"its statistics cannot be computed ({error or type(error).__name__})."

    def _open(self, at: int, edge: int) -> Image.Image:
        name = "the image"
        return open_image(self.photos.read(at), draft=2 * edge, name=name, max_pixels=MAX_PIXELS, white=_own_white)

    def _keep_small(self, at: int, image: Image.Image) -> bytes:
        data = _as_jpeg(image, SMALL)
        with self._lock:
            self._bytes += len(data) - len(self._small.get(at, b""))
            self._small[at] = data
            while self._bytes > MOST_BYTES:
                self._bytes -= len(self._small.popitem(last=False)[1])
        return data


def _suffix(data: bytes) -> str:
    """The suffix of an encoded image that was opened before."""
    head = data[:HEAD_BYTES]
    kinds = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"GIF8", ".gif"), (b"RIFF", ".webp"), (b"BM", ".bmp"))
    return ".heic" if is_heif(head) else next((suffix for start, suffix in kinds if head.startswith(start)), ".tif")


def _own_white(levels: Levels) -> float:
    return levels.white


def _as_jpeg(image: Image.Image, edge: int) -> bytes:
    image = image.copy()
    image.thumbnail((edge, edge), Image.Resampling.BILINEAR, reducing_gap=2)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()
