"""Checks: every image is decoded once, what is known of it is kept, and images that look the same are found."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from memoro.console import bar
from memoro.data.columns import first_few
from memoro.data.dataset import ImageSet, Skipped, digest_keys
from memoro.data.source import read_bytes
from memoro.data.workers import WorkerPool, shared_pool, worker_count
from memoro.engine.featurestore import LOCK, SUFFIX, default_folder
from memoro.errors import DataError, ImageError, MemoroError
from memoro.files import write_whole
from memoro.images import Levels, open_image

_CHUNK = 64
_DRAFT = 64  # JPEGs are decoded at a fraction of their size: every byte is read all the same
_STAMP = 16  # bytes of a hash of what changes with an image
FOLDER = "checked"
"""In the folder of cached features."""

Index = npt.NDArray[np.int64]


KNOWN = np.dtype(
    [("stamp", f"S{_STAMP}"), ("readable", "?"), ("digest", "u1", 32), ("look", "u1", 32), ("levels", "f8", 3)]
)
"""What is known of an image: a hash of what changes with it (empty: nothing is known that does); SHA-256 of the encoded
image; `hash_look`; of more than 8 bits, the lowest and the highest value, and whether they are floats, else NaN."""
Known = npt.NDArray[np.void]


def drop_unreadable(
    sets: Sequence[ImageSet], workers: int | None = None, *, quiet: bool = False, cache: Path | bool = True
) -> list[ImageSet]:
    """Each set without the images that cannot be decoded, which `skipped` lists, and with hashes of the others."""
    pool = shared_pool()
    checks = [_Check(images) for images in sets]
    for check in checks:
        pool.register(check)  # so that the same worker processes serve all sets
    folder = None if cache is False else default_folder() if cache is True else cache
    return [_drop_unreadable(check, pool, workers, quiet, folder) for check in checks]


def _drop_unreadable(
    check: _Check, pool: WorkerPool, workers: int | None, quiet: bool, folder: Path | None
) -> ImageSet:
    images = check.images
    skipped: dict[int, str] = {}
    with _hold(images, folder) as (file, stamps):
        known = _recall(file, stamps)
        new = np.flatnonzero(~known["readable"])
        chunks = [new[at : at + _CHUNK].tolist() for at in range(0, len(new), _CHUNK)]
        try:
            with bar(f"checking {images.name}", len(new), quiet=quiet or not len(new)) as advance:
                for chunk, (found, reasons) in pool.imap(check, chunks, worker_count(workers, len(new))):
                    known[chunk] = found
                    skipped |= {chunk[at]: reason for at, reason in reasons.items()}
                    advance(len(chunk))
        finally:
            if len(new) and file is not None:
                known["stamp"] = stamps
                _keep(file, known)
    good = np.flatnonzero(known["readable"])
    known = known[good]
    left_out = tuple(Skipped(images.where(at), reason) for at, reason in sorted(skipped.items()))
    return replace(
        images.subset(good),
        digests=np.ascontiguousarray(known["digest"]),
        looks=np.ascontiguousarray(known["look"]),
        levels=_join_levels(known["levels"]),
        skipped=left_out,
    )


def _join_levels(levels: npt.NDArray[np.float64]) -> Levels | None:
    """The levels of all images with more than 8 bits; None if there are none."""
    deep = levels[~np.isnan(levels[:, 0])]
    if not len(deep):
        return None
    return Levels(float(deep[:, 0].min()), float(deep[:, 1].max()), int(deep[:, 2].sum()), len(deep))


@dataclass(frozen=True, eq=False)
class _Check:
    """What is known of the images of a chunk; and why some of them cannot be read, by position."""

    images: ImageSet

    def __call__(self, chunk: list[int]) -> tuple[Known, dict[int, str]]:
        found, reasons = np.zeros(len(chunk), dtype=KNOWN), dict[int, str]()
        found["levels"] = np.nan
        for at, (where, picture) in enumerate(self.images.pictures(chunk)):
            levels = list[Levels]()

            def own_white(one: Levels, levels: list[Levels] = levels) -> float:
                levels.append(one)  # the data set's is known once all images have been read
                return one.white

            try:
                data = read_bytes(picture)
                image = open_image(data, draft=_DRAFT, name=where, white=own_white)
            except DataError:  # a table that names files elsewhere
                raise
            except ImageError as error:
                reasons[at] = str(error).removeprefix(f"{where}: ").rstrip(".")
                continue
            digest = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
            found[at] = b"", True, digest, hash_look(image), levels[0][:3] if levels else np.nan
        return found, reasons


# --------------------------------------------------------------------------------------------- what is known is kept


def _recall(file: Path | None, stamps: npt.NDArray[np.bytes_]) -> Known:
    """What the file knows of images with these stamps."""
    known, kept = np.zeros(len(stamps), dtype=KNOWN), _load(file)
    if len(kept):
        at = np.searchsorted(kept["stamp"], stamps).clip(max=len(kept) - 1)
        same = (kept["stamp"][at] == stamps) & (stamps != b"")
        known[same] = kept[at[same]]
    return known


def _keep(file: Path, known: Known) -> None:
    """Keeps what is known of images, beside what was kept of others."""
    kept = _load(file)
    others = kept[~np.isin(kept["stamp"], known["stamp"])][: 4 * len(known)]
    together = np.concatenate([known[known["readable"] & (known["stamp"] != b"")], others])
    together = together[np.unique(together["stamp"], return_index=True)[1]]
    table = torch.from_numpy(together.view(np.uint8).reshape(-1, KNOWN.itemsize))
    with suppress(OSError, MemoroError):
        write_whole(file, save({"images": table}))


def _load(file: Path | None) -> Known:
    with suppress(OSError, SafetensorError, KeyError):
        if file is not None and file.is_file():
            table = load_file(file)["images"]
            if table.dtype == torch.uint8 and table.shape[1:] == (KNOWN.itemsize,):
                os.utime(file)  # the cache evicts what was used longest ago
                return np.frombuffer(table.numpy().tobytes(), dtype=KNOWN)
    return np.empty(0, dtype=KNOWN)


@contextmanager
def _hold(images: ImageSet, folder: Path | None) -> Iterator[tuple[Path | None, npt.NDArray[np.bytes_]]]:
    """The file that keeps what is known of a set, if one can; and (n,) a hash of what changes with each image, empty if
    that is not known. Another process that checks the same set waits, and then finds what is known."""
    rows = images.rows.tolist()
    hashes = [b"" if one is None else _hash(one) for one in images.source.stamps(rows)] if folder is not None else []
    stamps = np.array(hashes or [b""] * len(rows), dtype=f"S{_STAMP}")
    with ExitStack() as held:
        path = None
        with suppress(OSError, NotImplementedError):  # also if another process has the lock
            if folder is not None and (stamps != b"").any():
                for place in (folder, folder / FOLDER):  # the mode is not that of parents
                    place.mkdir(mode=0o700, parents=True, exist_ok=True)
                about = [{**one, "path": os.path.abspath(str(one.get("path")))} for one in images.source.describe()]
                file = folder / FOLDER / f"{_hash(about).hex()}{SUFFIX}"
                # A worker that imports the script which started it must not wait for that.
                main = multiprocessing.current_process().name == "MainProcess"
                held.enter_context(FileLock(f"{file}{LOCK}", timeout=-1 if main else 0))
                path = file
        yield path, stamps


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=_STAMP).digest()


# --------------------------------------------------------------------------------------------------- near-duplicates

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
_SMALL = 32
"""Pixels of an edge of the small versions."""
LARGEST = 0.75
"""The largest share of a class's images in one group. A larger group shows what the class looks like (a fixed camera, a
single film), and held out as a whole it would leave nothing to learn the class from."""
_ROWS = 256


def hash_look(image: Image.Image) -> npt.NDArray[np.uint8]:
    """A difference hash of 256 bits: where a small grey version of the image becomes brighter from left to right."""
    small = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BILINEAR, reducing_gap=3)
    levels = np.asarray(small, dtype=np.int16)
    return np.packbits(levels[:, 1:] - levels[:, :-1] > _CONTRAST)


def near_duplicates(first: ImageSet, second: ImageSet) -> list[tuple[int, int, float]] | None:
    """(position in first, position in second, similarity from 0.9 to 1) of images that look the same, most alike first.

    For each image of `first`, the most similar one of `second`, and 500 at most. None if it is not known: the
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
    different classes are not: a class may differ from another by a detail only. Groups of copies alone if the images
    are too many to compare; every image is alone if they were not screened.
    """
    if images not in _groups:  # it is asked for when a split is chosen, made and described
        _groups[images] = _find_groups(images)
    return _groups[images]


def _find_groups(images: ImageSet) -> NearGroups:
    numbers = first_copies(images)
    unique = np.unique(numbers)
    classes = images.targets.numpy()[unique] if images.kind == "softmax" else np.zeros(len(unique), dtype=np.int64)
    near, alike = 0, []
    if images.looks is not None and (np.unique(classes, return_counts=True)[1].astype(float) ** 2).sum() <= MAX_PAIRS:
        for number in np.unique(classes):
            members = unique[classes == number]
            groups = find_connected(images, members)
            if groups and max(map(len, groups)) > LARGEST * len(members):
                alike.append(images.labels[number] if images.kind == "softmax" else images.name)
                continue
            for group in groups:
                near += len(group)
                numbers[np.isin(numbers, group)] = group[0]
    return NearGroups(np.unique(numbers, return_inverse=True)[1].astype(np.int64), near, tuple(alike))


def find_connected(images: ImageSet, members: Index) -> list[Index]:
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
