"""Near-duplicates: images that look the same although their files differ (scaled, compressed again, renamed)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memoro.data.dataset import ImageSet
from memoro.errors import ImageError

_SIDE = 16
HASH_BYTES = _SIDE * _SIDE // 8
_CONTRAST = 2
"""Grey levels between neighbours that count as an edge: less is the noise of compression."""
_FLAT = 20
"""Images with fewer edges look alike without being copies."""
ALIKE = 0.9
"""Dice coefficient of the edges of two images from which they are near-duplicates. Unrelated photos
are mostly below 0.8, copies at half the size or a JPEG quality of 40 mostly above 0.9."""
SAME = 0.95
"""Correlation of the pixels of two small versions from which they are: edges alone take one chessboard for another.
Copies as above are over 0.99."""
MAX_PAIRS = 500_000_000
MAX_OPENED = 500


def hash_look(image: Image.Image) -> bytes:
    """A difference hash of 256 bits: where a small grey version of the image becomes brighter from left to right."""
    small = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BILINEAR, reducing_gap=3)
    levels = np.asarray(small, dtype=np.int16)
    return np.packbits(levels[:, 1:] - levels[:, :-1] > _CONTRAST).tobytes()


def near_duplicates(first: ImageSet, second: ImageSet) -> list[tuple[int, int, float]] | None:
    """(position in first, position in second, similarity from 0.9 to 1) of images that look the same, most alike first.

    For each image of `first`, the most similar one of `second`, and 500 at most. None where it is not known: the
    images were not screened, or there are too many pairs to compare.
    """
    if first.looks is None or second.looks is None or len(first) * len(second) > MAX_PAIRS:
        return None
    other = _bits(second.looks)
    pairs: list[tuple[int, int, float]] = []
    for start in range(0, len(first), 1024):
        own = _bits(first.looks[start : start + 1024])
        edges = own.sum(dim=1).unsqueeze(1) + other.sum(dim=1)
        alike = 2 * (own @ other.T) / edges.clamp(min=2 * _FLAT)
        best, place = alike.max(dim=1)
        found = (best >= ALIKE).nonzero().flatten().tolist()
        pairs += [(start + at, int(place[at]), float(best[at])) for at in found]
    pairs = sorted(pairs, key=lambda pair: -pair[2])[:MAX_OPENED]
    return [(a, b, alike) for a, b, alike in pairs if _correlation(first, a, second, b) >= SAME]


def _correlation(first: ImageSet, a: int, second: ImageSet, b: int) -> float:
    """Of the colours of both images at 32 x 32 pixels; 0 where one cannot be read any more."""
    try:
        images = first.open(a, draft=64), second.open(b, draft=64)
    except ImageError:
        return 0.0
    small = [image.resize((32, 32), Image.Resampling.BILINEAR, reducing_gap=3) for image in images]
    return float(np.corrcoef([np.asarray(image, dtype=np.float64).ravel() for image in small])[0, 1])


def _bits(hashes: npt.NDArray[np.uint8]) -> Tensor:
    """(n, 256) zeros and ones."""
    return torch.from_numpy(np.unpackbits(np.ascontiguousarray(hashes), axis=1)).float()
