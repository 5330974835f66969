"""Files are written whole or not at all, and errors say whose they are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest
from conftest import random_task

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskFileError
from memoro.files import keep_copy, left_behind, open_whole, part_of, write_gradually
from memoro.serve.store import open_store
from memoro.tasks.taskfile import expand_task_arguments


def fail(writer: AbstractContextManager[BinaryIO], text: bytes, error: BaseException) -> None:
    """Writes some of a file."""
    with writer as file:
        file.write(text)
        raise error


WRITERS: list[Callable[[Path], AbstractContextManager[BinaryIO]]] = [open_whole, write_gradually]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    "error",
    [ConnectionError("the hub went away"), FileNotFoundError(errno.ENOENT, "No such file", "elsewhere/image.png")],
)
def test_errors_of_what_is_written_are_not_taken_for_errors_of_the_file(
    write: Callable[[Path], AbstractContextManager[BinaryIO]], error: OSError, tmp_path: Path
) -> None:
    with pytest.raises(type(error)) as found, write(tmp_path / "out.bin"):
        raise error
    assert found.value is error
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_an_error_of_the_file(
    write: Callable[[Path], AbstractContextManager[BinaryIO]], tmp_path: Path
) -> None:
    (tmp_path / "out.bin").write_bytes(b"old")
    full = OSError(errno.ENOSPC, "No space left on device")
    expected = r"cannot write .*out\.bin \(No space left on device\)"
    with pytest.raises(TaskFileError, match=expected), write(tmp_path / "out.bin"):
        raise full
    assert (tmp_path / "out.bin").read_bytes() == b"old"
    (tmp_path / "file").touch()
    with pytest.raises(TaskFileError, match="cannot write"), write(tmp_path / "file" / "out.bin"):
        pass


@pytest.mark.parametrize("write", WRITERS)
def test_two_that_write_one_file_never_mix(
    write: Callable[[Path], AbstractContextManager[BinaryIO]], tmp_path: Path
) -> None:
    """And one that fails takes nothing from the other."""
    path = tmp_path / "out.bin"
    with write(path) as first, write(path) as second:
        for file, text in ((first, b"one"), (second, b"two"), (first, b"one")):
            file.write(text)
            file.flush()
        with pytest.raises(TaskFileError, match="any existing file is unchanged"):
            fail(write(path), b"three", OSError(errno.ENOSPC, "No space left on device"))
        assert not path.exists()
    assert path.read_bytes() == b"oneone"  # the last one to finish
    assert [file.name for file in tmp_path.iterdir()] == ["out.bin"]


def test_what_was_written_before_an_interruption_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with pytest.raises(KeyboardInterrupt):
        fail(write_gradually(path), b"", KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        fail(write_gradually(path), b"so far", KeyboardInterrupt())
    assert [file.name for file in tmp_path.iterdir()] == ["out.csv.part"]
    assert part_of(path).read_bytes() == b"so far"


@pytest.mark.parametrize("links", [True, False])
def test_a_kept_copy_is_never_replaced(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by another process that keeps one at the same moment: nobody asks first whether the name is free."""
    file, names = tmp_path / "pets.safetensors", [f"pets.safetensors.{number}" for number in (1, 2, 3)]
    if not links:
        monkeypatch.setattr(os, "link", lambda *given: os.open("/no/links/here", os.O_RDONLY))
    monkeypatch.setattr(Path, "exists", lambda self: False)
    for number, name in enumerate(names):
        file.unlink(missing_ok=True)
        file.write_text(str(number))
        assert keep_copy(file) == tmp_path / name
    assert [(tmp_path / name).read_text() for name in names] == ["0", "1", "2"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_replaced(backbone: Backbone, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskFileError, match="is not a regular file, so it is not replaced"):
        memoro.save_task(random_task(backbone, "pets"), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_server_removes_only_what_it_left_itself(backbone: Backbone, tmp_path: Path) -> None:
    memoro.save_task(random_task(backbone, "pets"), tmp_path / "pets.safetensors")
    theirs, ours = tmp_path / ".download.part", tmp_path / f".pets.safetensors.{'0f' * 16}.part"
    for file in (theirs, ours):
        file.write_text("")
        os.utime(file, (0, 0))
    assert left_behind(tmp_path) == left_behind(tmp_path / "pets.safetensors") == [ours]
    assert left_behind(tmp_path / "pet.safetensors") == []
    open_store([tmp_path], lambda _: backbone)
    assert theirs.exists()
    assert not ours.exists()


def test_a_folder_stands_for_all_of_its_tasks(backbone: Backbone, tmp_path: Path) -> None:
    """Also if one of them has the name that a file has on the hub."""
    for name in ("pets", "task"):
        memoro.save_task(random_task(backbone, name), tmp_path / f"{name}.safetensors")
    assert [path.stem for _, path, _ in expand_task_arguments([str(tmp_path)])] == ["pets", "task"]
