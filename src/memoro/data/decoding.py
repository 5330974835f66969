"""Images decoded ahead by worker processes, for predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from memoro.data.workers import WorkerError, images_per_request, shared_pool
from memoro.images import Decoded, Decoder, NamedPicture

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
                for batch, parts in self._pool.imap_parts(self._decoder, remember(), self._split, self._workers):
                    waiting.popleft()
                    yield batch, _join(parts)
            except WorkerError:
                more = True
            while waiting:  # one of these images is to blame
                batch = waiting.popleft()
                yield batch, self._one_by_one(batch)

    def _split(self, batch: Batch) -> list[Batch]:
        most = images_per_request(sum(one.nbytes for one in self._decoder.preprocessings), self._workers)
        return [batch[at : at + most] for at in range(0, len(batch), most)]

    def _one_by_one(self, batch: Batch) -> Decoded:
        parts: list[tuple[Batch, Decoded]] = []
        for picture in batch:
            try:
                parts += self._pool.imap(self._decoder, [[picture]], self._workers)
            except WorkerError:
                nothing: list[list[Tensor]] = [[] for _ in self._decoder.preprocessings]
                why = "the process that decoded it died, possibly out of memory."
                parts.append(([picture], Decoded(nothing, {0: why})))
        return _join(parts)


def _join(parts: Sequence[tuple[Batch, Decoded]]) -> Decoded:
    """What a batch gives, from what its parts give."""
    if len(parts) == 1:
        return parts[0][1]
    failures, start = dict[int, str](), 0
    for batch, decoded in parts:
        failures |= {start + at: why for at, why in decoded.failures.items()}
        start += len(batch)
    joined = []
    for found in zip(*(decoded.images for _, decoded in parts), strict=True):
        own = [images for part in found for images in part]
        alike = len({images.shape[1:] for images in own}) == 1
        joined.append([torch.cat(own)] if alike else [image[None] for images in own for image in images])
    return Decoded(joined, failures)
