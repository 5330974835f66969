"""The layout of a tree of files: which folder is a class, which a split, which files to leave alone."""

from __future__ import annotations

import contextlib
import os
import stat
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from memoro.data.dataset import Skipped, unreadable_size
from memoro.data.listing import ROLES, Listing, Part, Role, left_out
from memoro.errors import DataError, ImageError
from memoro.images import IMAGE_SUFFIXES

_CLUTTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin"})


@dataclass(frozen=True)
class FolderTree:
    """For each split the (position of the file, class) of its images."""

    parts: dict[Role, list[tuple[int, str]]]
    notes: tuple[str, ...]


def is_clutter(path: str) -> bool:
    """Whether a file system or an archiver left it behind: hidden files, resource forks, thumbnails."""
    return any(part.startswith(".") or part.lower() in _CLUTTER for part in path.split("/"))


def arrange(files: Sequence[str], folders: Iterable[str], name: str) -> FolderTree:
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
    return FolderTree(parts, tuple(notes))


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


@dataclass(frozen=True)
class Files:
    """Images that are files, by their paths below a folder."""

    root: str
    paths: tuple[str, ...]

    def read(self, row: int) -> bytes:
        path = os.path.join(self.root, self.paths[row])
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            raise ImageError(f"{self.where(row)}: {error.strerror or error}.") from None

    def where(self, row: int) -> str:
        return os.path.join(self.root, self.paths[row])


def list_folder(folder: Path) -> Listing:
    """What the folder holds, by the names of its sub-folders."""
    files, folders, bad = _walk(folder)
    layout = arrange(files, folders, str(folder))
    source = Files(str(folder), tuple(files))
    parts: dict[Role, Part] = {}
    skipped = []
    for role, found in layout.parts.items():
        good = [(row, label) for row, label in found if row not in bad]
        parts[role] = Part(source, [row for row, _ in good], [label for _, label in good])
        skipped += [Skipped(source.where(row), bad[row]) for row, _ in found if row in bad]
    return Listing("softmax", parts, notes=layout.notes, skipped=tuple(skipped))


def _walk(root: Path) -> tuple[list[str], list[str], dict[int, str]]:
    """(files, folders) below the root in a fixed order, and the positions of files whose size rules them out."""
    files: list[str] = []
    folders: list[str] = []
    bad: dict[int, str] = {}
    seen: set[tuple[int, int]] = set()

    def visit(folder: Path, prefix: str) -> None:
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above would never end
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = prefix + entry.name
                if is_clutter(entry.name):
                    continue
                if entry.is_dir():
                    folders.append(path)
                    visit(folder / entry.name, path + "/")
                elif entry.is_file():
                    reason = unreadable_size(entry.stat().st_size)
                    if reason is not None:
                        bad[len(files)] = reason
                    files.append(path)

    try:
        visit(root, "")
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}; the folder must be readable.") from None
    return files, folders, bad


# Photos hardly shrink in a zip: one that unpacks to more than a hundred times its weight is no set of photos.
MAX_RATIO = 100
# Small archives may be as hollow as they like.
FREE_BYTES = 16 * 2**20

_ENCRYPTED = 0x1
_UTF8 = 0x800


@dataclass
class Members:
    """Images inside a zip, by their positions in its directory. Each process opens the file for itself."""

    archive: str
    positions: tuple[int, ...]
    names: tuple[str, ...]
    _open: tuple[int, zipfile.ZipFile, list[zipfile.ZipInfo]] | None = field(default=None, repr=False, compare=False)

    def read(self, row: int) -> bytes:
        try:
            # A handle that was inherited by a fork shares its file offset with the parent: never use it.
            if self._open is None or self._open[0] != os.getpid():
                archive = zipfile.ZipFile(self.archive)
                self._open = (os.getpid(), archive, archive.infolist())
            _, archive, directory = self._open
            return archive.read(directory[self.positions[row]])
        except Exception as error:  # zipfile, zlib, lzma and the file system each have their own
            raise ImageError(f"{self.where(row)}: cannot be unpacked ({error}).") from None

    def where(self, row: int) -> str:
        return f"{self.archive}/{self.names[row]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


def list_archive(path: Path) -> Listing:
    """What the zip holds, by the folders in its members' names."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable zip ({error}); make or fetch it again.") from None
    names = [_name(member) for member in members]
    _refuse_attacks(path, members, names)

    positions = [at for at, member in enumerate(members) if not names[at].endswith("/")]
    folders = {name[:-1] for name in names if name.endswith("/")}
    layout = arrange([names[at] for at in positions], folders, str(path))
    source = Members(str(path), tuple(positions), tuple(names[at] for at in positions))
    parts: dict[Role, Part] = {}
    skipped = []
    for role, found in layout.parts.items():
        good = []
        for row, label in sorted(found, key=lambda pair: source.names[pair[0]]):
            reason = unreadable_size(members[positions[row]].file_size)
            if reason is None:
                good.append((row, label))
            else:
                skipped.append(Skipped(source.where(row), reason))
        parts[role] = Part(source, [row for row, _ in good], [label for _, label in good])
    return Listing("softmax", parts, notes=layout.notes, skipped=tuple(skipped))


def _name(member: zipfile.ZipInfo) -> str:
    """The member's path with forward slashes; older archivers write UTF-8 without saying so, or backslashes."""
    name = member.filename
    if not member.flag_bits & _UTF8:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/")


def _refuse_attacks(path: Path, members: list[zipfile.ZipInfo], names: list[str]) -> None:
    """An error for an archive that was built to harm: such a file is not worth picking images from."""
    for member, name in zip(members, names, strict=True):
        if name.startswith("/") or name[1:2] == ":" or ".." in name.split("/"):
            raise DataError(
                f"{path}: the member {name!r} leaves the folder; such a zip is not to be trusted, pack it anew."
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{path}: the member {name!r} is a symbolic link; pack the files themselves.")
        if member.flag_bits & _ENCRYPTED and not is_clutter(name):
            raise DataError(f"{path}: the member {name!r} is encrypted; pack it without a password.")
    weight, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > FREE_BYTES and unpacked > MAX_RATIO * weight:
        raise DataError(
            f"{path}: {weight:,} bytes would unpack to {unpacked:,}, over {MAX_RATIO} times as much: a zip bomb. "
            "If it is none, unpack it and give the folder."
        )
