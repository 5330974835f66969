"""Loaders: batches of images, decoded and augmented in worker processes that all loaders share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.data.dataset import ImageSet
from memoro.data.source import read_bytes
from memoro.data.workers import images_per_request, shared_pool, worker_count
from memoro.errors import DataError, ImageError
from memoro.images import Augment, Decoder, NamedPicture, Preprocessing, View, output_size
from memoro.images.augment import Purpose, order


@dataclass(frozen=True)
class Batch:
    """One process's part of a batch."""

    images: Tensor
    """(b, height, width, 3) bytes. They are normalised where they are used: floats take four times the memory."""
    targets: Tensor
    index: Tensor
    """The samples' positions in the dataset (b,)."""
    total: int
    """Images of the whole batch over all processes: what a sum of losses is divided by."""
    preprocessing: Preprocessing
    digests: Tensor
    """SHA-256 of the encoded images (b, 32)."""

    @property
    def pixels(self) -> Tensor:
        """(b, 3, height, width) float32, normalised."""
        return self.preprocessing.normalise(self.images)

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The pixels on a device."""
        return self.preprocessing.on(self.images, device).to(dtype)

    def select(self, chosen: Tensor) -> Batch:
        """The images where `chosen` (b,) is true."""
        names = ("images", "targets", "index", "digests")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


class Loader:
    """Batches of a dataset, epoch by epoch. The order and every view are pure functions of (seed, epoch).

    With `world` processes, each of them gets every `world`-th image of the same global batches of `batch_size` images.
    Its part may be one image smaller than another's, or empty at the end of an epoch. With `views`, each image has
    only that many, in turn: the first is the one of evaluation, the others are random. What `augment` leaves open is
    decided by the kind of the images.
    """

    def __init__(
        self,
        images: ImageSet,
        preprocessing: Preprocessing,
        *,
        batch_size: int,
        augment: Augment | None = None,
        shuffle: bool = False,
        seed: int = 0,
        workers: int | None = None,
        views: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= rank < world <= batch_size:
            raise DataError(f"batch size {batch_size} for process {rank} of {world}: each needs at least one image.")
        output_size(preprocessing)
        augment = None if augment is None else augment.for_kind(images.kind)
        if augment is not None and augment.plain:
            augment, views = None, views and 1  # all views would be the same one
        self.images, self.batch_size = images, batch_size
        self.preprocessing, self.augment, self.seed, self.views = preprocessing, augment, seed, views
        self.rank, self.world = rank, world
        self._shuffle = shuffle
        self._workers = worker_count(workers, len(images))
        self._decoder = _Decoder(images, Decoder((preprocessing,)), augment, seed, plain_first=views is not None)
        self._pool = shared_pool()
        self._pool.register(self._decoder)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.images) // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, without the first `start`, which are not decoded."""
        view = self.view(number)
        return self._load(self.parts(number, start), view)

    def pick(self, samples: Sequence[int], view: int) -> Iterator[Batch]:
        """Batches of these samples of a dataset in one view, in this order."""
        parts = (np.asarray(samples[at : at + self.batch_size]) for at in range(0, len(samples), self.batch_size))
        return self._load(((part, len(part)) for part in parts), view)

    def view(self, number: int) -> int:
        """The number of the view that every image has in this epoch."""
        return number if self.views is None else number % self.views

    def parts(self, number: int, start: int = 0) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """This process's samples in each batch of an epoch, and how many all processes have of it together."""
        length = len(self.images)
        samples = order(length, self.seed, Purpose.ORDER, number) if self._shuffle else np.arange(length)
        for at in range(start * self.batch_size, length, self.batch_size):
            batch = samples[at : at + self.batch_size]
            yield batch[self.rank :: self.world], len(batch)

    def close(self) -> None:
        """Ends the worker processes of all loaders; the next batch starts new ones."""
        self._pool.close()

    def _load(self, batches: Iterator[tuple[npt.NDArray[np.int64], int]], view: int) -> Iterator[Batch]:
        self._pool = shared_pool()
        most = images_per_request(self.preprocessing.nbytes, self._workers)
        asked = (((samples, total), [(view, sample) for sample in samples.tolist()]) for samples, total in batches)
        for (samples, total), parts in self._pool.imap_parts(self._decoder, asked, most, self._workers):
            digests = torch.cat([part for _, part in parts])
            images = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
            parts.clear()  # not beside their copy
            index = torch.from_numpy(samples.copy())
            yield Batch(images, self.images.targets[index], index, total, self.preprocessing, digests)


@dataclass(frozen=True, eq=False)
class _Decoder:
    """Runs in a worker."""

    images: ImageSet
    decode: Decoder
    augment: Augment | None
    seed: int
    plain_first: bool

    def __call__(self, asked: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """From (view, sample): images as bytes (b, height, width, 3), and SHA-256 (b, 32) of the encoded ones."""
        samples, digests, views = [sample for _, sample in asked], list[bytes](), None
        if asked and self.augment is not None and not (self.plain_first and asked[0][0] == 0):
            views = [View(self.augment, self.seed, *one) for one in asked]
        [images], failures = self.decode((_with_digest(one, digests) for one in self.images.pictures(samples)), views)
        if failures:
            at = min(failures)
            raise DataError(
                f"{self.images.where(samples[at])}: {failures[at]} "
                + (
                    "Load the data with screen=True, which leaves out what cannot be read, or remove the file."
                    if self.images.digests is None
                    else "It has changed since it was checked: load the data again."
                )
            )
        nothing = torch.empty(0, *output_size(self.decode.preprocessings[0]), 3, dtype=torch.uint8, device="cpu")
        found = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
        return images[0] if images else nothing, torch.from_numpy(found.copy())


def _with_digest(picture: NamedPicture, digests: list[bytes]) -> NamedPicture:
    """The encoded image, whose digest is added to the list."""
    name, content = picture
    try:
        data = read_bytes(content)
    except ImageError as error:
        return name, error
    digests.append(hashlib.sha256(data).digest())
    return name, data
