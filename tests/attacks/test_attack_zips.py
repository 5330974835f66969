"""Zips that name a smaller size than they unpack to."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

from image_files import members, zipped

from memoro.data import load_data
from memoro.data.open import open_source


def add_large(path: Path, name: str, method: int) -> None:
    """Adds a member that unpacks to 100 MiB, but names 5,000 bytes."""
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr(name, bytes(100 * 2**20))
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 24 : at + 28] = (5000).to_bytes(4, "little")
    path.write_bytes(data)


def test_a_member_is_never_unpacked_beyond_the_size_that_it_names(tmp_path: Path) -> None:
    """zipfile unpacks all of a member before it cuts it to that size; bzip2 and LZMA even if it is asked for less."""
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = zipped(tmp_path / "set.zip", members(*(f"{label}/{at}.png" for label in "ab" for at in range(15))))
        add_large(path, "a/large.png", method)
        tracemalloc.start()
        splits = load_data(path, val_fraction=0, workers=0)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        tracemalloc.stop()
        assert [Path(one.where).name for one in splits.skipped] == ["large.png"]
        path.unlink()


def test_a_member_without_a_suffix_is_not_unpacked_to_see_whether_it_is_an_image(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = zipped(tmp_path / "set.zip", members("a/0.png"))
        add_large(path, "a/large", method)
        source = open_source([path])
        tracemalloc.start()
        assert [Path(source.where(key)).name for key in source.keys()] == ["0.png"]  # noqa: SIM118
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
        path.unlink()
