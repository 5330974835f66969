"""`memoro serve`, started as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server")
    subprocess.run([python(), str(HERE / "make_tasks.py"), str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def url(folder: Path) -> Iterator[str]:
    with serving(folder / "tasks") as found:
        yield found


@contextmanager
def serving(tasks: Path) -> Iterator[str]:
    """The address of a server with these tasks, which must be running at the end and stop in order."""
    command = [python(), "-m", "memoro", "serve", "--tasks", str(tasks), "--port", "0", "--device", "cpu"]
    log = tasks.with_suffix(".log")
    with log.open("wb") as file:
        server = subprocess.Popen(command, stderr=file)
    try:
        while (found := re.search(r"listening on (\S+)", log.read_text())) is None:
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
        assert server.poll() is None, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    finally:
        server.terminate()
        assert server.wait(60) == 0


def python() -> str:
    """The interpreter that has memoro."""
    return os.environ.get("MEMORO_PYTHON", str(HERE.parent / ".venv" / "bin" / "python"))
