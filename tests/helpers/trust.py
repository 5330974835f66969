"""What the tests of calibration, familiarity and read-outs share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import CASES
from PIL import Image
from random_tasks import random_task
from torch import Tensor
from typer.testing import CliRunner

from memoro.backbones import Backbone
from memoro.cli import app
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Familiarity, Others, fit_familiarity
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task


def draw(count: int, dim: int, classes: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Tokens of some classes, which differ in their means and share an uneven covariance."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    targets = torch.arange(count) % classes
    noise = torch.randn(count, dim, generator=generator) * torch.linspace(2.0, 0.1, dim)
    return means[targets] + noise + shift, targets


def spread(tokens: Tensor, layers: int = 4, statistics: int = 3) -> Tensor:
    """Statistics (n, layers, statistics, dim): these tokens enter the last layer; all else is made from them."""
    dim, generator = tokens.shape[1], torch.Generator().manual_seed(7)
    turns = torch.randn(layers, statistics, dim, dim, generator=generator) / dim**0.5
    pooled = torch.einsum("nd,lsde->nlse", tokens, turns)
    pooled[:, -2, 0] = tokens
    return pooled


def photographs(dim: int, count: int = 200, *, layers: int = 4) -> Others:
    """What is known of images that have nothing to do with those of `draw`."""
    tokens = 4 * torch.randn(count, dim, generator=torch.Generator().manual_seed(5))
    return Others.of(spread(tokens, layers))


def fit(tokens: Tensor, classes: Tensor | None, others: Others | None = None) -> Familiarity | None:
    layers = 4 if others is None else len(others.mean)
    return fit_familiarity(spread(tokens, layers), classes, others)


def add_readout(backbone: Backbone, task: Task, *, seed: int = 0, from_layer: int = 1, share: float = 0.5) -> Task:
    """The task with a random read-out."""
    reads, generator = ReadOut(from_layer, backbone.anatomy.statistics, share), torch.Generator().manual_seed(seed)
    features, labels = reads.features(backbone.dim, backbone.depth), len(task.labels)
    weight = torch.randn(labels, features, generator=generator) / features**0.5
    task.attach_readout(reads, weight, torch.randn(labels, generator=generator))
    return task


@pytest.fixture
def known(backbone: Backbone) -> Task:
    """A task with both sections."""
    task = random_task(backbone, "pets")
    familiarity = fit(*draw(150, backbone.dim, 3, seed=0), photographs(backbone.dim))
    assert familiarity is not None
    task.update_spec(calibration=Calibration((1.7,), (), (), 90, "4 folds"), familiarity=familiarity)
    return task


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of noise around a colour, brighter or darker, with a validation split."""
    generator, root = np.random.default_rng(0), tmp_path_factory.mktemp("colours")
    for name, base in (("own", 60), ("other", 200)):
        for split, count in (("train", 20), ("val", 12), ("test", 10)):
            for label, tint in (("red", (40, 0, 0)), ("blue", (0, 0, 40))):
                folder = root / name / split / label
                folder.mkdir(parents=True)
                for number in range(count):
                    noise = generator.integers(-15, 15, (20, 20, 3))
                    Image.fromarray((base + np.array(tint) + noise).astype(np.uint8)).save(folder / f"{number}.png")
    CASES[0].model().save_pretrained(root / "vit")
    return root


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout
