"""The public face: names, light imports, dependencies that point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import memoro

SOURCE = Path(memoro.__file__).parent


def test_public_names() -> None:
    assert set(memoro.__all__) >= {
        "Baseline", "NaiveConcatenation", "compose", "import_tasks", "load_backbone", "load_baseline", "load_task",
        "load_tasks", "new_task", "save_baseline", "save_task", "save_tasks",
    }  # fmt: skip
    for name in memoro.__all__:
        assert getattr(memoro, name).__name__ == name


def test_submodules_do_not_hide_functions() -> None:
    code = "import memoro.engine.composition, memoro; assert callable(memoro.compose), memoro.compose"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_memoro_is_light() -> None:
    code = "import memoro, sys; print([m for m in ('torch','transformers','numpy','PIL','typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_the_core_needs_neither_torchvision_nor_training() -> None:
    code = (
        "import sys, memoro\n"
        "memoro.load_backbone, memoro.new_task, memoro.compose, memoro.save_task, memoro.import_tasks\n"
        "import memoro.cli\n"
        "print([m for m in ('torchvision','timm','accelerate','datasets','peft','matplotlib') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


# Lower may not import higher.
LEVELS = [
    {"errors", "images", "preprocessing"},
    {"backbones"},
    {"lineage", "task"},
    {"record"},
    {"taskfile", "engine", "reproduction", "answers"},
    {"explain", "receipt", "composition"},
]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("memoro."):
            found.add(node.module.split(".")[1])
    return found


def test_dependencies_point_one_way() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    checked = 0
    for path in SOURCE.rglob("*.py"):
        noun = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if noun in level:
            for other in imports_of(path) & (set(level) | {"cli", "report", "bench", "demo"}):
                assert level.get(other, 99) <= level[noun], f"{path.name} imports {other}"
                checked += 1
    assert checked > 20


def test_files_stay_short() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
