"""One training step of each candidate, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.bench.models import CLASSES, MODELS
from memoro.engine.featurestore import FeatureStore, RecordFormat
from memoro.heads import loss_sum
from memoro.regimes import METHODS, REGIMES, TaskPlan
from memoro.training.cached import keep_features
from memoro.training.recipe import Recipe
from memoro.training.run import Run, SharedForward

Step = Callable[[], object]


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
    """One way to train. `regime` is a regime's name, or `base` for a plain pass without gradients."""

    name: str
    regime: str
    runs: int = 1
    fork: int = 0
    cached: bool = False


def list_candidates(
    cells: int, runs: Sequence[int], forks: Sequence[int], *, baselines: bool = True
) -> list[Candidate]:
    """The base pass, `head`, `memory` for all numbers of runs and forks, computed and from the cache, and baselines."""
    found = [Candidate("base", "base"), Candidate("head", "head")]
    for cached in (False, True):
        for fork in forks:
            for count in runs:
                name = f"memory, {cells} cells" + (f", fork {fork}" if fork else "")
                name += (f", {count} runs" if count > 1 else "") + (", from cache" if cached else "")
                found.append(Candidate(name, "memory", count, fork, cached))
    return [*found, *(Candidate(name, name) for name in METHODS if baselines)]


def build_step(setting: Setting, candidate: Candidate, folder: Path) -> tuple[Step, int]:
    """A function that takes one step, and how many parameters a run trains. Features are stored in `folder`."""
    torch.manual_seed(0)
    build, side = MODELS[setting.model]
    pixels, targets = torch.randn(setting.batch, 3, side, side), torch.randint(CLASSES, (setting.batch,))
    model = build().eval()
    if candidate.regime == "base":
        return torch.no_grad()(lambda: model(pixels)), 0
    backbone = load_backbone(model)
    regime, labels = REGIMES[candidate.regime], [str(number) for number in range(CLASSES)]
    tasks = [
        regime.build(backbone, TaskPlan(str(seed), labels, cells=setting.cells, from_layer=candidate.fork, seed=seed))
        for seed in range(candidate.runs)
    ]
    runs = [Run.start(task, Recipe(), regime.trains(task)) for task in tasks]
    read = _store_features(backbone, pixels, candidate.fork, folder) if candidate.cached else lambda: pixels
    answer: Any = SharedForward(backbone, tasks) if regime.composes else lambda x: [task(x) for task in tasks]

    def step() -> None:
        parts = [loss_sum("softmax", logits, targets) for logits in answer(read())]
        (torch.stack(parts).sum() / len(pixels)).backward()  # type: ignore[no-untyped-call]
        for run in runs:
            torch.nn.utils.clip_grad_norm_(run.trained.values(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in runs[0].trained.values())


def _store_features(backbone: Backbone, pixels: Tensor, first: int, folder: Path) -> Callable[[], Any]:
    """A function that reads the batch's features from disk, as training does."""
    features = keep_features(backbone, pixels, first)
    tokens = backbone.anatomy.embed(pixels[:1])[0].shape[1]
    layout = RecordFormat(first, backbone.depth, backbone.dim, backbone.heads, tokens, "float16")
    store = FeatureStore(folder, layout, {"bench": backbone.name})
    keys = [number.to_bytes(32, "big") for number in range(len(pixels))]
    if store.missing(keys):
        with store.writer() as writer, torch.no_grad():
            writer.add(keys, features)
    buffer = store.buffer(len(pixels), backbone.dtype)
    biases = [layer.bias for layer in features.layers]
    return lambda: store.read(keys, biases, backbone.device, buffer)
