"""Images decoded ahead by worker processes, for predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from memoro.data.loader import WorkerError, shared_pool
from memoro.engine.answers import Decoded, Decoder, NamedPicture

Batch = list[NamedPicture]


class DecodeAhead:
    """Decodes batches of images in worker processes. An image that kills its process is a failure, as others are.

    The processes stay for the next batches, as long as this object lives.
    """

    def __init__(self, decoder: Decoder, workers: int) -> None:
        self._decoder, self._workers, self._pool = decoder, workers, shared_pool()

    def __call__(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Decoded]]:
        rest, waiting = iter(batches), deque[Batch]()

        def remember() -> Iterator[Batch]:
            for batch in rest:
                waiting.append(batch)
                yield batch

        more = True
        while more:
            more = False
            try:
                for batch, decoded in self._pool.imap(self._decoder, remember(), self._workers):
                    waiting.popleft()
                    yield batch, decoded
            except WorkerError:
                more = True
            while waiting:  # one of these images is to blame
                batch = waiting.popleft()
                yield batch, self._one_by_one(batch)

    def _one_by_one(self, batch: Batch) -> Decoded:
        pixels: list[list[torch.Tensor]] = [[] for _ in self._decoder.preprocessings]
        failures = {}
        for at, picture in enumerate(batch):
            try:
                [(_, found)] = self._pool.imap(self._decoder, [[picture]], self._workers)
            except WorkerError:
                failures[at] = "the process that decoded it died, possibly out of memory."
                continue
            if found.failures:
                failures[at] = found.failures[0]
            for own, parts in zip(pixels, found.pixels, strict=True):
                own += parts
        return Decoded([_join(parts) for parts in pixels], failures)


def _join(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(parts)] if len({part.shape for part in parts}) == 1 else parts
