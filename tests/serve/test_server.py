"""Starting a server: with single files, an empty folder or problems, without the extra, and OpenMP's setting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from serving import backbone, file_of, fill, in_folder, picture, serving

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, ServeError
from memoro.serve.store import open_store

__all__ = ["backbone"]  # fixtures


def test_single_files_cannot_be_changed(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "tasks", backbone)
    with serving(backbone, tmp_path / "tasks" / "tags.safetensors", tmp_path / "tasks" / "both.safetensors") as server:
        assert list(server.predict(picture(1))["images"][0]["answers"]) == ["tags", "pets", "breeds"]
        data = file_of(tmp_path, random_task(backbone, "new"))
        for method, target in (("PUT", "/v1/tasks/new"), ("PUT", "/v1/tasks"), ("DELETE", "/v1/tasks/tags")):
            status, _, found = server.request(method, target, data)
            assert (status, "--tasks FOLDER" in found["error"]) == (403, True)
        assert server.request("GET", "/v1/tasks")[2]["writable"] is False


def test_an_empty_folder_and_no_tasks_at_all(backbone: Backbone, tmp_path: Path) -> None:
    with serving(backbone, tmp_path / "new" / "folder") as server:
        found = server.predict(picture(1), "?base=true")["images"][0]
        assert found["answers"] == {}
        assert len(found["base"]) == 7
        assert server.request("PUT", "/v1/tasks", file_of(tmp_path, random_task(backbone, "new")))[0] == 201
    assert in_folder(tmp_path / "new" / "folder").keys() == {"new"}


def test_problems_at_the_start_are_named(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "tasks", backbone)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((tmp_path / "tasks" / "tags.safetensors").read_bytes())
    with pytest.raises(CompositionError, match=r"'tags', in .*tags.safetensors and in .*copy.safetensors: remove one"):
        open_store([tmp_path / "tasks" / "tags.safetensors", copy], lambda _: backbone)
    for places in (
        [f"{tmp_path}/tasks", f"other={tmp_path}/tasks/tags.safetensors"],
        [f"{tmp_path}/tasks/*.safetensors", f"other={tmp_path}/tasks/tags.safetensors"],
    ):
        store = open_store(places, lambda _: backbone)
        assert {"tags", "other"} < set(store.current.info), "as every -t takes them"
        assert not store.writable
    with pytest.raises(ServeError, match=r"nothing/\*.safetensors: no such file or folder\.$"):
        open_store([f"{tmp_path}/nothing/*.safetensors"], lambda _: backbone)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ServeError, match="cannot use the folder"):
        open_store([tmp_path / "file" / "inside"], lambda _: backbone)


def test_a_missing_extra_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from memoro import errors
    from memoro.cli import app

    found: Callable[..., Any] = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "fastapi" else found(name))
    done = CliRunner().invoke(app, ["serve"])
    assert isinstance(done.exception, memoro.MemoroError)
    assert re.match(r"fastapi is not installed.*pip install 'memoro\[serve\]'", str(done.exception))


@pytest.mark.parametrize("command", [["serve"], ["lab", "bench", "serve"]])
@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_waiting_threads_sleep_instead_of_spinning(command: list[str], own: str | None) -> None:
    """OpenMP reads its setting when torch is imported."""
    code = (
        "import builtins, os, sys\n"
        "from memoro.cli import main\n"
        "real = builtins.__import__\n"
        "def watch(name, *rest):\n"
        "    if name == 'torch':\n"
        "        print(os.environ.get('OMP_WAIT_POLICY'))\n"
        "        os._exit(sys.stdout.flush() or 0)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = watch\n"
        f"assert 'torch' not in sys.modules and os.environ.get('OMP_WAIT_POLICY') == {own!r}\n"
        f"sys.argv = ['memoro', *{command}]\n"
        "main()\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {} if own is None else {"OMP_WAIT_POLICY": own}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout) == (0, f"{own or 'PASSIVE'}\n"), done.stderr
