"""The wheel and the sdist in clean environments: the core alone, and each extra. `make dist` builds them first.

Each environment is made with pip, so this needs package indexes (or pip's cache) and several gigabytes.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [name for name in PROJECT["optional-dependencies"] if name != "dev"]
MOST_BYTES = 12_000_000
"""Of the wheel: nearly all of it are the weights of memoro-tiny."""

CORE = """
import sys, torch, memoro
from PIL import Image
Image.new("RGB", (90, 70), (200, 80, 30)).save("photo.png")
backbone = memoro.load_backbone()
memoro.save_task(memoro.new_task(backbone, "colours", ["red", "blue"], seed=0), "colours.safetensors")
task = memoro.load_task("colours.safetensors")
answer = memoro.compose(backbone, [task]).predict("photo.png")[0]["colours"]
assert answer["label"] in ("red", "blue"), answer
assert memoro.embed("photo.png").shape[0] == 1
assert len(memoro.similar("photo.png", ["photo.png"])[0]) == 1
assert "torchvision" not in sys.modules
"""
"""What works without any extra."""
USES = {
    "train": "import memoro; from memoro.training import train; import accelerate, datasets, matplotlib",
    "sklearn": "from memoro.sklearn import ImageClassifier; ImageClassifier().fit([[0.0], [1.0]] * 4, [0, 1] * 4)",
    "lora": "import peft, memoro.lab.baselines",
    "onnx": "import onnxruntime, memoro; from pathlib import Path\n"
    "task = memoro.load_task('colours.safetensors')\n"
    "memoro.compose(memoro.load_backbone(), [task]).export('model.onnx')\n"
    "assert onnxruntime.InferenceSession('model.onnx').get_inputs()",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter",
    "heif": "import pillow_heif, io; from PIL import Image; import memoro\n"
    "pillow_heif.register_heif_opener(); Image.open('photo.png').save('photo.heic')\n"
    "assert memoro.embed('photo.heic').shape[0] == 1",
    "timm": "import timm, memoro; memoro.load_backbone(timm.create_model('test_vit'))",
    "ray": "import ray, memoro.evaluation.on_ray",
    "demo": "import memoro.demo.demo, memoro.serve.server, sklearn",
    "serve": "import memoro.serve.server, fastapi, uvicorn",
    "all": "import memoro.demo.demo, peft, onnx, pillow_heif",
}
"""A few lines for each extra."""


def built(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"dist/{pattern}: {found}; run make dist"
    return found[0]


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(folder: Path, what: str) -> Path:
    """A new environment with this; returns its Python."""
    run(folder, sys.executable, "-m", "venv", "env")
    python = folder / "env" / "bin" / "python"
    run(folder, python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
    return python


def test_what_the_wheel_contains() -> None:
    wheel = built("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "memoro").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == source
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_the_core_alone(pattern: str, tmp_path: Path) -> None:
    python = install(tmp_path, str(built(pattern)))
    run(tmp_path, python, "-c", CORE)
    memoro = python.with_name("memoro")
    said = run(tmp_path, memoro, "predict", "photo.png", "-t", "colours.safetensors", "--format", "csv")
    assert "photo.png,colours," in said
    assert "memoro similar" in run(tmp_path, memoro, "--help")
    installed = run(tmp_path, python, "-m", "pip", "list", "--format", "freeze")
    assert not {"torchvision", "datasets", "accelerate", "scikit-learn"} & {
        line.partition("==")[0] for line in installed.split()
    }


def test_every_extra_has_a_use() -> None:
    assert set(USES) == set(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra(extra: str, tmp_path: Path) -> None:
    python = install(tmp_path, f"memoro[{extra}] @ file://{built('*.whl')}")
    run(tmp_path, python, "-c", CORE)
    run(tmp_path, python, "-c", USES[extra])
