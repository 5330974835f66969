"""The examples run as they are."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_the_minimal_version_runs() -> None:
    """It asserts by itself that nothing changes when tasks are put together; here it is trained briefly."""
    results = runpy.run_path(str(EXAMPLES / "minimal.py"))["main"](steps=60)
    assert len(results) == 5
    assert results["backbone, 0 to 4"] > 0.3  # five classes


def test_the_minimal_version_is_short_and_needs_nothing_else() -> None:
    text = (EXAMPLES / "minimal.py").read_text()
    assert len(text.splitlines()) < 200
    imports = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports == {"__future__", "torch", "sklearn"}


def test_notebooks_are_stored_without_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        document = json.loads(path.read_text())
        assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
        assert path.stat().st_size < 20_000
        for cell in document["cells"]:
            assert cell["cell_type"] in {"code", "markdown"}
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """All code cells, in order, in a new process: they use no feature of Jupyter, so none is needed."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    file = tmp_path / f"{path.stem}.py"
    file.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    env = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
