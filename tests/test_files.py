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
from memoro.files import left_behind, open_whole, write_gradually
from memoro.serve.folder import read_task_files
from memoro.tasks.hub import expand_task_arguments

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
    read_task_files([tmp_path])
    assert theirs.exists()
    assert not ours.exists()


def test_a_folder_stands_for_all_of_its_tasks(backbone: Backbone, tmp_path: Path) -> None:
    """Also if one of them has the name that a file has on the hub."""
    for name in ("pets", "task"):
        memoro.save_task(random_task(backbone, name), tmp_path / f"{name}.safetensors")
    assert [path.stem for _, path, _ in expand_task_arguments([str(tmp_path)])] == ["pets", "task"]
