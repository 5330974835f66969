"""Folders and zip archives: which folder is a class, which one a split, and which files to ignore."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from memoro.data.columns import SPLIT_NAMES, RawDataset, RawSplit, first_few, left_out
from memoro.data.dataset import ClassFolder, Skipped, SplitName
from memoro.data.source import Key, Source, stamp_file, unreadable_size
from memoro.errors import DataError, ImageError
from memoro.images import Picture
from memoro.images.finding import HEAD_BYTES, IMAGE_SUFFIXES, is_clutter, is_image, read_head

# Photos hardly shrink in a zip: one that unpacks to more than a hundred times its size is no set of photos.
MAX_RATIO = 100
# Below this, any ratio is harmless.
MAX_UNCHECKED_BYTES = 16 * 2**20

_ENCRYPTED = 0x1
_UTF8 = 0x800


@dataclass
class Tree(Source):
    """Files below a folder, or inside a zip. Keys are positions among them."""

    place: str
    names: tuple[str, ...]
    """Paths of the files, with forward slashes."""
    folders: tuple[str, ...]
    bad: dict[int, str]
    """Why some files cannot be images, by key."""

    def keys(self) -> Iterator[Key]:
        return (key for key, name in enumerate(self.names) if not is_clutter(name) and self.shows(key))

    def shows(self, key: int) -> bool:
        """Whether a file is an image, by its suffix or its first bytes."""
        return is_image(self.names[key], lambda: b"" if key in self.bad else self._head(key))

    def where(self, key: Any) -> str:
        return os.path.join(self.place, self.names[key])

    def _head(self, key: int) -> bytes:
        """The first bytes of a file; nothing of one that cannot be read."""
        raise NotImplementedError


def read_tree(tree: Tree, class_folder: ClassFolder = "outer") -> RawDataset:
    """The classes and splits of a tree of files, by the names of the folders, and notes on what was left out.

    Class folders may be at the top, or below `train`, `val` and `test` (in their usual spellings), and all of it
    below further folders, as archives have it. Images deeper inside a class folder belong to the class. With the inner
    `class_folder`, the classes are one level below those folders.
    """
    files, name = tree.names, tree.place
    clean = [at for at, path in enumerate(files) if not is_clutter(path)]
    paths = {at: files[at].split("/") for at in clean if tree.shows(at)}
    if not paths:
        raise DataError(
            f"{name} contains no images ({', '.join(sorted(IMAGE_SUFFIXES))}); "
            "give a folder that contains one folder of images per class."
        )
    top = _common_depth(list(paths.values()))
    paths = {at: path[top:] for at, path in paths.items()}
    by_split = _has_splits(paths.values())
    need = 3 if by_split else 2
    sites = _sites(paths.values(), need)

    def below(path: list[str]) -> list[str]:
        return path if class_folder == "outer" else [*path[: need - 2], *path[need - 1 :]]

    paths = {at: below(path) for at, path in paths.items()}

    def place(path: list[str]) -> tuple[SplitName | None, str]:
        return (SPLIT_NAMES.get(path[0].lower()), _label(path[1])) if by_split else ("train", _label(path[0]))

    loose = [at for at, path in paths.items() if len(path) < need]
    if len(loose) == len(paths):
        raise DataError(
            f"{name}: {len(loose)} images, but no class folders: put the images of each class into a folder of "
            "its own, or write a CSV with the columns path and label."
        )
    notes = []
    if class_folder == "outer" and sites:
        outer, inner = map(first_few, sites)
        notes.append(
            f"warning: the folders {outer} were read as classes, but contain folders of the same names ({inner}), as "
            "places or cameras do. If those are the classes, use `class_folder=inner`, or give one of these folders."
        )
    elif min(map(len, paths.values())) > need:
        deeper = sorted({"/".join(path[:need]) for path in paths.values()})
        notes.append(
            f"warning: no class folder contains images itself, only further folders ({first_few(deeper)}). If those "
            f"are the classes, give the folder above them instead of {name}, or use `class_folder=inner`."
        )
    if loose:
        notes.append(f"{left_out(len(loose), 'image', ' outside any class folder')}, such as {files[loose[0]]}.")
    pairs: dict[SplitName, list[tuple[int, str]]] = {}
    others: Counter[str] = Counter()
    spellings: dict[str, set[str]] = {}
    for at, path in paths.items():
        if len(path) < need:
            continue
        split, label = place(path)
        if split is None:
            others[path[0]] += 1
        else:
            pairs.setdefault(split, []).append((at, label))
            spellings.setdefault(label, set()).add(unicodedata.normalize("NFC", path[need - 2]))
    for folder, count in sorted(others.items()):
        notes.append(f"unknown split folder {folder}: its {left_out(count, 'image')}; use train, val and test.")
    for label, names in sorted(spellings.items()):
        if len(names) > 1:
            same = " and ".join(map(repr, sorted(names)))
            notes.append(f"the folders {same} were read as one class, {label}: if they are not, rename them.")
    filled = {(split, label) for split, some in pairs.items() for _, label in some}
    for folder in sorted(set(tree.folders)):
        path = below(folder.split("/")[top:])
        if len(path) == need - 1 and not is_clutter(folder) and place(path)[0] and place(path) not in filled:
            notes.append(f"the class folder {'/'.join(path)} is empty: it was left out.")
    kinds = Counter(PurePosixPath(files[at]).suffix.lower() or "no suffix" for at in clean if at not in paths)
    if kinds:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in kinds.most_common(5))
        notes.append(f"files that are not images were left out: {counts}.")
    splits, skipped = {}, []
    for split, some in pairs.items():
        good = [(at, label) for at, label in some if at not in tree.bad]
        splits[split] = RawSplit(tree, [at for at, _ in good], [label for _, label in good])
        skipped += [Skipped(tree.where(at), tree.bad[at]) for at, _ in some if at in tree.bad]
    return RawDataset("softmax", splits, notes=tuple(notes), skipped=tuple(skipped))


def _sites(paths: Iterable[list[str]], need: int) -> tuple[list[str], list[str]] | None:
    """The outer folders and those inside them, if most inner names occur in several of the outer ones."""
    places: dict[str, set[str]] = {}
    for path in paths:
        if len(path) <= need:
            return None
        places.setdefault(path[need - 1], set()).add(path[need - 2])
    shared = [inner for inner, outer in places.items() if len(outer) > 1]
    outer = sorted(set().union(*places.values()))
    return (outer, sorted(places)) if len(shared) > 1 and 2 * len(shared) >= len(places) else None


def _label(folder: str) -> str:
    """A folder's name as a label, in one Unicode form: macOS writes é as two characters, others as one."""
    return unicodedata.normalize("NFC", folder.encode("utf-8", "surrogateescape").decode("utf-8", "replace")).strip()


def _common_depth(paths: list[list[str]]) -> int:
    """How many folders all images have in common above the classes or splits."""
    depth = 0
    while (
        all(len(path) > depth + 2 for path in paths)
        and len({path[depth] for path in paths}) == 1
        and paths[0][depth].lower() not in SPLIT_NAMES
    ):
        depth += 1
    return depth


def _has_splits(paths: Iterable[list[str]]) -> bool:
    """Whether the top folders are splits. A class may also be called train, as in buses and trains."""
    tops: dict[str, bool] = {}
    for path in paths:
        if len(path) > 1:
            tops[path[0].lower()] = tops.get(path[0].lower(), False) or len(path) > 2
    splits = {SPLIT_NAMES[top] for top, deep in tops.items() if top in SPLIT_NAMES and deep}
    return bool(splits) and (all(top in SPLIT_NAMES for top in tops) or ("train" in splits and len(splits) > 1))


class Folder(Tree):
    def _encoded(self, content: Any, name: str) -> Picture:
        return name

    def _head(self, key: int) -> bytes:
        return read_head(self.where(key))

    def describe(self) -> list[dict[str, Any]]:
        return [{"path": self.place}]

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        return (stamp_file(self.where(key)) for key in keys)


def open_folder(folder: Path) -> Folder:
    """All files below a folder."""
    files: list[str] = []
    folders: list[str] = []
    bad: dict[int, str] = {}

    def visit(path: Path, prefix: str, above: frozenset[tuple[int, int]] = frozenset()) -> None:
        status = path.stat()
        own = (status.st_dev, status.st_ino)
        if own in above:  # a link to a folder above would never end
            return
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if is_clutter(entry.name):
                    continue
                try:
                    is_folder, size = entry.is_dir(), entry.stat().st_size
                    reason = unreadable_size(size) if entry.is_file() else "not a file"
                except OSError as error:  # a link to nowhere, or to itself
                    is_folder, reason = False, error.strerror or str(error)
                if is_folder:
                    folders.append(prefix + entry.name)
                    visit(path / entry.name, f"{prefix}{entry.name}/", above | {own})
                    continue
                if reason is not None:
                    bad[len(files)] = reason
                files.append(prefix + entry.name)

    try:
        visit(folder, "")
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; the folder must be readable.") from None
    return Folder(str(folder), tuple(files), tuple(folders), bad)


@dataclass
class Zip(Tree):
    """Files inside a zip, sorted by name. Each process opens the archive for itself."""

    positions: tuple[int, ...]
    """In the archive's directory."""
    _open: tuple[int, zipfile.ZipFile] | None = field(default=None, repr=False, compare=False)

    def _encoded(self, content: Any, name: str) -> Picture:
        if content in self.bad:
            raise ImageError(f"{name}: {self.bad[content]}.")
        return self._unpack(content)

    def _head(self, key: int) -> bytes:
        with contextlib.suppress(ImageError):
            return self._unpack(key, HEAD_BYTES)
        return b""

    def _unpack(self, key: int, most: int = -1) -> bytes:
        try:
            # A handle that was inherited by a fork shares its file offset with the parent: never use it.
            if self._open is None or self._open[0] != os.getpid():
                self._open = (os.getpid(), zipfile.ZipFile(self.place))
            archive = self._open[1]
            info = archive.infolist()[self.positions[key]]
            with archive.open(info) as member:
                # Never more than the size that was checked: without a limit, all that is packed would be unpacked.
                return member.read(info.file_size if most < 0 else min(most, info.file_size))
        except Exception as error:  # zipfile, zlib, lzma and the file system each have their own
            raise ImageError(f"{self.where(key)}: cannot be unpacked ({error}).") from None

    def describe(self) -> list[dict[str, Any]]:
        names = hashlib.sha256("\0".join(self.names).encode(errors="surrogateescape")).hexdigest()
        return [{"path": self.place, "bytes": os.path.getsize(self.place), "names": names}]

    def stamps(self, keys: Sequence[Any]) -> Iterator[tuple[Any, ...] | None]:
        whole = stamp_file(self.place)
        return (None if whole is None else (*whole, key) for key in keys)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


def open_archive(path: Path) -> Zip:
    """All files of a zip."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable zip ({error}); create or download it again.") from None
    names = [_member_name(member) for member in members]
    _refuse_attacks(path, members, names)
    folders = tuple(name[:-1] for name in names if name.endswith("/"))
    positions = sorted((at for at, name in enumerate(names) if not name.endswith("/")), key=lambda at: names[at])
    files = tuple(names[at] for at in positions)
    bad: dict[int, str] = {}
    for key, member in enumerate(members[at] for at in positions):
        reason = unreadable_size(member.file_size)
        if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:  # others unpack all that is packed
            reason = "packed by another method than deflate"
        if reason is not None:
            bad[key] = reason
    return Zip(str(path), files, folders, bad, tuple(positions))


def _member_name(member: zipfile.ZipInfo) -> str:
    """The member's path with forward slashes; older archivers write UTF-8 without saying so, or backslashes."""
    name = member.filename
    if not member.flag_bits & _UTF8:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/")


def _refuse_attacks(path: Path, members: list[zipfile.ZipInfo], names: list[str]) -> None:
    """An error for an archive that was built to do harm."""
    for member, name in zip(members, names, strict=True):
        if name.startswith("/") or name[1:2] == ":" or ".." in name.split("/"):
            raise DataError(f"{path}: the member {name!r} leaves the folder; do not trust this zip, create it again.")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{path}: the member {name!r} is a symbolic link; pack the files themselves.")
        if member.flag_bits & _ENCRYPTED and not is_clutter(name):
            raise DataError(f"{path}: the member {name!r} is encrypted; pack it without a password.")
    packed, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > MAX_UNCHECKED_BYTES and unpacked > MAX_RATIO * packed:
        raise DataError(
            f"{path}: {packed:,} bytes would unpack to {unpacked:,}, over {MAX_RATIO} times as much: a zip bomb. "
            "If you trust it, unpack it and give the folder."
        )
