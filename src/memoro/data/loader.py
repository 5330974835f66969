"""Loaders: batches of normalised pixels, decoded and augmented in worker processes that all loaders share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.data.augment import Augment, Purpose, order, output_size
from memoro.data.dataset import ImageSet, Skipped, refuse_many
from memoro.data.stream import ImageStream, StreamSample
from memoro.data.workers import images_per_request, shared_pool, worker_count
from memoro.errors import DataError, ImageError
from memoro.images import Preprocessing, open_image

SHUFFLE_BUFFER = 1024
"""Images of a stream that are shuffled at a time."""

_MIN_SEEN = 100  # images of a stream to read before the fraction of unreadable ones means anything


@dataclass(frozen=True)
class Batch:
    """One process's part of a batch."""

    pixels: Tensor
    """(b, 3, height, width) float32, normalised."""
    targets: Tensor
    index: Tensor
    """The samples' numbers (b,): positions in the dataset or stream."""
    total: int
    """Images of the whole batch over all processes: what a sum of losses is divided by."""

    def select(self, chosen: Tensor) -> Batch:
        """The images where `chosen` (b,) is true."""
        return replace(self, pixels=self.pixels[chosen], targets=self.targets[chosen], index=self.index[chosen])


class Request(NamedTuple):
    """What a worker is asked for: samples of a dataset, or encoded images of a stream."""

    view: int
    samples: list[int]
    targets: npt.NDArray[Any]
    total: int
    data: list[bytes] | None = None

    def split(self, most: int) -> list[Request]:
        """Requests for at most so many of the samples each."""
        cuts = (slice(at, at + most) for at in range(0, max(len(self.samples), 1), most))
        data = self.data
        return [
            Request(self.view, self.samples[cut], self.targets[cut], self.total, None if data is None else data[cut])
            for cut in cuts
        ]


class Loader:
    """Batches of a dataset, epoch by epoch. The order and every view are pure functions of (seed, epoch).

    With `world` processes, each of them gets every `world`-th image of the same global batches of `batch_size` images.
    Its part may be one image smaller than another's, or empty at the end of an epoch. With `views`, each image has
    only that many, in turn: the first is the one of evaluation, the others are random. What `augment` leaves open is
    decided by the kind of the images.
    """

    def __init__(
        self,
        images: ImageSet | ImageStream,
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
        self.skipped: list[Skipped] = []
        """Images of a stream that could not be read so far."""
        self._shuffle = shuffle
        self._workers = worker_count(workers, len(images) if isinstance(images, ImageSet) else None)
        # A stream's table stays here: workers get encoded images.
        seen = replace(images, table=None) if isinstance(images, ImageStream) else images
        self._decoder = _Decoder(seen, preprocessing, augment, seed, plain_first=views is not None)
        self._pool = shared_pool()
        self._pool.register(self._decoder)
        self._seen = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        length = len(self.images) if isinstance(self.images, ImageSet) else self.images.length
        if length is None:
            raise DataError(
                f"{self.images.name}: the length of this stream is unknown: use --steps 1000 instead of --epochs."
            )
        return -(-length // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, without the first `start`, which are not decoded."""
        view = self.view(number)
        if isinstance(self.images, ImageSet):
            return self._load(self._request(view, samples, total) for samples, total in self.parts(number, start))
        return self._load(self._stream_request(view, batch) for batch in self._stream_batches(number, start))

    def pick(self, samples: Sequence[int], view: int) -> Iterator[Batch]:
        """Batches of these samples of a dataset in one view, in this order."""
        parts = (np.asarray(samples[at : at + self.batch_size]) for at in range(0, len(samples), self.batch_size))
        return self._load(self._request(view, part, len(part)) for part in parts)

    def view(self, number: int) -> int:
        """The number of the view that every image has in this epoch."""
        return number if self.views is None else number % self.views

    def parts(self, number: int, start: int = 0) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """This process's samples in each batch of an epoch, and how many all processes have of it together."""
        assert isinstance(self.images, ImageSet)
        length = len(self.images)
        samples = order(length, self.seed, Purpose.ORDER, number) if self._shuffle else np.arange(length)
        for at in range(start * self.batch_size, length, self.batch_size):
            batch = samples[at : at + self.batch_size]
            yield batch[self.rank :: self.world], len(batch)

    def close(self) -> None:
        """Ends the worker processes of all loaders; the next batch starts new ones."""
        self._pool.close()

    def _stream_batches(self, number: int, start: int) -> Iterator[list[StreamSample]]:
        assert isinstance(self.images, ImageStream)
        samples = self.images.samples()
        if self._shuffle:
            samples = _shuffled(samples, self.seed, number)
        for step in count():
            batch = list(islice(samples, self.batch_size))
            if not batch:
                if not step:  # training would ask for the next epoch forever
                    raise DataError(f"{self.images.name}: the stream has no labelled images.")
                return
            if step >= start:
                yield batch

    def _request(self, view: int, samples: npt.NDArray[np.int64], total: int) -> Request:
        assert isinstance(self.images, ImageSet)
        return Request(view, samples.tolist(), self.images.targets.numpy()[samples], total)

    def _stream_request(self, view: int, batch: list[StreamSample]) -> Request:
        own = slice(self.rank, None, self.world)
        numbers, data, targets = zip(*batch, strict=True)
        return Request(view, list(numbers[own]), torch.stack(targets)[own].numpy(), len(batch), list(data[own]))

    def _load(self, requests: Iterator[Request]) -> Iterator[Batch]:
        self._pool = shared_pool()
        most = images_per_request(self.preprocessing.nbytes, self._workers)
        decoded = self._pool.imap_parts(self._decoder, requests, lambda request: request.split(most), self._workers)
        for request, parts in decoded:
            failures = {sample: why for _, (_, failed) in parts for sample, why in failed.items()}
            if failures and isinstance(self.images, ImageSet):
                raise DataError(
                    f"{next(iter(failures.values()))} It was not screened, or has changed since: load the data with "
                    "screen=True, which leaves out what cannot be read, or remove the file."
                )
            self._seen += len(request.samples)
            if isinstance(self.images, ImageStream):
                for sample, why in failures.items():
                    where = self.images.where(sample)
                    self.skipped.append(Skipped(where, why.removeprefix(f"{where}: ").rstrip(".")))
                if self._seen >= _MIN_SEEN:
                    refuse_many(self.skipped, self._seen, self.images.name, self.images.max_unreadable)
            good = [at for at, sample in enumerate(request.samples) if sample not in failures]
            pixels = parts[0][1][0] if len(parts) == 1 else torch.cat([part for _, (part, _) in parts])
            parts.clear()  # not beside their copy
            targets = torch.from_numpy(request.targets)
            index = torch.tensor(request.samples, dtype=torch.long, device="cpu")
            yield Batch(pixels, targets[good], index[good], request.total)


@dataclass(frozen=True, eq=False)
class _Decoder:
    """Runs in a worker: the pixels of a request's images, and why some could not be read, by their numbers."""

    images: ImageSet | ImageStream
    preprocessing: Preprocessing
    augment: Augment | None
    seed: int
    plain_first: bool

    def __call__(self, request: Request) -> tuple[Tensor, dict[int, str]]:
        pixels: list[Tensor] = []
        failures: dict[int, str] = {}
        for at, sample in enumerate(request.samples):
            try:
                data = self.images.read(sample) if isinstance(self.images, ImageSet) else request.data[at]  # type: ignore[index]
                pixels.append(self._view(data, sample, request.view))
            except ImageError as error:
                failures[sample] = str(error)
        nothing = torch.empty(0, 3, *output_size(self.preprocessing), device="cpu")
        return torch.stack(pixels) if pixels else nothing, failures

    def _view(self, data: bytes, sample: int, view: int) -> Tensor:
        spec, augment, where = self.preprocessing, self.augment, self.images.where(sample)
        if augment is None or (self.plain_first and view == 0):
            return spec.to_tensor(open_image(data, draft=spec.draft, name=where, white=spec.white))
        address = (spec, self.seed, view, sample)
        image = open_image(data, draft=lambda size: augment.edge(size, *address), name=where, white=spec.white)
        return spec.normalise(np.asarray(augment.apply(image, *address)))


def _shuffled(samples: Iterator[StreamSample], seed: int, epoch: int) -> Iterator[StreamSample]:
    """A stream in blocks of `SHUFFLE_BUFFER` images, each block shuffled."""
    for number in count():
        block = list(islice(samples, SHUFFLE_BUFFER))
        if not block:
            return
        yield from (block[at] for at in order(len(block), seed, Purpose.ORDER, epoch, number))
