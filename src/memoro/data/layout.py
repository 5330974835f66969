"""The layout of a tree of files: which folder is a class, which a split, which files to leave alone."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from memoro.data.listing import ROLES, Role, left_out
from memoro.errors import DataError
from memoro.images import IMAGE_SUFFIXES

_CLUTTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin"})


@dataclass(frozen=True)
class Layout:
    """For each split the (position of the file, class) of its images."""

    parts: dict[Role, list[tuple[int, str]]]
    notes: tuple[str, ...]


def is_clutter(path: str) -> bool:
    """Whether a file system or an archiver left it behind: hidden files, resource forks, thumbnails."""
    return any(part.startswith(".") or part.lower() in _CLUTTER for part in path.split("/"))


def arrange(files: Sequence[str], folders: Iterable[str], name: str) -> Layout:
    """The classes and splits of files given as relative paths with forward slashes.

    Class folders may stand at the top, or below `train`, `val` and `test` (in their usual spellings), and all of it
    below one more folder, as archives have it. Images deeper inside a class folder belong to the class.
    """
    clean = [at for at, path in enumerate(files) if not is_clutter(path)]
    pieces = {at: files[at].split("/") for at in clean if _is_image(files[at])}
    if not pieces:
        raise DataError(
            f"{name}: there are no images in it ({', '.join(sorted(IMAGE_SUFFIXES))}); "
            "give a folder that holds one folder of images per class."
        )
    top = _depth_of_wrapping(list(pieces.values()))
    pieces = {at: parts[top:] for at, parts in pieces.items()}
    notes = []

    by_split = _has_splits(list(pieces.values()))
    need = 3 if by_split else 2
    loose = sorted(at for at, parts in pieces.items() if len(parts) < need)
    if len(loose) == len(pieces):
        raise DataError(
            f"{name}: {len(loose)} images, but no class folders: put the images of each class into a folder of "
            "its own, or write a CSV with the columns path and label."
        )
    if loose:
        outside = left_out(len(loose), "image", " outside any class folder")
        notes.append(f"{outside}, such as {files[loose[0]]}.")
    parts: dict[Role, list[tuple[int, str]]] = {}
    strays: Counter[str] = Counter()
    for at, path in pieces.items():
        if len(path) < need:
            continue
        role = ROLES.get(path[0].lower()) if by_split else "train"
        if role is None:
            strays[path[0]] += 1
            continue
        parts.setdefault(role, []).append((at, label_of(path[1 if by_split else 0])))
    for folder, count in sorted(strays.items()):
        notes.append(
            f"the folder {folder} stands beside train and test and is neither: its {left_out(count, 'image')}."
        )
    notes += _empty_folders(folders, top, by_split, parts)
    others = Counter(PurePosixPath(files[at]).suffix.lower() or "no suffix" for at in clean if not _is_image(files[at]))
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))
        notes.append(f"files that are no images by their name were left out: {kinds}.")
    return Layout(parts, tuple(notes))


def label_of(folder: str) -> str:
    """A folder's name as a label, in one Unicode spelling: macOS writes é as two characters, others as one."""
    return unicodedata.normalize("NFC", folder.encode("utf-8", "surrogateescape").decode("utf-8", "replace")).strip()


def _is_image(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in IMAGE_SUFFIXES


def _depth_of_wrapping(paths: list[list[str]]) -> int:
    """How many folders all images share above the classes or splits."""
    depth = 0
    while (
        all(len(path) > depth + 2 for path in paths)
        and len({path[depth] for path in paths}) == 1
        and paths[0][depth].lower() not in ROLES
    ):
        depth += 1
    return depth


def _has_splits(paths: list[list[str]]) -> bool:
    """Whether the top folders are splits. A class may be called train, as trains are."""
    tops: dict[str, bool] = {}
    for path in paths:
        if len(path) > 1:
            tops[path[0].lower()] = tops.get(path[0].lower(), False) or len(path) > 2
    roles = {ROLES[top] for top, deep in tops.items() if top in ROLES and deep}
    return bool(roles) and (all(top in ROLES for top in tops) or ("train" in roles and len(roles) > 1))


def _empty_folders(
    folders: Iterable[str], top: int, by_split: bool, parts: dict[Role, list[tuple[int, str]]]
) -> list[str]:
    """A note for each class folder without images."""
    full = {(role, label) for role, rows in parts.items() for _, label in rows}
    empty = []
    for folder in sorted(set(folders)):
        path = folder.rstrip("/").split("/")[top:]
        if is_clutter(folder) or len(path) != (2 if by_split else 1) or not path[0]:
            continue
        role = ROLES.get(path[0].lower()) if by_split else "train"
        if role is not None and (role, label_of(path[-1])) not in full:
            empty.append("/".join(path))
    return [f"the class folder {path} is empty: it was left out." for path in empty]
