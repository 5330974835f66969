"""The public face: names, light imports, dependencies that point one way."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import memoro

SOURCE = Path(memoro.__file__).parent


PUBLIC = [
    "Backbone", "BackboneError", "Cache", "CacheError", "Client", "Composition", "CompositionError", "DataError",
    "ImageError", "ImageIndex", "MemoroError", "Preprocessing", "Recipe", "ServeError", "Task", "TaskError",
    "TaskFileError", "TeachError", "TrainOptions", "TrainingError", "compose", "duplicates", "embed", "evaluate", "fit",
    "fit_tasks", "import_tasks", "load_backbone", "load_columns", "load_data", "load_task", "load_tasks", "new_task",
    "save_task", "save_tasks", "similar", "suspects", "teach", "train",
]  # fmt: skip


def test_public_names() -> None:
    assert memoro.__all__ == PUBLIC
    assert dir(memoro) == sorted([*PUBLIC, "__version__"])
    for name in PUBLIC:
        assert getattr(memoro, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memoro.nothing  # noqa: B018
    assert dir(memoro) == sorted([*PUBLIC, "__version__"])  # not what was imported meanwhile


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert sorted(filter(None, seen)) == PUBLIC
    for name, place in seen.items():
        assert getattr(importlib.import_module(place.rpartition(".")[0]), str(name)) is getattr(memoro, str(name))


def test_submodules_do_not_hide_functions() -> None:
    code = "import memoro.engine.composition, memoro; assert callable(memoro.compose), memoro.compose"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "from memoro.teach.session import teach; import memoro; assert memoro.teach is teach, memoro.teach"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_memoro_is_light() -> None:
    code = "import memoro, sys; print([m for m in ('torch','transformers','numpy','PIL','typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_the_core_needs_neither_torchvision_nor_training() -> None:
    code = (
        "import sys, memoro\n"
        "memoro.load_backbone, memoro.new_task, memoro.compose, memoro.save_task, memoro.import_tasks\n"
        "import memoro.cli, memoro.serve.server\n"
        "print([m for m in ('torchvision','timm','accelerate','datasets','peft','matplotlib') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


# A package imports its own level and those before it, never a later one.
LEVELS = [
    {
        "answer",
        "clock",
        "errors",
        "files",
        "heads",
        "pages",
        "console",
        "options",
        "processes",
    },
    {"images"},
    {"backbones"},
    {"tasks"},
    {"engine"},
    {"data"},
    {"regimes"},
    {"evaluation"},
    {"training"},
    {"similar", "sklearn"},
    {"serve"},
    {"teach"},
    {"demo"},
    {"cli"},
    {"lab"},  # the product never imports it; the command line loads it by name
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
OUTSIDE = {"__init__", "__main__"}


def imports_of(path: Path) -> set[str]:
    """The packages of memoro that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("memoro.")}
    return found


def test_every_package_has_a_level() -> None:
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {path.stem for path in SOURCE.glob("*.py")}
    assert there - OUTSIDE == set(LEVEL)


@pytest.mark.parametrize("package", sorted(LEVEL))
def test_dependencies_point_one_way(package: str) -> None:
    files = [SOURCE / f"{package}.py"] if (SOURCE / f"{package}.py").is_file() else (SOURCE / package).rglob("*.py")
    for path in files:
        for other in imports_of(path) - {"__version__"}:
            assert other in LEVEL, f"{path} imports memoro.{other}"
            assert LEVEL[other] <= LEVEL[package], f"{path.relative_to(SOURCE)} imports memoro.{other}"


def test_the_product_knows_nothing_of_the_laboratory() -> None:
    """The level test covers imports. Nor does it name its models, and its command line runs without it."""
    product = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "lab"]
    assert [path for path in product if "Baseline" in path.read_text()] == []
    code = (
        "import sys, memoro.training, memoro.serve.server, memoro.demo\n"
        "import typer; from memoro.cli import app; typer.main.get_command(app)\n"
        "print([m for m in sys.modules if m.startswith('memoro.lab')])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_serving_never_imports_training() -> None:
    """Neither itself nor through others: all that it imports is below training."""
    files = list((SOURCE / "serve").glob("*.py"))
    assert files
    for path in files:
        for other in imports_of(path) - {"__version__", "serve"}:
            assert LEVEL[other] < LEVEL["training"], f"{path.relative_to(SOURCE)} imports memoro.{other}"


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "def f():\n    from memoro.cli import main\n    import memoro.data.load\n    from memoro import engine"
    )
    assert imports_of(file) == {"cli", "data", "engine"}


def test_files_stay_short() -> None:
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
