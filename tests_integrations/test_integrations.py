"""docs/integrations.md, block by block, with the libraries themselves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import ROOT, Block, blocks_of
from PIL import Image

import memoro

BLOCKS = blocks_of((ROOT / "docs" / "integrations.md").read_text(), "integrations.md")


def block_with(word: str) -> Block:
    [found] = [block for block in BLOCKS if word in block.code]
    return found


def follow(block: Block, folder: Path) -> str:
    """What a block of Python prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", block.code],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return {**os.environ, **quiet, "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for label, level in (("cat", 80), ("dog", 255)):
        folder = tmp_path / "photos" / "pets" / label
        folder.mkdir(parents=True)
        for number in range(16):
            pixels = rng.integers(0, level, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def test_every_block_is_followed_here_or_with_the_others() -> None:
    words = ("datasets.Dataset", "cleanlab", "--track", "lightning", "faiss")
    assert [block.where for block in BLOCKS] == [block_with(word).where for word in words]
    assert [block.reason is None for block in BLOCKS] == [True, False, False, False, False]


def test_datasets(photos: Path) -> None:
    backbone = memoro.load_backbone()
    memoro.save_task(memoro.new_task(backbone, "pets", ["cat", "dog"], seed=0), photos / "pets.safetensors")
    (photos / "new").mkdir()
    for name in ("photo.jpg", "new/0.jpg"):
        Image.open(photos / "photos" / "pets" / "cat" / "0.png").save(photos / name)
    printed = follow(block_with("datasets.Dataset"), photos)
    assert printed.strip() in ("['cat', 'cat']", "['dog', 'dog']", "Column(['cat', 'cat'])", "Column(['dog', 'dog'])")


def test_cleanlab_finds_the_wrong_label(tmp_path: Path) -> None:
    assert follow(block_with("cleanlab"), tmp_path).strip() == "[7]"


def test_lightning_trains_a_task(tmp_path: Path) -> None:
    follow(block_with("lightning"), tmp_path)
    trained, new = memoro.load_task(tmp_path / "noise.safetensors"), memoro.load_backbone()
    start = memoro.new_task(new, "noise", ["quiet", "loud"], from_layer=8, seed=0)
    for name, tensor in start.state_dict().items():
        assert not trained.state_dict()[name].equal(tensor), name  # every parameter was trained
    arrays = np.random.default_rng(0).integers(0, 256, (16, 112, 112, 3), dtype=np.uint8)
    arrays[::2] //= 4
    found = [row["noise"]["label"] for row in memoro.compose(new, trained).predict(list(arrays))]
    assert found == ["quiet", "loud"] * 8


def test_faiss_finds_what_the_index_finds(tmp_path: Path) -> None:
    first = follow(block_with("faiss"), tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (30, 48, 48, 3), dtype=np.uint8)
    index = memoro.ImageIndex.build(list(images))
    expected = [index.names.index(match.image) for match in index.search(images[4], top=3)[0]]
    assert [int(word) for word in first.strip("[] \n").split()] == expected
    assert expected[0] == 4


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_trackers_without_a_network(tracker: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = [line for line in block_with("--track").code.splitlines() if f"--track {tracker}" in line]
    words = shlex.split(line)
    start = words.index("memoro")
    variables = dict(word.split("=") for word in words[:start])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    more = {"epochs": "2", "seeds": "2"}
    command = [sys.executable, "-m", *words[start:], *(word for name in more for word in (f"--{name}", more[name]))]
    done = subprocess.run(command, cwd=photos, env=environment(photos), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = [json.loads(text) for text in (photos / "runs" / tracker / "metrics.jsonl").read_text().splitlines()]
    assert entries
    if tracker == "wandb":
        runs = list(photos.glob("**/wandb/offline-run-*/run-*.wandb"))
        assert len(runs) == 1
        assert b"loss" in runs[0].read_bytes()
        return
    import mlflow

    mlflow.set_tracking_uri(str(photos / "mlruns"))
    client = mlflow.MlflowClient()
    runs = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]
    assert len(runs) == 1
    assert any("loss" in name for name in runs[0].data.metrics)
