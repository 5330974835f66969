"""Worker processes, which all loaders share: they decode images ahead of what uses them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from memoro.errors import DataError
from memoro.images import Decoded, Decoder, NamedPicture

PREFETCH_BYTES = 1 << 29
"""The most bytes of pixels that are decoded ahead, over all workers."""
_PREFETCH = 2  # requests under way for each worker
_SMALL = 512  # with fewer images, starting processes takes longer than the work

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def worker_count(workers: int | None, images: int | None) -> int:
    """The number of worker processes: as asked, or one per core (eight at most), or none for a small dataset."""
    if workers is not None:
        if workers < 0:
            raise DataError(f"{workers} workers: choose 0 (decode in this process) or more.")
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if images is not None and images < _SMALL else min(cores, 8)


def images_per_request(image_bytes: int, workers: int) -> int:
    """The most images to ask a worker for at once, so that all requests under way stay within `PREFETCH_BYTES`."""
    return max(1, PREFETCH_BYTES // (_PREFETCH * workers * image_bytes)) if workers else sys.maxsize


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
                if len(waiting) == _PREFETCH * workers:
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

    def imap_parts(
        self, function: Callable[[list[A]], B], batches: Iterable[tuple[C, list[A]]], most: int, workers: int
    ) -> Iterator[tuple[C, list[B]]]:
        """What each batch is, and the function's results for every `most` of its items, in order, as by `imap`."""
        waiting: deque[tuple[C, int]] = deque()

        def parts() -> Iterator[list[A]]:
            for batch, items in batches:
                starts = range(0, max(len(items), 1), most)
                waiting.append((batch, len(starts)))
                yield from (items[at : at + most] for at in starts)

        results = map(itemgetter(1), self.imap(function, parts(), workers))
        for first in results:
            batch, number = waiting.popleft()
            found = [first, *islice(results, number - 1)]
            del first  # only the list holds the results, which may be large
            yield batch, found

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
"""Worker processes give way: the threads of a pass wait for each other, so a worker on the core of one delays all."""
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


LITTLE_SHARED_MEMORY = 2 * PREFETCH_BYTES
"""torch sends tensors through shared memory. Containers have 64 MB of it by default, less than the batches under way
and the one in use: with less than this, they are copied through a pipe."""


def _has_little_shared_memory() -> bool:
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):  # not Linux
        return False
    return found.f_blocks * found.f_frsize < LITTLE_SHARED_MEMORY


def _copy_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """How to send a tensor to another process, by value."""
    return torch.from_numpy, (tensor.numpy(),)


# --------------------------------------------------------------------------------------------------------- predictions

Pictures = list[NamedPicture]


class DecodeAhead:
    """Decodes batches of images in worker processes. An image that kills its process is a failure, as others are.

    The processes stay for the next batches, as long as this object lives.
    """

    def __init__(self, decoder: Decoder, workers: int) -> None:
        self._decoder, self._workers, self._pool = decoder, workers, shared_pool()

    def __call__(self, batches: Iterable[Pictures]) -> Iterator[tuple[Pictures, Decoded]]:
        most = images_per_request(sum(one.nbytes for one in self._decoder.preprocessings), self._workers)
        rest, waiting = iter(batches), deque[Pictures]()

        def remember() -> Iterator[tuple[Pictures, Pictures]]:
            for batch in rest:
                waiting.append(batch)
                yield batch, batch

        more = True
        while more:
            more = False
            try:
                for batch, parts in self._pool.imap_parts(self._decoder, remember(), most, self._workers):
                    waiting.popleft()
                    yield batch, _join(parts, most)
            except WorkerError:
                more = True
            while waiting:  # one of these images is to blame
                batch = waiting.popleft()
                yield batch, _join([self._alone(picture) for picture in batch], 1)

    def _alone(self, picture: NamedPicture) -> Decoded:
        try:
            [(_, decoded)] = self._pool.imap(self._decoder, [[picture]], self._workers)
        except WorkerError:
            nothing: list[list[Tensor]] = [[] for _ in self._decoder.preprocessings]
            return Decoded(nothing, {0: "the process that decoded it died, possibly out of memory."})
        return decoded


def _join(parts: Sequence[Decoded], size: int) -> Decoded:
    """What a batch gives, from what its parts of `size` images give."""
    if len(parts) == 1:
        return parts[0]
    failures = {number * size + at: why for number, part in enumerate(parts) for at, why in part.failures.items()}
    joined = []
    for found in zip(*(part.images for part in parts), strict=True):
        own = [images for part in found for images in part]
        alike = len({images.shape[1:] for images in own}) == 1
        joined.append([torch.cat(own)] if alike else [image[None] for images in own for image in images])
    return Decoded(joined, failures)
