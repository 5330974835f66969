"""Training and measuring baselines, through the contract that any regime has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memoro.backbones import Backbone
from memoro.console import bar
from memoro.data import Loader
from memoro.errors import TrainingError
from memoro.evaluation.evaluate import load_test_images
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import measure_task
from memoro.lab.baselines.baseline import Baseline, BaselinePlan
from memoro.lab.baselines.methods import BASELINES
from memoro.training import TrainResult, fit, train


def train_baseline(data: Any, method: str, *, width: int = 5, checkpointing: bool = False, **settings: Any) -> Any:
    """`memoro.train` with a baseline instead of a task. `width` is that of an adapter's bottleneck; with
    `checkpointing`, methods that train a copy of the backbone compute activations twice instead of keeping them."""
    if method not in BASELINES:
        raise TrainingError(f"unknown method {method!r}: choose one of {', '.join(BASELINES)}.")
    baseline = BASELINES[method]
    sizes: dict[str, Any] = {"width": width, "checkpointing": checkpointing}
    regime = replace(
        baseline.regime,
        make=lambda backbone, plan: baseline.make(backbone, BaselinePlan(**vars(plan), **sizes)),
    )
    return train(data, regime=regime, **settings)


def fit_baseline(backbone: Backbone, model: Baseline, data: Any, **changes: Any) -> TrainResult:
    """`memoro.fit` for a baseline."""
    return fit(backbone, model, data, regime=BASELINES[model.regime].regime, **changes)


def evaluate_baseline(
    model: Baseline, data: Any, *, batch_size: int = 32, workers: int | None = None, quiet: bool = True, **reading: Any
) -> dict[str, Any]:
    """The metrics on the test split of its data, or on all of it if there is none. `reading` is as in `load_data`."""
    splits, images, split, unknown = load_test_images(data, model, workers=workers, quiet=quiet, **reading)
    preprocessing = model.spec.preprocessing or model.backbone.preprocessing
    loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
    with bar(f"evaluating on {images.name}", len(images), quiet=quiet) as tick:
        [logits], targets = collect_logits(lambda pixels: [model(pixels)], model.backbone, loader, tick=tick)
    counted = {"unknown_classes": unknown} if unknown else {}
    skipped = {"skipped": len(splits.skipped)} if splits.skipped else {}
    return {"split": split, **measure_task(model, logits, targets), **counted, **skipped}
