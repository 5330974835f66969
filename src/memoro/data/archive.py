"""A zip of class folders, read in place: no member is ever written to disk."""

from __future__ import annotations

import contextlib
import os
import stat
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memoro.data.imageset import Skipped, unreadable_size
from memoro.data.layout import arrange, is_clutter
from memoro.data.listing import Listing, Part, Role
from memoro.errors import DataError, ImageError

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
