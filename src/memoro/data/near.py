"""Near-duplicates: images that look the same although their files differ (scaled, compressed again, renamed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memoro.data.annotations import first_few
from memoro.data.dataset import ImageSet, digest_keys
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
MOST_GROUPED = 100_000
"""Images all of whose pairs are compared on request."""
_SMALL = 32
"""Pixels of an edge of the small versions."""
LARGEST = 0.75
"""Of a class's images: a larger group tells what the class looks like (a fixed camera, a single film), and held out as
a whole it would leave nothing to learn the class from."""
_ROWS = 256

Index = npt.NDArray[np.int64]


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
        best, place = _compare_edges(_bits(first.looks[start : start + 1024]), other).max(dim=1)
        found = (best >= ALIKE).nonzero().flatten().tolist()
        pairs += [(start + at, int(place[at]), float(best[at])) for at in found]
    pairs = sorted(pairs, key=lambda pair: -pair[2])[:MAX_OPENED]
    ours = _small_versions(first, np.array([a for a, _, _ in pairs], dtype=np.int64))
    theirs = _small_versions(second, np.array([b for _, b, _ in pairs], dtype=np.int64))
    return [pair for pair, same in zip(pairs, (ours * theirs).sum(dim=1).tolist(), strict=True) if same >= SAME]


class NearGroups(NamedTuple):
    """Which images of a set look the same."""

    numbers: Index
    """(n,) the group of each image. Most images are alone in theirs."""
    near: int
    """Images that look like another one whose file differs."""
    alike: tuple[str, ...]
    """The classes (or the set, without classes) most of whose images look the same, so that they are not grouped."""

    @property
    def notes(self) -> list[str]:
        """What to know about splits that keep each group together."""
        found = []
        if self.near:
            count = f"{self.near:,} training images are near-duplicates of others (frames of a film, bursts, copies)"
            found.append(f"{count}: they are held out together, or not at all.")
        if self.alike:
            found.append(
                f"warning: most images of {first_few(self.alike)} look the same, so their near-duplicates are both "
                "learned from and held out. The score may be too high: test on images that were taken apart from these."
            )
        return found


_groups: WeakKeyDictionary[ImageSet, NearGroups] = WeakKeyDictionary()


def near_groups(images: ImageSet) -> NearGroups:
    """The groups of copies and of near-duplicates, so that none of them is measured with what was learned from another.

    A group is all images that are connected by pairs that look the same, so a film is one group. Near-duplicates of
    different classes are not: a class may differ from another by a detail only. Groups of copies alone where the images
    are too many to compare; every image is alone where they were not screened.
    """
    if images not in _groups:  # it is asked for when a split is chosen, made and described
        _groups[images] = _find_groups(images)
    return _groups[images]


def look_alikes(images: ImageSet) -> list[Index]:
    """The groups of two or more images that are copies or look the same, whatever their classes, the largest first;
    copies alone where the images were not screened, or are more than 100,000."""
    numbers = first_copies(images)
    unique = np.unique(numbers)
    for group in _connected(images, unique) if images.looks is not None and len(unique) <= MOST_GROUPED else []:
        numbers[np.isin(numbers, group)] = group[0]
    order = np.argsort(numbers, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
    return sorted((part for part in parts if len(part) > 1), key=len, reverse=True)


def _find_groups(images: ImageSet) -> NearGroups:
    numbers = first_copies(images)
    unique = np.unique(numbers)
    classes = images.targets.numpy()[unique] if images.kind == "softmax" else np.zeros(len(unique), dtype=np.int64)
    near, alike = 0, []
    if images.looks is not None and (np.unique(classes, return_counts=True)[1].astype(float) ** 2).sum() <= MAX_PAIRS:
        for number in np.unique(classes):
            members = unique[classes == number]
            groups = _connected(images, members)
            if groups and max(map(len, groups)) > LARGEST * len(members):
                alike.append(images.labels[number] if images.kind == "softmax" else images.name)
                continue
            for group in groups:
                near += len(group)
                numbers[np.isin(numbers, group)] = group[0]
    return NearGroups(np.unique(numbers, return_inverse=True)[1].astype(np.int64), near, tuple(alike))


def _connected(images: ImageSet, members: Index) -> list[Index]:
    """The groups of two or more among these images, each in order."""
    assert images.looks is not None
    bits = _bits(images.looks[members])
    alone = np.ones(len(members), dtype=bool)
    for start in range(0, len(members), _ROWS):
        block = np.arange(start, min(start + _ROWS, len(members)))
        edges = _compare_edges(bits[block], bits) >= ALIKE
        edges[np.arange(len(block)), block] = False
        alone[block] = ~edges.any(dim=1).numpy()
    left = np.flatnonzero(~alone)  # only these are opened
    small = _small_versions(images, members[left])
    bits = bits[left]

    def is_near(some: Index, others: Index) -> npt.NDArray[np.bool_]:
        edges = _compare_edges(bits[some], bits[others]) >= ALIKE
        both = edges & (small[some] @ small[others].T >= SAME)
        return np.asarray(both.any(dim=0).numpy())

    return [members[left[np.sort(part)]] for part in _components(len(left), is_near) if len(part) > 1]


def _components(count: int, is_near: Callable[[Index, Index], npt.NDArray[np.bool_]]) -> list[Index]:
    """The connected components of a graph; `is_near` tells which of the others are neighbours of one of some nodes."""
    found = []
    others = np.arange(count)
    while len(others):
        part, others, at = others[:1], others[1:], 0
        while at < len(part) and len(others):
            some = part[at : at + _ROWS]
            at += len(some)
            reached = is_near(some, others)
            part, others = np.concatenate([part, others[reached]]), others[~reached]
        found.append(part)
    return found


def first_copies(images: ImageSet) -> Index:
    """For every image the position of the first one with the same content."""
    if images.digests is None:
        return np.arange(len(images))
    _, first, inverse = np.unique(digest_keys(images), return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)


def _small_versions(images: ImageSet, positions: Index) -> Tensor:
    """(n, values) of the images' colours, of which a product is a correlation; zeros for one that cannot be read."""
    table = torch.zeros(len(positions), 3 * _SMALL * _SMALL)
    for row, at in enumerate(positions.tolist()):
        try:
            image = images.open(at, draft=2 * _SMALL)
        except ImageError:
            continue
        small = image.resize((_SMALL, _SMALL), Image.Resampling.BILINEAR, reducing_gap=3)
        values = torch.from_numpy(np.asarray(small, dtype=np.float32).ravel())
        table[row] = torch.nn.functional.normalize(values - values.mean(), dim=0)
    return table


def _compare_edges(first: Tensor, second: Tensor) -> Tensor:
    """(n, m) Dice coefficients of the edges of images."""
    edges = first.sum(dim=1).unsqueeze(1) + second.sum(dim=1)
    return 2 * (first @ second.T) / edges.clamp(min=2 * _FLAT)


def _bits(hashes: npt.NDArray[np.uint8]) -> Tensor:
    """(n, 256) zeros and ones."""
    return torch.from_numpy(np.unpackbits(np.ascontiguousarray(hashes), axis=1)).float()
