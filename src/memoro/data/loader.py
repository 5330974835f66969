"""A loader: batches of normalised pixels, decoded and augmented in worker processes."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from memoro.data.augment import Augment, Purpose, order, output_size
from memoro.data.dataset import ImageSet, Skipped, open_encoded
from memoro.data.screening import refuse_many, worker_count
from memoro.data.stream import ImageStream, StreamSample
from memoro.errors import DataError, ImageError
from memoro.images import Preprocessing

SHUFFLE_BUFFER = 1024
"""Images of a stream that are shuffled at a time."""

_PREFETCH = 4
_MIN_SEEN = 100  # images of a stream to read before the fraction of unreadable ones means anything


@dataclass(frozen=True)
class Batch:
    """One process's part of a batch."""

    pixels: Tensor
    """(b, 3, height, width) float32, normalised."""
    targets: Tensor
    index: Tensor
    """The samples' numbers (b,): positions in the set, or in the stream."""
    total: int
    """Images of the whole batch over all processes: what a sum of losses is divided by."""


class Request(NamedTuple):
    """What a worker is asked for: samples of a set, or encoded images of a stream."""

    view: int
    samples: Sequence[int]
    data: Sequence[bytes] | None
    targets: Tensor
    total: int


class Loader:
    """Batches of a set, epoch by epoch. The order and every view are pure functions of (seed, epoch).

    With `world` processes, each of them gets every `world`-th image of the same global batches, `batch_size` being
    theirs together. A part may be smaller than its neighbours' by one image, or empty at an epoch's end. With `views`,
    there are only so many of each image, in turn: the first is the one of evaluation, the others are random.
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
        drop_last: bool = False,
        views: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= rank < world <= batch_size:
            raise DataError(f"batch size {batch_size} for process {rank} of {world}: each needs at least one image.")
        output_size(preprocessing)
        self.images = images
        self.batch_size = batch_size
        self.skipped: list[Skipped] = []
        """Images of a stream that could not be read so far."""
        self._shuffle, self._drop_last = shuffle, drop_last
        self.preprocessing, self.augment, self.seed, self.views = preprocessing, augment, seed, views
        self.rank, self.world = rank, world
        self._seen = 0
        self._turn = 0
        self._requests = _RequestSampler()
        count = worker_count(workers, len(images) if isinstance(images, ImageSet) else 1_000_000)
        self._workers: DataLoader[Any] = DataLoader(
            _Decoder(images, preprocessing, augment, seed, plain_first=views is not None),
            batch_size=None,
            sampler=self._requests,
            num_workers=count,
            persistent_workers=count > 0,
            worker_init_fn=_ignore_interrupts,
            prefetch_factor=_PREFETCH if count else None,
            generator=torch.Generator(),  # its own: the global one would be moved on, and with it the run
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        length = len(self.images) if isinstance(self.images, ImageSet) else self.images.length
        if length is None:
            raise DataError(
                f"{self.images.name}: the stream does not tell its length; count in steps, not in epochs: --steps 1000."
            )
        return length // self.batch_size if self._drop_last else -(-length // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, without the first `start`, which are not decoded."""
        if isinstance(self.images, ImageSet):
            parts = self.parts(number, start)
            return self._work(self._request(samples, self.view(number), total) for samples, total in parts)
        return self._work(self._stream_requests(number, start))

    def pick(self, samples: Sequence[int], view: int) -> Iterator[Batch]:
        """Batches of these samples of a set in one view, in this order."""
        parts = (np.asarray(samples[at : at + self.batch_size]) for at in range(0, len(samples), self.batch_size))
        return self._work(self._request(part, view, len(part)) for part in parts)

    def view(self, number: int) -> int:
        """The number of the view that every image has in this epoch."""
        return number if self.views is None else number % self.views

    def _work(self, requests: Iterator[Request]) -> Iterator[Batch]:
        self._turn += 1
        turn = self._turn
        self._requests.fill(requests)
        for pixels, failures in self._workers:
            request = self._requests.issued.popleft()
            yield self._batch(request, pixels, failures)
            if turn != self._turn:
                raise DataError("this epoch was given up when another one began; use a loader for each of them.")

    def close(self) -> None:
        """Ends the worker processes; the next epoch would start new ones."""
        self._workers._iterator = None

    def order(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The samples of an epoch in their order."""
        assert isinstance(self.images, ImageSet)
        if self._shuffle:
            return order(len(self.images), self.seed, Purpose.ORDER, number)
        return np.arange(len(self.images))

    def parts(self, number: int, start: int = 0) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], int]]:
        """This process's samples in each batch of an epoch, and how many all processes have of it together."""
        samples = self.order(number)
        for at in range(start * self.batch_size, len(samples), self.batch_size):
            batch = samples[at : at + self.batch_size]
            if len(batch) < self.batch_size and self._drop_last:
                return
            yield batch[self.rank :: self.world], len(batch)

    def _request(self, samples: np.ndarray[Any, np.dtype[np.int64]], view: int, total: int) -> Request:
        assert isinstance(self.images, ImageSet)
        return Request(view, samples.tolist(), None, self.images.targets[torch.from_numpy(samples)], total)

    def _stream_requests(self, number: int, start: int) -> Iterator[Request]:
        assert isinstance(self.images, ImageStream)
        samples = self.images.samples()
        if self._shuffle:
            samples = _shuffle_blocks(samples, self.seed, number)
        batch: list[StreamSample] = []
        count = 0
        for sample in samples:
            batch.append(sample)
            if len(batch) == self.batch_size:
                if count >= start:
                    yield self._stream_request(number, batch)
                batch, count = [], count + 1
        if batch and not self._drop_last and count >= start:
            yield self._stream_request(number, batch)

    def _stream_request(self, number: int, batch: list[StreamSample]) -> Request:
        mine = batch[self.rank :: self.world]
        shown = torch.stack([sample.target for sample in batch])[self.rank :: self.world]
        data = [sample.data for sample in mine]
        return Request(self.view(number), [sample.number for sample in mine], data, shown, len(batch))

    def _batch(self, request: Request, pixels: Tensor, failures: list[tuple[int, str]]) -> Batch:
        if failures and isinstance(self.images, ImageSet):
            raise DataError(
                f"{failures[0][1]} It was not screened, or has changed since: load the data with screen=True, "
                "which leaves out what cannot be read, or remove the file."
            )
        self._seen += len(request.samples)
        for at, reason in failures:
            self.skipped.append(Skipped(self.images.where(request.samples[at]), reason))
        if self._seen >= _MIN_SEEN:
            refuse_many(self.skipped, self._seen, self.images.name)
        bad = {at for at, _ in failures}
        good = torch.tensor([at for at in range(len(request.samples)) if at not in bad], dtype=torch.long)
        index = torch.tensor(request.samples, dtype=torch.long)
        return Batch(pixels, request.targets[good], index[good], request.total)


class _RequestSampler(Sampler[Request]):
    """Hands out the requests of the epoch under way and remembers them, in order, until their results are back."""

    def __init__(self) -> None:
        self.issued: deque[Request] = deque()
        self._source: Iterator[Request] = iter(())

    def fill(self, source: Iterator[Request]) -> None:
        self._source = source
        self.issued = deque()

    def __iter__(self) -> Iterator[Request]:
        for request in self._source:
            # The worker needs no targets: they stay here.
            self.issued.append(request._replace(data=None))
            yield request._replace(targets=torch.empty(0))


class _Decoder(Dataset[Any]):
    """Runs in a worker: the pixels of a request's images, and which of them could not be read."""

    def __init__(
        self,
        images: ImageSet | ImageStream,
        preprocessing: Preprocessing,
        augment: Augment | None,
        seed: int,
        *,
        plain_first: bool,
    ) -> None:
        self.source, self.rows, self.name = None, None, images.name
        if isinstance(images, ImageSet):
            self.source, self.rows = images.source, images.rows
        self.preprocessing = preprocessing
        self.augment = augment
        self.seed = seed
        self.plain_first = plain_first

    def __getitem__(self, request: Request) -> tuple[Tensor, list[tuple[int, str]]]:
        pixels: list[Tensor] = []
        failures: list[tuple[int, str]] = []
        for at, sample in enumerate(request.samples):
            try:
                if self.source is not None and self.rows is not None:
                    row = int(self.rows[sample])
                    data, where = self.source.read(row), self.source.where(row)
                else:
                    assert request.data is not None
                    data, where = request.data[at], f"{self.name}, image {sample} of the stream"
                pixels.append(self._view(data, where, request.view, sample))
            except ImageError as error:
                failures.append((at, str(error)))
        if not pixels:
            return torch.empty(0, 3, *output_size(self.preprocessing)), failures
        return torch.stack(pixels), failures

    def _view(self, data: bytes, where: str, view: int, sample: int) -> Tensor:
        if self.augment is None or (self.plain_first and view == 0):
            return self.preprocessing.to_tensor(open_encoded(data, where, self.preprocessing.draft))
        address = (self.preprocessing, self.seed, view, sample)
        image = open_encoded(data, where, partial(_edge, self.augment, address))
        return self.preprocessing.normalise(np.asarray(self.augment.apply(image, *address)))


def _edge(augment: Augment, address: tuple[Preprocessing, int, int, int], size: tuple[int, int]) -> int:
    return augment.edge(size, *address)


def _shuffle_blocks(samples: Iterator[StreamSample], seed: int, epoch: int) -> Iterator[StreamSample]:
    """A stream in blocks of `SHUFFLE_BUFFER` images, each block shuffled."""
    block: list[StreamSample] = []
    number = 0
    for sample in samples:
        block.append(sample)
        if len(block) == SHUFFLE_BUFFER:
            yield from (block[at] for at in order(len(block), seed, Purpose.ORDER, epoch, number))
            block, number = [], number + 1
    yield from (block[at] for at in order(len(block), seed, Purpose.ORDER, epoch, number))


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal; the trainer finishes its step first and needs them for that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
