"""Metrics, predictions of files, and what is shown of odd names and records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_task
from PIL import Image
from test_cli_words import Shell, shell  # noqa: F401

import memoro
from memoro.backbones import Backbone
from memoro.evaluation.metrics import measure
from memoro.regimes import METHODS, TaskPlan


def test_r2_is_the_mean_over_outputs() -> None:
    """Pooled, the output with the larger values would decide alone."""
    targets = torch.tensor([[0.0, 0.0], [100.0, 1.0], [200.0, 2.0]])
    values = torch.tensor([[0.0, 2.0], [100.0, 1.0], [200.0, 0.0]])
    assert measure("regression", ["large", "small"], values, targets)["r2"] == pytest.approx((1 - 3) / 2)
    targets[:, 1] = 5.0
    found = measure("regression", ["large", "constant"], values, targets)["r2"]
    assert found == pytest.approx(1), "an output without variation is left out"


def test_the_shell_predicts_what_python_predicts(shell: Shell, backbone: Backbone, tmp_path: Path) -> None:  # noqa: F811
    task = random_task(backbone, "pets", labels=["cat", "dog"])
    baseline = METHODS["lora"].build(backbone, TaskPlan("wide", ("a", "b")))
    memoro.save_task(task, tmp_path / "pets.safetensors")
    memoro.save_baseline(baseline, tmp_path / "wide.safetensors")
    generator = np.random.default_rng(0)
    for number in range(3):  # large enough to be decoded at a fraction of its size
        image = Image.fromarray(generator.integers(0, 256, (300, 400, 3), dtype=np.uint8))
        image.save(tmp_path / f"{number}.jpg", quality=95)
    names = [f"{number}.jpg" for number in range(3)]
    files = ("-t", "pets.safetensors", "-t", "wide.safetensors")
    found = json.loads(shell("predict", *names, "-b", "vit", *files, "--json").out)
    expected = memoro.compose(backbone, [task]).predict(names)
    alone = baseline.predict(names)
    for name, one, other in zip(names, expected, alone, strict=True):
        assert found[name]["pets"] == one["pets"]
        assert found[name]["wide"] == other["wide"]
    assert len({json.dumps(answers) for answers in found.values()}) == 3
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    said = shell("predict", "bad.jpg", *names, "-b", "vit", *files, "--json")
    assert "skipped bad.jpg: not a readable image" in said.err
    assert json.loads(said.out) == found
