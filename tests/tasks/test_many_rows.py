"""Read-outs and calibrations of many images: memory does not grow with what nobody needs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memoro.tasks import calibration, ridge
from memoro.tasks.calibration import fit_calibration
from memoro.tasks.readout import solve_readout
from memoro.tasks.ridge import RidgeSystem
from memoro.tasks.spec import ReadOut

LIMIT = 8 << 30


def rows_of(index: Tensor, classes: int, features: int) -> Tensor:
    """Statistics of images of one class after the other: the same in every call, without any of them in memory."""
    middles = torch.randn(classes, features, generator=torch.Generator().manual_seed(1))
    noise = ((index[:, None] * 7919 + torch.arange(features) * 104729) % 2003).float() / 2003 - 0.5
    return middles[index % classes] + 3.0 * noise


def solve(count: int, classes: int, features: int) -> float:
    """The accuracy of a read-out on new images."""
    targets = torch.arange(count) % classes
    system = RidgeSystem(count, lambda index: rows_of(index, classes, features))
    solved = solve_readout("softmax", ReadOut(0, 3, 1.0), lambda weights: system, targets, classes)
    assert len(solved.held_out) == len(solved.answered) <= count
    left_out = (solved.held_out.argmax(dim=1) == targets[solved.answered]).double().mean()
    right = 0
    for block in torch.split(torch.arange(count, count + count // 20), 1024):
        answers = rows_of(block, classes, features) @ solved.weight.T + solved.bias
        right += int((answers.argmax(dim=1) == block % classes).sum())
    accuracy = right / (count // 20)
    assert abs(float(left_out) - accuracy) < 0.02
    assert fit_calibration("softmax", solved.held_out, targets[solved.answered], "left out") is not None
    return accuracy


def test_answers_of_some_images_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    count, classes, features = 600, 7, 24
    targets, found = torch.arange(count) % classes, []
    groups = torch.arange(count) // 2
    for most in (count * classes, 100 * classes):
        monkeypatch.setattr(ridge, "MOST_ANSWERS", most)
        system = RidgeSystem(count, lambda index: rows_of(index, classes, features))
        found.append(
            solve_readout(
                "softmax", ReadOut(0, 3, 1.0), lambda weights, own=system: own, targets, classes, groups=groups
            )  # type: ignore[misc]
        )
    whole, some = found
    assert (len(whole.answered), len(some.answered), len(some.held_out)) == (count, 100, 100)
    assert some.answered[[0, -1]].tolist() == [0, count - 1]
    # The temperature is fitted on fewer answers.
    assert torch.allclose(some.held_out, whole.held_out[some.answered], rtol=0.2, atol=0.2)
    assert torch.equal(some.held_out.argmax(dim=1), whole.held_out[some.answered].argmax(dim=1))


@pytest.mark.parametrize("kind", ["softmax", "multilabel", "regression"])
def test_a_calibration_of_some_answers_is_about_that_of_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 5, generator=generator)
    drawn = torch.rand(20_000, 5, generator=generator)
    targets = {
        "softmax": (2 * logits).softmax(1).multinomial(1, generator=generator)[:, 0],
        "multilabel": (drawn < (2 * logits).sigmoid()).float(),
        "regression": logits + drawn,
    }[kind]
    whole = fit_calibration(kind, logits, targets, "all")  # type: ignore[arg-type]
    monkeypatch.setattr(calibration, "MOST_FITTED", 20_000)
    some = fit_calibration(kind, logits, targets, "all")  # type: ignore[arg-type]
    assert whole is not None
    assert some is not None
    assert some.images == whole.images == 20_000
    for name, width in (("temperature", {"softmax": 1, "multilabel": 5}.get(kind, 0)), ("spread", 0)):
        values = getattr(whole, name)
        assert len(values) >= width
        assert getattr(some, name) == pytest.approx(values, rel=0.15)
    if kind == "softmax":
        assert whole.temperature[0] == pytest.approx(0.5, rel=0.05)
    assert some != whole


@pytest.mark.slow
def test_a_million_images_of_a_thousand_classes_fit_into_8_gigabytes() -> None:
    """In a process of its own, whose largest size is measured."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_many_rows; test_many_rows.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    accuracy, size = map(float, done.stdout.split())
    assert accuracy > 0.5
    assert size < LIMIT


def main() -> None:
    accuracy = solve(1_000_000, 1000, 288)
    sys.stdout.write(f"{accuracy} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}")
