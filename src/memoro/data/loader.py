"""Loaders: batches of normalised pixels, decoded and augmented in worker processes that all loaders share."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memoro.data.augment import Augment, Purpose, order, output_size
from memoro.data.dataset import ImageSet, Skipped, refuse_many
from memoro.data.stream import ImageStream, StreamSample
from memoro.errors import DataError, ImageError
from memoro.images import Preprocessing, open_image

SHUFFLE_BUFFER = 1024
"""Images of a stream that are shuffled at a time."""

_PREFETCH = 4  # requests under way for each worker
_SMALL = 512  # with fewer images, starting processes takes longer than the work
_MIN_SEEN = 100  # images of a stream to read before the fraction of unreadable ones means anything

A = TypeVar("A")
B = TypeVar("B")


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
        for request, (pixels, failures) in self._pool.imap(self._decoder, requests, self._workers):
            if failures and isinstance(self.images, ImageSet):
                raise DataError(
                    f"{next(iter(failures.values()))} It was not screened, or has changed since: load the data with "
                    "screen=True, which leaves out what cannot be read, or remove the file."
                )
            self._seen += len(request.samples)
            if isinstance(self.images, ImageStream):
                for at, why in failures.items():
                    where = self.images.where(request.samples[at])
                    self.skipped.append(Skipped(where, why.removeprefix(f"{where}: ").rstrip(".")))
                if self._seen >= _MIN_SEEN:
                    refuse_many(self.skipped, self._seen, self.images.name, self.images.max_unreadable)
            good = [at for at in range(len(request.samples)) if at not in failures]
            targets, index = torch.from_numpy(request.targets), torch.tensor(request.samples, dtype=torch.long)
            yield Batch(pixels, targets[good], index[good], request.total)


@dataclass(frozen=True, eq=False)
class _Decoder:
    """Runs in a worker: the pixels of a request's images, and why some could not be read, by their positions."""

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
                failures[at] = str(error)
        return torch.stack(pixels) if pixels else torch.empty(0, 3, *output_size(self.preprocessing)), failures

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


def worker_count(workers: int | None, images: int | None) -> int:
    """The number of worker processes: as asked, or one per core (eight at most), or none for a small dataset."""
    if workers is not None:
        if workers < 0:
            raise DataError(f"{workers} workers: choose 0 (decode in this process) or more.")
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if images is not None and images < _SMALL else min(cores, 8)


class WorkerError(DataError):
    """A worker process ended before its work was done."""


class WorkerPool:
    """Worker processes that apply functions. They get the functions when they start, a new one starts them again."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._size = 0
        self._numbers = count()
        self._functions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._started: set[int] = set()
        self._first_answer: Future[int] | None = None
        self._lock = threading.RLock()

    def register(self, function: Any) -> int:
        """Lets the processes that start next know the function."""
        with self._lock:
            if function not in self._functions:
                self._functions[function] = next(self._numbers)
            return self._functions[function]

    def imap(self, function: Callable[[A], B], requests: Iterable[A], workers: int) -> Iterator[tuple[A, B]]:
        """Each request and the function's result, in order, computed ahead by worker processes, or here without any."""
        if not workers:
            yield from ((request, function(request)) for request in requests)
            return
        waiting: deque[tuple[A, Future[B]]] = deque()
        try:
            for request in requests:
                waiting.append((request, self._submit(function, request, workers)))
                if len(waiting) > _PREFETCH * workers:
                    request, future = waiting.popleft()
                    yield request, future.result()
            while waiting:
                request, future = waiting.popleft()
                yield request, future.result()
        except BrokenProcessPool:
            with self._lock:
                self._executor = None
            if multiprocessing.get_start_method() != "fork" and not self._has_answered():
                raise DataError(
                    'worker processes could not start: put the work of your script under `if __name__ == "__main__":`, '
                    "because each of them imports the script, or use workers=0."
                ) from None
            raise WorkerError("a worker process died, possibly out of memory: use fewer workers.") from None
        finally:
            for _, future in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the processes once they have done what was asked of them."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()
            self._executor = None

    def _has_answered(self) -> bool:
        """Whether a worker process has ever answered."""
        first = self._first_answer
        return first is not None and first.done() and not first.cancelled() and first.exception() is None

    def _submit(self, function: Callable[[A], B], request: A, workers: int) -> Future[B]:
        with self._lock:
            number = self.register(function)
            if self._executor is None or workers > self._size or number not in self._started:
                self.close()
                functions = {number: function for function, number in self._functions.items()}
                self._size, self._started = max(workers, self._size), set(functions)
                self._executor = ProcessPoolExecutor(
                    self._size, initializer=_start_worker, initargs=(functions, _has_little_shared_memory())
                )
                if not self._has_answered():
                    self._first_answer = self._executor.submit(int)
            return self._executor.submit(_apply, number, request)


_pools: WeakValueDictionary[int, WorkerPool] = WeakValueDictionary()


def shared_pool() -> WorkerPool:
    """The pool of this process. Its workers end with the last loader that holds it."""
    pool = _pools.get(os.getpid())  # a fork inherits the object, but not its workers
    if pool is None:
        pool = _pools[os.getpid()] = WorkerPool()
        atexit.register(_close_pool)
    return pool


def _close_pool() -> None:
    """Ends the workers before the interpreter shuts down: an executor that is collected then prints a traceback."""
    if (pool := _pools.get(os.getpid())) is not None:
        pool.close()


NICENESS = 10
"""Of worker processes: the threads of a pass wait for each other, so that a worker on the core of one holds up all."""
_worker_functions: dict[int, Callable[[Any], Any]] = {}


def _start_worker(functions: dict[int, Callable[[Any], Any]], copies: bool) -> None:
    _worker_functions.update(functions)
    if copies:
        ForkingPickler.register(Tensor, _copy_tensor)
    torch.set_num_threads(1)
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICENESS)
    warnings.simplefilter("ignore")  # Pillow's, about EXIF blocks and sizes below memoro's own limit
    # Ctrl-C reaches all processes of a terminal; the trainer finishes its step first and needs the workers for that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed trainer leaves no processes behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(number: int, request: Any) -> Any:
    return _worker_functions[number](request)


LITTLE_SHARED_MEMORY = 1 << 30
"""torch sends tensors through shared memory. Containers have 64 MB of it by default, less than the batches under way:
with less than this, they are copied through a pipe."""


def _has_little_shared_memory() -> bool:
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):  # not Linux
        return False
    return found.f_blocks * found.f_frsize < LITTLE_SHARED_MEMORY


def _copy_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """How to send a tensor to another process, by value."""
    return torch.from_numpy, (tensor.numpy(),)
