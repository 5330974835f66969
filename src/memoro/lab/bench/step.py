"""One training step of each candidate, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from memoro.backbones import load_backbone
from memoro.data import Splits, load_data
from memoro.lab.baselines import BASELINES, REGIMES, BaselinePlan
from memoro.lab.bench.models import CLASSES, MODELS
from memoro.training.cached import Cache
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions, find_recipe
from memoro.training.run import Run

Step = Callable[[], object]
RANK = 8
"""The rank of `side`, and of LoRA."""


@dataclass(frozen=True)
class Setting:
    """What all candidates of one benchmark have in common."""

    model: str
    """A key of `MODELS`."""
    batch: int
    cells: int = 5

    @property
    def side(self) -> int:
        """Edge of the images in pixels."""
        return MODELS[self.model][1]


@dataclass(frozen=True)
class Candidate:
    """A method to time. `regime` is a regime's name, or `base` for a plain pass without gradients."""

    name: str
    regime: str
    runs: int = 1
    fork: int = 0
    cached: bool = False


def list_candidates(
    cells: int, runs: Sequence[int], forks: Sequence[int], *, baselines: bool = True
) -> list[Candidate]:
    """The base pass, `head`, `memory` and `side` for all numbers of runs and forks, computed and from the cache, and
    baselines."""
    found = [Candidate("base", "base"), Candidate("head", "head")]
    for cached in (False, True):
        for regime, title in (("memory", f"memory, {cells} cells"), ("side", f"side, rank {RANK}")):
            for fork in forks:
                for count in runs:
                    name = title + (f", fork {fork}" if fork else "")
                    name += (f", {count} runs" if count > 1 else "") + (", from cache" if cached else "")
                    found.append(Candidate(name, regime, count, fork, cached))
    return [*found, *(Candidate(name, name) for name in BASELINES if baselines)]


def build_step(setting: Setting, candidate: Candidate, folder: Path) -> tuple[Step, int]:
    """A function that takes one step of the training loop on a batch that is always the same, and how many parameters
    a run trains. Images and features are stored in `folder`; decoding is not part of the step."""
    torch.manual_seed(0)
    build, side = MODELS[setting.model]
    model = build().eval()
    if candidate.regime == "base":
        pixels = torch.randn(setting.batch, 3, side, side)
        return torch.no_grad()(lambda: model(pixels)), 0
    backbone, regime = load_backbone(model), REGIMES[candidate.regime]
    splits = _random_images(folder / "images", setting)
    cells, rank = (0, RANK) if candidate.regime == "side" else (setting.cells, None)
    plan = BaselinePlan("bench", splits.labels, cells=cells, rank=rank, from_layer=candidate.fork)
    own = find_recipe(None, regime)[1]
    recipe = replace(own, steps=1_000_000, batch_size=setting.batch, views=1)
    tasks = [regime.build(backbone, replace(plan, seed=seed)) for seed in range(candidate.runs)]
    runs = [Run(task, recipe, regime, splits, backbone.preprocessing.at(side)) for task in tasks]
    cache = Cache(folder / "features") if candidate.cached else None
    trainer = Trainer(backbone, runs, TrainOptions(workers=0, quiet=True), cache=cache)
    trainer.fill_cache()
    [group] = trainer.groups
    batches = group.next_batches()
    return lambda: trainer.step([(group, batches)]), sum(one.numel() for one in group.runs[0].trained.values())


def _random_images(folder: Path, setting: Setting) -> Splits:
    """At least as many images as a batch has, with every label."""
    generator = np.random.default_rng(0)
    for number in range(CLASSES * -(-setting.batch // CLASSES)):
        path = folder / str(number % CLASSES) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (setting.side, setting.side, 3), dtype=np.uint8)).save(path)
    return load_data(folder, val_fraction=0, screen=False, quiet=True)
