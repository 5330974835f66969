"""Schemathesis makes requests from the server's own OpenAPI schema: none of them may end in a 500."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import serving


def test_no_request_ends_in_a_500(folder: Path, tmp_path: Path) -> None:
    # On a copy: it follows links from the list of tasks, and detaches them.
    shutil.copytree(folder / "tasks", tmp_path / "tasks")
    with serving(tmp_path / "tasks") as url:
        run(url, tmp_path)


def run(url: str, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json",
        "--checks", "not_a_server_error,response_schema_conformance,content_type_conformance",
        "--max-examples", os.environ.get("MEMORO_EXAMPLES", "50"), "--seed", "17", "--workers", "1", "--no-color",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "/v1/predict" in found.stdout or "generated" in found.stdout, found.stdout[-2000:]
