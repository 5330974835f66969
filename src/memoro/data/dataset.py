"""An image set: encoded images that can be read one by one, and what each of them shows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memoro.errors import ImageError
from memoro.images import Draft, open_image

if TYPE_CHECKING:
    from memoro.heads import HeadKind


# No encoded image is bigger; a file that is would only fill the memory.
MAX_BYTES = 512 * 2**20


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    where: str
    reason: str


class Source(Protocol):
    """Where encoded images come from. Pickled to worker processes, so it opens its files when first asked."""

    def read(self, row: int) -> bytes: ...

    def where(self, row: int) -> str:
        """The image's address as a user would write it."""
        ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one split. Nothing is decoded before it is asked for."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    source: Source
    rows: npt.NDArray[np.int64]
    """Which rows of the source belong to this set."""
    targets: Tensor
    """Class numbers (n,) for softmax, else float32 (n, labels)."""
    skipped: tuple[Skipped, ...] = ()
    digests: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    """SHA-256 of each encoded image (n, 32), where somebody has read them all."""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> bytes:
        return self.source.read(int(self.rows[index]))

    def where(self, index: int) -> str:
        return self.source.where(int(self.rows[index]))

    def open(self, index: int, *, draft: Draft = None) -> Image.Image:
        """The image, upright, in RGB. `draft` as in `open_image`."""
        return open_encoded(self.read(index), self.where(index), draft)

    def key(self, index: int) -> str:
        """SHA-256 of the encoded image: equal for copies under other names."""
        if self.digests is not None:
            return bytes(self.digests[index]).hex()
        return hashlib.sha256(self.read(index)).hexdigest()

    def subset(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ImageSet:
        """The images at these positions, in this order."""
        at = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            rows=self.rows[at],
            targets=self.targets[torch.from_numpy(at)],
            digests=None if self.digests is None else self.digests[at],
        )


def unreadable_size(size: int) -> str | None:
    """Why a file of so many bytes is no image, or None if it may be one."""
    if size == 0:
        return "the file is empty (0 bytes)"
    return f"{size / 2**20:.0f} MiB, more than {MAX_BYTES // 2**20}" if size > MAX_BYTES else None


def open_encoded(data: bytes, where: str, draft: Draft = None) -> Image.Image:
    """The image of encoded bytes; errors call it by its address."""
    if not data:
        raise ImageError(f"{where}: the file is empty (0 bytes).")
    try:
        return open_image(data, draft=draft)
    except ImageError as error:
        raise ImageError(f"{where}: {str(error).removeprefix('image: ')}") from None
