"""One training step of each way to train, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.engine.featurestore import FeatureStore, RecordFormat
from memoro.heads import loss_sum
from memoro.regimes import METHODS, REGIMES, TaskPlan
from memoro.training.cached import keep_features
from memoro.training.recipe import Recipe
from memoro.training.run import Run, SharedPass

CLASSES = 10

Step = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """What all ways of one benchmark share."""

    model: str
    """A key of `MODELS`."""
    batch: int
    cells: int = 5

    def load(self) -> tuple[Any, Tensor, Tensor]:
        """The model with random weights, pixels and targets."""
        torch.manual_seed(0)
        build, side = MODELS[self.model]
        pixels, targets = torch.randn(self.batch, 3, side, side), torch.randint(CLASSES, (self.batch,))
        return build().eval(), pixels, targets

    @property
    def side(self) -> int:
        """Of the images, in pixels."""
        return MODELS[self.model][1]


@dataclass(frozen=True)
class Method:
    """One way to train. `regime` is a regime's name, or `base` for a plain pass without gradients."""

    name: str
    regime: str
    runs: int = 1
    fork: int = 0
    cached: bool = False


def _vit_b(patch: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=CLASSES))


def _dinov2_small() -> Any:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(hidden_size=384, num_attention_heads=6, image_size=518))


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "ViT-B/32": (partial(_vit_b, 32), 224),
    "ViT-B/16": (partial(_vit_b, 16), 224),
    "dinov2-small": (_dinov2_small, 112),
}
"""What can be measured: the model with random weights, and the image size."""


def list_ways(cells: int, runs: Sequence[int], forks: Sequence[int], *, baselines: bool = True) -> list[Method]:
    """Memory in all numbers of runs and forks, computed and read from the cache, and what users would run instead."""
    ways = [Method("base", "base"), Method("head", "head")]
    for cached in (False, True):
        for fork in forks:
            for count in runs:
                name = f"memory, {cells} cells" + (f", fork {fork}" if fork else "")
                name += (f", {count} runs" if count > 1 else "") + (", from cache" if cached else "")
                ways.append(Method(name, "memory", count, fork, cached))
    return [*ways, *(Method(name, name) for name in METHODS if baselines)]


def build_step(setting: Setting, way: Method, folder: Path) -> tuple[Step, int]:
    """A function that does one step, and how many parameters a run trains. Features are kept in `folder`."""
    model, pixels, targets = setting.load()
    if way.regime == "base":

        def base() -> None:
            with torch.no_grad():
                model(pixels)

        return base, 0
    backbone = load_backbone(model)
    regime, labels = REGIMES[way.regime], [str(number) for number in range(CLASSES)]
    tasks = [
        regime.build(backbone, TaskPlan(str(seed), labels, cells=setting.cells, from_layer=way.fork, seed=seed))
        for seed in range(way.runs)
    ]
    runs = [Run.start(task, Recipe(), regime.trains(task)) for task in tasks]
    read = _keep(backbone, pixels, way.fork, folder) if way.cached else lambda: pixels
    answer: Any = SharedPass(backbone, tasks) if regime.composes else lambda x: [task(x) for task in tasks]

    def step() -> None:
        parts = [loss_sum("softmax", logits, targets) for logits in answer(read())]
        (torch.stack(parts).sum() / len(pixels)).backward()  # type: ignore[no-untyped-call]
        for run in runs:
            torch.nn.utils.clip_grad_norm_(run.trained.values(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in runs[0].trained.values())


def _keep(backbone: Backbone, pixels: Tensor, first: int, folder: Path) -> Callable[[], Any]:
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
