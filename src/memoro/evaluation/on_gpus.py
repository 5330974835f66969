"""Predictions on all GPUs of this machine: a process for each answers one chunk of images after the other."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from memoro.backbones.load import own_device
from memoro.engine.answers import Decode, Prediction
from memoro.errors import DataError
from memoro.evaluation.predictions import Predictor
from memoro.images import NamedPicture

CHUNK = 16
"""Batches that a process is given at once: it decodes the next one while the GPU is busy."""
AHEAD = 2
"""Chunks under way for each process."""


def list_devices(name: str | None) -> list[torch.device]:
    """All GPUs of this machine for `cuda` or no name, else the device of this name."""
    if name in {None, "cuda"} and torch.cuda.is_available():
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return [own_device(name)]


@dataclass(frozen=True)
class SharedPredictor(Predictor):
    """A predictor whose images are answered by several processes, in order. They have their own decoders."""

    pool: ProcessPoolExecutor = field(repr=False)
    processes: int = 1

    def predict(self, pictures: Iterator[NamedPicture], decode: Decode | None = None) -> Iterator[Prediction]:
        chunks = iter(lambda: list(islice(pictures, CHUNK * self.how.batch_size)), [])
        waiting: deque[Future[list[Prediction]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(self.pool.submit(_answer, chunk))
                if len(waiting) == AHEAD * self.processes:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process of a GPU died, possibly out of memory: choose a smaller `batch_size`, or one GPU with "
                "`device='cuda:0'`."
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def decoder(self, workers: int) -> None:
        """The processes decode for themselves."""


@contextmanager
def share(predictor: Predictor, devices: Sequence[torch.device], workers: int) -> Iterator[Predictor]:
    """The predictor on these devices, with so many processes that decode for all of them together. On a single device
    it is as it was."""
    if len(devices) < 2:
        yield predictor
        return
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    places: Any = context.SimpleQueue()
    for device in devices:
        places.put(str(device))
    given = (predictor.on("cpu"), places, -(-workers // len(devices)), torch.backends.cuda.matmul.allow_tf32)
    with ProcessPoolExecutor(len(devices), context, initializer=_start, initargs=given) as pool:
        yield SharedPredictor(predictor.backbone, predictor.models, predictor.how, pool, len(devices))


_here: dict[str, Any] = {}
"""In a process of a device: its predictor and decoder."""


def _start(predictor: Predictor, places: Any, workers: int, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    _here["predictor"] = predictor.on(places.get())
    _here["decode"] = _here["predictor"].decoder(workers)


def _answer(chunk: list[NamedPicture]) -> list[Prediction]:
    return list(_here["predictor"].predict(iter(chunk), _here["decode"]))
