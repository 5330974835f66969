"""The recipe, what training minimises and what it measures, each against a formula written out here."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memoro.errors import TrainingError
from memoro.evaluation.metrics import confusion, measure, score
from memoro.heads import HEADS
from memoro.training import Recipe
from memoro.training.recipe import find_recipe, merge_options


def rates(recipe: Recipe, total: int) -> list[float]:
    return [recipe.rate(step, total) for step in range(total)]


def test_warm_up_is_linear_then_cosine() -> None:
    found = rates(Recipe(lr=0.6), 25)
    assert found[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert found[15] == pytest.approx(0.3)  # half of the 20 steps after the warm-up
    assert found[10] == pytest.approx(0.6 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert found[24] == pytest.approx(0.6 * 0.5 * (1 + math.cos(math.pi * 19 / 20)))
    assert found[24] > 0
    assert all(a > b for a, b in pairwise(found[5:]))


def test_warm_up_can_be_left_out_or_be_longer_than_the_training() -> None:
    assert rates(Recipe(lr=1.0, warmup=0), 2) == pytest.approx([1.0, 0.5])
    assert rates(Recipe(lr=1.0, warmup=9), 3) == pytest.approx([0.1, 0.2, 0.3])
    assert rates(Recipe(lr=1.0, warmup=1), 1) == [0.5]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "adam"}, "unknown optimizer 'adam': choose one of sgd, adamw"),
    ({"epochs": 0}, "epochs 0: choose a whole number, 1 or more"),
    ({"epochs": 2.5}, "epochs 2.5: choose a whole number"),
    ({"steps": 0}, "steps 0"),
    ({"batch_size": -1}, "batch_size -1"),
    ({"accumulate": 0}, "accumulate 0"),
    ({"lr": 0.0}, "lr 0.0: choose a number above 0"),
    ({"lr": math.nan}, "lr nan"),
    ({"lr": math.inf}, "lr inf"),
    ({"label_smoothing": 1.0}, "at least 0 and below 1"),
    ({"momentum": -0.1}, "at least 0 and below 1"),
    ({"clip": -1.0}, "not -1.0 and 0.0"),
    ({"clip": math.nan}, "not nan and 0.0"),
    ({"weight_decay": -0.1}, "weight_decay must be 0 or more, not 1.0 and -0.1"),
    ({"warmup": -1}, "warmup -1: choose a whole number, 0 or more"),
    ({"seed": 1.5}, "seed 1.5: choose a whole number, 0 or more"),
    ({"memory_rate": -1.0}, "memory_rate -1.0: choose a fraction of lr, 0 or more"),
    ({"augment": "flip"}, r"augment 'flip': pass a memoro.data.Augment, such as Augment\(flip=0.5\)"),
    ({"patience": -1}, "patience -1"),
    ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, not 1.0"),
    ({"speed": 3}, "unknown training option 'speed'; the options are lr, epochs"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bad_recipe_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        merge_options(None, None, changes)


def test_a_recipe_is_changed_field_by_field() -> None:
    made, _ = merge_options(Recipe(lr=0.5, clip=2.0), None, {"lr": 0.25, "steps": 7})
    assert (made.lr, made.clip, made.steps, made.epochs) == (0.25, 2.0, 7, Recipe().epochs)


def test_optimisers_are_built_as_asked() -> None:
    weight = nn.Parameter(torch.ones(2))
    sgd = Recipe(lr=0.3, momentum=0.8, weight_decay=0.01).build_optimizer({"head.weight": weight})
    assert isinstance(sgd, torch.optim.SGD)
    [group] = sgd.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.8, 0.01)
    adamw = Recipe(optimizer="adamw", lr=0.002, weight_decay=0.1).build_optimizer({"memory": weight})
    assert isinstance(adamw, torch.optim.AdamW)
    [group] = adamw.param_groups
    assert (group["lr"], group["weight_decay"], group["params"]) == (0.002, 0.1, [weight])
    parts = {"class_token": nn.Parameter(torch.ones(2)), "memory": weight}
    assert [g["lr_scale"] for g in Recipe().build_optimizer(parts).param_groups] == [1.0, 0.03]
    assert [g["lr"] for g in Recipe(lr=0.5, memory_rate=0.2).build_optimizer(parts).param_groups] == [0.5, 0.1]
    parts = {"head.bias": weight, "lora.qkv_A": nn.Parameter(torch.ones(2))}
    assert [g["lr"] for g in Recipe(lr=0.001).build_optimizer(parts).param_groups] == [0.001, 0.001]


def test_one_of_recipe_and_regime_decides_the_other() -> None:
    for name, regime, wanted in (
        (None, None, ("joint", "adamw")),
        ("default", None, ("joint", "adamw")),
        ("paper", None, ("memory", "sgd")),
        (None, "side", ("side", "adamw")),
        (None, "readout", ("readout", "adamw")),
        (None, "memory", ("memory", "sgd")),
        ("paper", "joint", ("joint", "sgd")),
        ("default", "memory", ("memory", "adamw")),
    ):
        chosen, recipe = find_recipe(name, regime)
        assert (chosen.name, recipe.optimizer) == wanted
    recipe = find_recipe(None, None)[1]
    assert (recipe.lr, merge_options(recipe, None, {"lr": 0.01})[0].lr) == (0.001, 0.01)
    assert Recipe(epochs=np.int64(3)).to_json()["epochs"] == 3


# ------------------------------------------------------------------------------------------------------- losses


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_softmax_loss_with_smoothing_and_weights(logits: Tensor) -> None:
    targets, weights = torch.tensor([0, 2, 1, 1, 0, 2, 2]), torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    wanted = 0.0
    for row, target in zip(logits, targets.tolist(), strict=True):
        logs = row - row.exp().sum().log()
        wanted -= float(weights[target] * (0.9 * logs[target] + 0.1 * logs.mean()))
    found = HEADS["softmax"].loss_sum(logits, targets, smoothing=0.1, weights=weights)
    assert float(found) == pytest.approx(wanted, abs=1e-12)
    assert float(HEADS["softmax"].loss_sum(logits, targets)) != pytest.approx(wanted, abs=1e-2)


def test_multilabel_loss(logits: Tensor) -> None:
    targets = (logits.flip(0) > 0).float()
    weights = torch.tensor([3.0, 0.5, 1.0])
    wanted = 0.0
    for row, target in zip(logits.sigmoid(), targets.double() * 0.8 + 0.1, strict=True):
        each = -(weights.double() * target * row.log() + (1 - target) * (1 - row).log())
        wanted += float(each.mean())
    found = HEADS["multilabel"].loss_sum(logits, targets, smoothing=0.2, weights=weights)
    assert float(found) == pytest.approx(wanted, abs=1e-10)
    assert float(HEADS["multilabel"].loss_sum(logits, targets, smoothing=0.2)) != pytest.approx(wanted, abs=1e-2)


def test_regression_loss(logits: Tensor) -> None:
    targets = torch.arange(21.0).view(7, 3)
    wanted = float(((logits - targets) ** 2).sum() / 3)
    assert float(HEADS["regression"].loss_sum(logits, targets)) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["softmax", "multilabel", "regression"])
def test_losses_are_sums(kind: Any, logits: Tensor) -> None:
    targets = torch.tensor([0, 2, 1, 1, 0, 2, 2]) if kind == "softmax" else (logits > 0.3).double()
    parts = [HEADS[kind].loss_sum(logits[a:b], targets[a:b]) for a, b in ((0, 2), (2, 7), (7, 7))]
    assert float(sum(parts)) == pytest.approx(float(HEADS[kind].loss_sum(logits, targets)), abs=1e-12)
    assert float(parts[2]) == 0
    assert HEADS[kind].loss_sum(logits.bfloat16(), targets).dtype == torch.float32


def test_class_weights() -> None:
    targets = torch.tensor([0] * 6 + [1] * 3 + [3])
    weights = HEADS["softmax"].class_weights(targets, 4)
    assert weights is not None
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 0, 10 / 3])
    assert float(weights[targets].mean()) == pytest.approx(1.0)
    shown = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    many = HEADS["multilabel"].class_weights(shown, 2)
    assert many is not None
    assert many.tolist() == pytest.approx([1 / 3, 3.0, 3.0])
    assert HEADS["regression"].class_weights(shown, 1) is None


# ------------------------------------------------------------------------------------------------------- metrics


def sure_of(answers: list[int], classes: int, share: float) -> Tensor:
    """Logits whose softmax gives `share` to each answer."""
    rows = torch.full((len(answers), classes), (1 - share) / (classes - 1))
    rows[torch.arange(len(answers)), torch.tensor(answers)] = share
    return rows.log()


def test_softmax_metrics_by_hand() -> None:
    labels = ["a", "b", "c", "d", "e", "f", "g", "unseen"]
    targets = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6])
    answers = [0, 0, 0, 1, 1, 0, 2, 3, 4, 5, 0]
    found = measure("softmax", labels, sure_of(answers, 8, 0.9), targets)
    assert found["images"] == 11
    assert found["accuracy"] == pytest.approx(8 / 11)
    assert found["balanced_accuracy"] == pytest.approx((0.75 + 0.5 + 1 + 1 + 1 + 1 + 0) / 7)  # of the seen ones
    assert found["calibration_error"] == pytest.approx(0.9 - 8 / 11, abs=1e-5)
    assert list(found["worst_classes"].items()) == [("g", 0.0), ("b", 0.5), ("a", 0.75), ("c", 1.0), ("d", 1.0)]
    wrong = -math.log(0.1 / 7)
    assert found["loss"] == pytest.approx((8 * -math.log(0.9) + 3 * wrong) / 11, abs=1e-5)
    sure = measure("softmax", labels, sure_of(targets.tolist(), 8, 0.9999), targets)
    assert sure["accuracy"] == sure["balanced_accuracy"] == 1
    assert sure["calibration_error"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
def test_calibration_error_is_a_share(scale: float) -> None:
    logits = scale * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    found = measure("softmax", list("abcd"), logits, torch.arange(50) % 4)
    assert 0 <= found["calibration_error"] <= 1


def test_confusion_counts_true_by_predicted() -> None:
    matrix = confusion(sure_of([0, 1, 1, 2], 4, 0.8), torch.tensor([0, 0, 1, 3]))
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]


def test_multilabel_metrics_by_hand() -> None:
    targets = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    logits = torch.tensor([[3.0, -2, -5], [2, 1, -4], [1, 2, -3], [-1, -1, -2]])
    found = measure("multilabel", ["x", "y", "never"], logits, targets)
    assert found["label_accuracy"] == pytest.approx(11 / 12)
    assert found["exact_match"] == pytest.approx(3 / 4)
    assert found["f1"] == pytest.approx((4 / 5 + 1) / 2)
    # x: right at ranks 1 and 3; y: at ranks 1 and 2; a label that no image has says nothing.
    assert found["mean_average_precision"] == pytest.approx(((1 + 2 / 3) / 2 + 1) / 2)
    one = measure("multilabel", ["x"], logits[:, :1], targets[:, :1])
    assert one["mean_average_precision"] == pytest.approx((1 + 2 / 3) / 2)
    assert measure("multilabel", ["never"], logits[:, 2:], targets[:, 2:])["mean_average_precision"] is None


def test_regression_metrics_by_hand() -> None:
    targets = torch.tensor([[1.0], [2.0], [6.0]])
    found = measure("regression", ["size"], torch.tensor([[1.0], [4.0], [5.0]]), targets)
    assert found["mean_absolute_error"] == pytest.approx(1.0)
    assert found["r2"] == pytest.approx(1 - 5 / 14)
    assert found["loss"] == pytest.approx(5 / 3)
    assert measure("regression", ["size"], targets[:1], targets[:1])["r2"] is None


def test_scores_rank_by_the_main_figure_then_by_loss() -> None:
    assert score("softmax", {"accuracy": 0.8, "loss": 9.0}) > score("softmax", {"accuracy": 0.7, "loss": 0.1})
    assert score("softmax", {"accuracy": 0.8, "loss": 0.1}) > score("softmax", {"accuracy": 0.8, "loss": 0.2})
    assert score("regression", {"r2": -5.0, "loss": 1.0}) > score("regression", {"r2": None, "loss": 0.0})
    assert score("multilabel", {"mean_average_precision": 0.1, "accuracy": 0.0, "loss": 1.0})[0] == 0.1
