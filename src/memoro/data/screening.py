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


class Known(NamedTuple):
    """What is known of images; zeros, and NaN, of those that were not read."""

    digests: npt.NDArray[Any]
    """(n, 32) SHA-256 of the encoded image."""
    looks: npt.NDArray[Any]
    """(n, 32) see `hash_look`."""
    levels: npt.NDArray[Any]
    """(n, 3) of an image with more than 8 bits: the lowest and the highest value, and whether they are floats."""

    @classmethod
    def nothing(cls, count: int) -> Known:
        hashes = np.zeros((2, count, 32), dtype=np.uint8)
        return cls(hashes[0], hashes[1], np.full((count, 3), np.nan))

    @property
    def tables(self) -> list[npt.NDArray[Any]]:
        return [self.digests, self.looks, self.levels]

    def at(self, places: Index) -> Known:
        return Known(*(table[places] for table in self.tables))

    def join_levels(self) -> Levels | None:
        """The levels of all images with more than 8 bits; None if there are none."""
        deep = self.levels[~np.isnan(self.levels[:, 0])]
        if not len(deep):
            return None
        return Levels(float(deep[:, 0].min()), float(deep[:, 1].max()), int(deep[:, 2].sum()), len(deep))


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
    with _hold(images, folder) as memory:
        known, done = memory.read()
        new = np.flatnonzero(~done)
        chunks = [new[at : at + _CHUNK].tolist() for at in range(0, len(new), _CHUNK)]
        try:
            with bar(f"checking {images.name}", len(new), quiet=quiet or not len(new)) as advance:
                for chunk, (found, reasons) in pool.imap(check, chunks, worker_count(workers, len(new))):
                    for table, part in zip(known.tables, found.tables, strict=True):
                        table[chunk] = part
                    done[chunk] = True
                    skipped |= {chunk[at]: reason for at, reason in reasons.items()}
                    advance(len(chunk))
        finally:
            done[list(skipped)] = False
            if len(new):
                memory.write(known, done)
    good, levels = np.flatnonzero(done), known.join_levels()
    found = known.at(good)
    left_out = tuple(Skipped(images.where(at), reason) for at, reason in sorted(skipped.items()))
    return replace(images.subset(good), digests=found.digests, looks=found.looks, levels=levels, skipped=left_out)


@dataclass(frozen=True, eq=False)
class _Check:
    """What is known of the images of a chunk; and why some of them cannot be read, by position."""

    images: ImageSet

    def __call__(self, chunk: list[int]) -> tuple[Known, dict[int, str]]:
        found, reasons = Known.nothing(len(chunk)), dict[int, str]()
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
            found.digests[at] = np.frombuffer(hashlib.sha256(data).digest(), dtype=np.uint8)
            found.looks[at] = np.frombuffer(hash_look(image), dtype=np.uint8)
            if levels:
                found.levels[at] = levels[0][:3]
        return found, reasons


# --------------------------------------------------------------------------------------------- what is known is kept


@dataclass(frozen=True)
class Memory:
    """What is known of the images of a source, in a file of the cache."""

    path: Path | None
    """None: nothing is kept."""
    stamps: npt.NDArray[np.bytes_]
    """(n,) a hash of what changes with each image; empty for one of which that is not known."""

    def read(self) -> tuple[Known, npt.NDArray[np.bool_]]:
        """What is known of the images, and of which."""
        known, done = Known.nothing(len(self.stamps)), np.zeros(len(self.stamps), dtype=bool)
        stamps, kept = self._load()
        if len(stamps):
            at = np.searchsorted(stamps, self.stamps).clip(max=len(stamps) - 1)
            done = (stamps[at] == self.stamps) & (self.stamps != b"")
            for table, own in zip(known.tables, kept.tables, strict=True):
                table[done] = own[at[done]]
        return known, done

    def write(self, known: Known, done: npt.NDArray[np.bool_]) -> None:
        """Keeps what is known, beside what was kept of other images."""
        if self.path is None:
            return
        keep = np.flatnonzero(done & (self.stamps != b""))
        stamps, kept = self._load()
        others = np.flatnonzero(~np.isin(stamps, self.stamps))[: 4 * len(self.stamps)]
        together = np.concatenate([self.stamps[keep], stamps[others]])
        together, first = np.unique(together, return_index=True)
        tables = [
            np.concatenate([a, b])[first] for a, b in zip(known.at(keep).tables, kept.at(others).tables, strict=True)
        ]
        arrays = {
            "stamps": together.view(np.uint8).reshape(-1, _STAMP),
            **dict(zip(Known._fields, tables, strict=True)),
        }
        with suppress(OSError, MemoroError):
            write_whole(self.path, save({name: torch.from_numpy(array) for name, array in arrays.items()}))

    def _load(self) -> tuple[npt.NDArray[np.bytes_], Known]:
        with suppress(OSError, SafetensorError, KeyError, ValueError, TypeError):
            if self.path is not None and self.path.is_file():
                file = {name: tensor.numpy() for name, tensor in load_file(self.path).items()}
                stamps = np.ascontiguousarray(file["stamps"]).view(f"S{_STAMP}").ravel()
                kept, empty = Known(*(file[name] for name in Known._fields)), Known.nothing(len(stamps))
                if all(
                    a.shape == b.shape and a.dtype == b.dtype for a, b in zip(kept.tables, empty.tables, strict=True)
                ):
                    os.utime(self.path)  # the cache evicts what was used longest ago
                    return stamps, kept
        return np.empty(0, dtype=f"S{_STAMP}"), Known.nothing(0)


@contextmanager
def _hold(images: ImageSet, folder: Path | None) -> Iterator[Memory]:
    """The memory of a set. Another process that checks the same set waits, and then finds what is known."""
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
        yield Memory(path, stamps)


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


def hash_look(image: Image.Image) -> bytes:
    """A difference hash of 256 bits: where a small grey version of the image becomes brighter from left to right."""
    small = image.convert("L").resize((_SIDE + 1, _SIDE), Image.Resampling.BILINEAR, reducing_gap=3)
    levels = np.asarray(small, dtype=np.int16)
    return np.packbits(levels[:, 1:] - levels[:, :-1] > _CONTRAST).tobytes()


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
