"""Ridge regression in closed form: its answers to images left out are those of solutions without them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from memoro.tasks import ridge
from memoro.tasks.ridge import PENALTIES, Ridge, RidgeSystem

IMAGES, FEATURES, OUTPUTS = 23, 31, 3


@dataclass
class Problem:
    """Features (n, features), what the outputs should be (n, outputs), weights (n) and groups (n)."""

    features: Tensor
    aims: Tensor
    weights: Tensor
    groups: Tensor | None = None
    reads: int = 0
    """Rows that were asked for."""

    def read(self, index: Tensor) -> Tensor:
        self.reads += len(index)
        return self.features[index]

    def solve(self, loss: Any = None) -> Ridge:
        def squares(answers: Tensor, index: Tensor) -> float:
            wrong = (answers.double() - self.aims[index].double()).square().sum(dim=1)
            return float((self.weights[index] * wrong).sum())

        system = RidgeSystem(len(self.features), self.read, self.weights)
        return system.solve(lambda index: self.aims[index], loss or squares, self.groups)

    def refit(self, penalty: float, without: Tensor) -> Tensor:
        """The answers (n, outputs) of a solution by the normal equations, in which some images have no weight.

        Standardisation, and the penalty's unit, are those of all images.
        """
        rows = self.features.double()
        std = rows.std(dim=0, correction=0)
        varying = std > 1e-6 * std.max()
        rows = ((rows - rows.mean(dim=0)) / std)[:, varying] / len(varying) ** 0.5
        weights = self.weights.double().clone()
        weights[without] = 0
        middle = weights @ rows / weights.sum()
        level = weights @ self.aims.double() / weights.sum()
        own = rows - middle
        square = own.T @ (weights[:, None] * own) + penalty * torch.eye(rows.shape[1], dtype=torch.double)
        found = torch.linalg.solve(square, own.T @ (weights[:, None] * (self.aims.double() - level)))
        return own @ found + level

    def left_out(self, penalty: float) -> Tensor:
        """The answer to each image by brute force."""
        answers = []
        for at in range(len(self.features)):
            gone = torch.tensor([at]) if self.groups is None else (self.groups == self.groups[at]).nonzero().flatten()
            answers.append(self.refit(penalty, gone)[at])
        return torch.stack(answers)


@pytest.fixture
def problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(IMAGES, FEATURES, generator=generator, dtype=torch.double) * torch.linspace(0.1, 9, FEATURES)
    true = torch.randn(FEATURES, OUTPUTS, generator=generator, dtype=torch.double) / features.std(dim=0)[:, None]
    noise = torch.randn(IMAGES, OUTPUTS, generator=generator, dtype=torch.double)
    return Problem(features + 5, features @ true + noise, torch.ones(IMAGES))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 where float32 is enough otherwise, so that a formula is judged and not its rounding."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


WEIGHTS = torch.rand(IMAGES, generator=torch.Generator().manual_seed(1)) + 0.2


def some_without_weight() -> Tensor:
    weights = WEIGHTS.clone()
    weights[[2, 11, 17]] = 0
    return weights


CASES: dict[str, dict[str, Any]] = {
    "alike": {},
    "weighted": {"weights": WEIGHTS},
    "some without weight": {"weights": some_without_weight()},
    "groups": {"groups": torch.tensor([7, 1, 1, 2, 9, 2, 2, *range(20, 36)])},
    "weighted groups": {"weights": some_without_weight(), "groups": torch.arange(IMAGES) // 3},
    "two groups": {"groups": torch.arange(IMAGES) % 2},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_to_images_left_out_are_those_of_refits(problem: Problem, exact: None, case: str) -> None:
    problem = replace(problem, **CASES[case])
    found = problem.solve()
    expected = problem.left_out(found.penalty)
    assert (found.held_out - expected).abs().max() < 1e-8
    assert (found.held_out - problem.refit(found.penalty, torch.tensor([], dtype=torch.long))).abs().max() > 1e-2
    other = PENALTIES[(PENALTIES.index(found.penalty) + 3) % len(PENALTIES)]
    assert (found.held_out - problem.left_out(other)).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_the_solution_of_all_images(problem: Problem, exact: None, case: str) -> None:
    problem = replace(problem, **CASES[case])
    found = problem.solve()
    answers = problem.features @ found.weight.T + found.bias
    assert (answers - problem.refit(found.penalty, torch.tensor([], dtype=torch.long))).abs().max() < 1e-8
    assert torch.allclose(found.mean, problem.features.mean(dim=0))
    if case == "some without weight":
        plain = replace(problem, weights=torch.ones(IMAGES)).solve(lambda answers, index: 0.0)
        assert (found.weight - plain.weight).abs().max() > 1e-3


def nth_is_best(number: int) -> Any:
    """A loss that chooses this penalty."""
    tried = itertools.count()
    return lambda answers, index: abs(next(tried) - number)


def test_the_penalty_has_the_smallest_loss(problem: Problem) -> None:
    wanted = PENALTIES[4]
    seen: list[float] = []

    def third_is_best(answers: Tensor, index: Tensor) -> float:
        assert torch.equal(index, torch.arange(IMAGES))
        seen.append(float(answers.abs().sum()))
        return abs(len(seen) - 1 - PENALTIES.index(wanted))

    assert problem.solve(third_is_best).penalty == wanted
    assert len(set(seen)) == len(PENALTIES), "each penalty has answers of its own"
    small, large = (problem.solve(nth_is_best(number)) for number in (0, len(PENALTIES) - 1))
    assert (small.penalty, large.penalty) == (PENALTIES[0], PENALTIES[-1])
    assert large.weight.norm() < small.weight.norm()


def test_constant_features_change_nothing(problem: Problem) -> None:
    """Neither do those that are constant up to rounding."""
    constant = torch.tensor([0.0, 3.0, -1e4], dtype=torch.double).repeat(IMAGES, 1)
    constant[:, 1] += 1e-9 * torch.arange(IMAGES)
    wide = replace(problem, features=torch.cat([constant[:, :1], problem.features, constant[:, 1:]], dim=1))
    found = wide.solve()
    assert not found.weight[:, [0, -2, -1]].any()
    assert found.weight[:, 1:-2].all()
    assert (found.held_out - wide.left_out(found.penalty)).abs().max() < 1e-3  # float32
    nothing = replace(problem, features=torch.full((IMAGES, 4), 2.5)).solve()
    assert not nothing.weight.any()
    assert torch.allclose(nothing.bias.double(), problem.aims.mean(dim=0), atol=1e-5)


def test_a_single_image_and_copies_of_one_have_a_solution(problem: Problem) -> None:
    for count in (1, 2):
        few = Problem(problem.features[:1].repeat(count, 1), problem.aims[:1].repeat(count, 1), torch.ones(count))
        found = few.solve()
        assert torch.isfinite(found.held_out).all()
        assert torch.allclose(
            (few.features @ found.weight.T.double() + found.bias).float(), few.aims.float(), atol=1e-4
        )


def test_rows_that_are_not_kept_are_computed_again(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(problem, weights=WEIGHTS, groups=torch.arange(IMAGES) // 2)
    kept, reads = problem.solve(), problem.reads
    monkeypatch.setattr(ridge, "MOST_KEPT", 0)
    monkeypatch.setattr(ridge, "BLOCK", 5)
    again = replace(problem, reads=0)
    found = again.solve()
    assert again.reads > 5 * reads
    assert found.penalty == kept.penalty
    assert torch.allclose(found.held_out, kept.held_out, atol=1e-5)  # sums of other blocks
    assert torch.allclose(found.weight, kept.weight, atol=1e-5)


def test_penalties_are_judged_by_some_of_many_images(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridge, "MOST_JUDGED", 7 * OUTPUTS)
    problem.groups = torch.arange(IMAGES) // 4  # some of a group are judged, others are not
    judged: list[Tensor] = []

    def loss(answers: Tensor, index: Tensor) -> float:
        judged.append(index)
        return float((answers - problem.aims[index]).square().sum())

    found = problem.solve(loss)
    assert {len(index) for index in judged} == {7}
    assert found.held_out.shape == (IMAGES, OUTPUTS)
    assert (found.held_out - problem.left_out(found.penalty)).abs().max() < 1e-2  # float32; the rest are answered too


# ----------------------------------------------------------------------------------------------------- many images


def many(count: int, features: int = 60, rank: int = 12) -> Problem:
    """Features that vary mostly in a few directions, as statistics of tokens do."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(rank, features, generator=generator)
    latent = torch.randn(count, rank, generator=generator)
    rows = latent @ spread + 0.05 * torch.randn(count, features, generator=generator)
    aims = latent[:, :OUTPUTS] + 0.3 * torch.randn(count, OUTPUTS, generator=generator)
    return Problem(rows, aims, torch.ones(count))


def test_a_projection_answers_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = many(400)
    whole = problem.solve()
    error = (whole.held_out - problem.aims).square().mean()
    monkeypatch.setattr(ridge, "MOST_DIMENSIONS", 40)
    close = problem.solve()
    assert not torch.equal(close.held_out, whole.held_out)
    assert (close.held_out - problem.aims).square().mean() < 1.1 * error
    assert (close.held_out - whole.held_out).square().mean() < 0.1 * error
    monkeypatch.setattr(ridge, "MOST_DIMENSIONS", 3)  # fewer than the directions that matter
    assert (problem.solve().held_out - problem.aims).square().mean() > 1.5 * error


def test_projected_answers_are_left_out_exactly(monkeypatch: pytest.MonkeyPatch, exact: None) -> None:
    """Of the projected problem: an image without weight is answered as one that is left out."""
    monkeypatch.setattr(ridge, "MOST_DIMENSIONS", 9)
    problem = many(60)
    problem.weights[10] = 0  # not among the images that span the projection
    assert 10 not in torch.linspace(0, 59, 9).round().long().tolist()
    gone = problem.solve()
    whole = replace(problem, weights=torch.ones(60)).solve(nth_is_best(PENALTIES.index(gone.penalty)))
    assert whole.penalty == gone.penalty
    assert (whole.held_out[10] - gone.held_out[10]).abs().max() < 1e-8
    assert (whole.held_out[11] - gone.held_out[11]).abs().max() > 1e-6


def test_memory_does_not_grow_with_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time are more rows in memory than a block, or than span the projection."""
    monkeypatch.setattr(ridge, "MOST_DIMENSIONS", 32)
    monkeypatch.setattr(ridge, "MOST_KEPT", 1000)
    monkeypatch.setattr(ridge, "BLOCK", 50)
    asked: list[int] = []
    problem = many(2000)

    def read(index: Tensor) -> Tensor:
        asked.append(len(index))
        return problem.features[index]

    sizes: list[int] = []
    real = torch.Tensor.double

    def double(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "double", double)
    found = RidgeSystem(2000, read).solve(
        lambda index: problem.aims[index], lambda answers, index: float(answers.var())
    )
    assert max(asked) == 50
    assert max(sizes) <= max(2000 * OUTPUTS, 50 * 60)
    assert found.held_out.shape == (2000, OUTPUTS)
