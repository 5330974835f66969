"""Familiarity: distances and scores against dense formulas, the limit, memory and size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from trust import draw, fit

from memoro.engine.answers import Routing
from memoro.evaluation.trust import auroc, false_positives
from memoro.tasks.familiarity import (
    IN_DISTANCE,
    IN_SCORE,
    SHRINKAGE,
    Familiarity,
    FamiliarityBank,
    fit_familiarity,
)


def test_the_distance_is_that_of_a_dense_gaussian() -> None:
    tokens, targets = draw(300, 13, 3, seed=0)
    background = torch.linspace(3, 5, 13)
    found = fit_familiarity(tokens, targets, background)
    assert found is not None
    assert len(found.directions) == 13  # all of them: nothing is left for the residual
    x = tokens.double()
    means = torch.stack([x[targets == label].mean(dim=0) for label in range(3)])
    within = x - means[targets]
    basis = found.directions.double()
    covariance = basis.T @ torch.diag((within @ basis.T).square().mean(dim=0)) @ basis
    average = within.square().sum(dim=1).mean() / 13
    precision = torch.linalg.inv((1 - SHRINKAGE) * covariance + SHRINKAGE * average * torch.eye(13))
    new, _ = draw(7, 13, 3, seed=1)
    away = new.double().unsqueeze(1) - means
    dense = torch.einsum("ncd,de,nce->nc", away, precision, away).amin(dim=1) / (new - background).norm(dim=1)
    measured = FamiliarityBank([found]).measure(new)[:, 0].double()
    assert torch.allclose(measured, dense, rtol=0.04), "directions are in half precision: lengths are off by 1e-3"


def test_own_images_are_familiar_and_others_are_not() -> None:
    found = fit(*draw(400, 29, 5, seed=0))
    assert found is not None
    assert found.images == 400
    bank = FamiliarityBank([found])
    own, other = draw(500, 29, 5, seed=1)[0], draw(500, 29, 5, seed=2, shift=2.0)[0]
    shares = bank.judge(own)[1][:, 0]
    assert abs(float(shares.mean()) - 0.5) < 0.05, "shares of own images are spread evenly"
    assert 0.0 <= float((shares < 0.01).double().mean()) < 0.03
    assert float((bank.judge(other)[1] < 0.01).double().mean()) > 0.95
    assert auroc(-bank.measure(own)[:, 0], -bank.measure(other)[:, 0]) > 0.99


def test_answers_with_energy_are_more_familiar() -> None:
    tokens, targets = draw(400, 29, 5, seed=0)
    plain = fit(tokens, targets)
    assert plain is not None
    assert plain.out_of_fold is not None
    assert plain.out_of_fold.shape == (400,)
    assert torch.equal(plain.out_of_fold.sort().values, plain.distances)
    energies = 7 + 3 * torch.randn(400, generator=torch.Generator().manual_seed(0))
    found = plain.with_answers(plain.out_of_fold, energies)
    mean, spread = found.energy
    assert (mean, spread) == pytest.approx((float(energies.mean()), float(energies.std())))
    dense = (plain.out_of_fold.log() - IN_DISTANCE * (energies - mean) / spread).exp()
    assert torch.allclose(found.distances, dense.sort().values)
    assert plain.with_answers(plain.out_of_fold[:99], energies[:99]) is plain, "too few: it would be coarse"
    assert plain.with_answers(plain.out_of_fold, torch.zeros(400)) is plain, "all the same: nothing to learn from"

    new, low = draw(7, 29, 5, seed=1)[0], torch.full((7,), mean - spread)
    bank, both = FamiliarityBank([found, plain]), torch.stack([low, low], dim=1)
    distances, ignored = bank.measure(new, both), bank.measure(new)
    assert torch.allclose(distances[:, 0], ignored[:, 0] * math.exp(IN_DISTANCE))
    assert torch.equal(distances[:, 1], ignored[:, 1]), "no held-out answers: answers do not count"
    scores, shares = bank.judge(new, both)
    higher, more = bank.judge(new, both + 1000 * spread)
    assert bool((more[:, 0] > shares[:, 0]).any())
    assert bool((more[:, 0] >= shares[:, 0]).all())
    assert torch.allclose(higher[:, 0] - scores[:, 0], torch.full((7,), 1.5 * IN_SCORE / 29), atol=1e-4)
    assert torch.equal(higher[:, 1], scores[:, 1])


def test_several_tasks_are_judged_as_each_alone() -> None:
    items = [fit(*draw(count, 29, classes, seed=count)) for count, classes in ((60, 2), (25, 3), (90, 1))]
    known = [item for item in items if item is not None]
    assert [item.means.shape for item in known] == [(2, 29), (3, 24), (1, 29)]  # few images have few directions
    new = draw(11, 29, 4, seed=5)[0]
    (scores, shares), distances = FamiliarityBank(known).judge(new), FamiliarityBank(known).measure(new)
    for at, one in enumerate(known):
        alone = FamiliarityBank([one])
        assert torch.allclose(distances[:, at], alone.measure(new)[:, 0], rtol=1e-4), "summed in another order"
        # A distance that differs in its last bits may change places with one of a held-out image.
        assert torch.allclose(shares[:, at], alone.judge(new)[1][:, 0], atol=0.05)
    assert not torch.allclose(scores[:, 0], scores[:, 1], atol=0.01)


def test_a_large_task_takes_memory_for_itself_only() -> None:
    small = fit(*draw(60, 29, 2, seed=0))
    assert small is not None
    means = torch.randn(5000, len(small.directions), generator=torch.Generator().manual_seed(1)).half()
    large = Familiarity(**{**small.tensors, "means": means}, residual=small.residual, images=60)
    bank = FamiliarityBank([*[small] * 50, large])
    held = sum(tensor.numel() for tensor in vars(bank).values())
    values = sum(tensor.numel() for one in (*[small] * 50, large) for tensor in one.tensors.values())
    assert held < 4 * values
    new = draw(11, 29, 4, seed=5)[0]
    for at, one in ((0, small), (50, large)):
        assert torch.allclose(bank.measure(new)[:, at], FamiliarityBank([one]).measure(new)[:, 0], rtol=1e-4), (
            "summed in another order"
        )


def test_values_are_checked_without_copies() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [one.numel() for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
            self.largest = max(self.largest, *sizes, 0)
            return out

    small = fit(*draw(60, 29, 2, seed=0))
    assert small is not None
    means = torch.zeros(5000, len(small.directions)).half()
    large = Familiarity(**{**small.tensors, "means": means}, residual=small.residual, images=60)
    with Watch() as watch:
        assert large.valid
    assert watch.largest < means.numel() / 10


@pytest.mark.parametrize("count", [3, 100, 512])
def test_the_limit_is_where_answers_are_marked(count: int) -> None:
    found = fit(*draw(60, 5, 2, seed=0))
    assert found is not None
    own = torch.arange(1.0, count + 1)
    found = Familiarity(**{**found.tensors, "distances": own}, residual=found.residual, images=count)
    shares = {distance: float((own >= distance).sum() / count) for distance in (*own.tolist(), count + 0.5)}
    for false_alarms in (0.0, 1e-9, 0.01, 0.07, 0.5, 1 / count, 1.0):
        routing, limit = Routing(false_alarms=false_alarms), found.limit(false_alarms)
        for distance, share in shares.items():
            assert (routing.apply({"familiarity": share}) or {})["unfamiliar"] == (distance > limit), (
                false_alarms,
                distance,
            )


def test_scores_tell_whose_image_it_is() -> None:
    """Scores are log-densities of mixtures with one covariance for all: the mean of the tasks' covariances."""
    parts = [draw(400, 11, classes, seed=classes, shift=classes) for classes in (2, 5)]
    known = [found for tokens, classes in parts if (found := fit(tokens[:300], classes[:300])) is not None]
    bank = FamiliarityBank(known)
    covariances = [
        one.directions.double().T @ torch.diag(one.variances.double()) @ one.directions.double() for one in known
    ]
    pooled = torch.stack(covariances).mean(dim=0)
    for at, (tokens, _) in enumerate(parts):
        new = tokens[300:]
        scores = bank.judge(new)[0]
        assert float((scores.argmax(dim=1) == at).double().mean()) > 0.95
        dense = []
        for one in known:
            means = one.means.double() @ one.directions.double() + one.center
            normal = torch.distributions.MultivariateNormal(means, pooled)
            dense.append(normal.log_prob(new.double().unsqueeze(1)).logsumexp(dim=1) - math.log(len(means)))
        expected = (dense[0] - dense[1]) / 11
        assert torch.allclose((scores[:, 0] - scores[:, 1]).double(), expected, rtol=0.02, atol=0.02), "half precision"


def test_a_description_is_small_enough_to_ship() -> None:
    tokens, targets = draw(1000, 768, 100, seed=0)
    found = fit(tokens, targets)
    assert found is not None
    assert found.bytes <= 64 << 10
    assert found.means.shape == (100, 31)
    assert len(found.distances) == 512


def test_too_little_to_describe() -> None:
    tokens, targets = draw(19, 5, 2, seed=0)
    assert fit(tokens, targets) is None
    assert fit(torch.full((30, 5), torch.nan), None) is None
    same = fit(torch.ones(30, 5), None)
    assert same is not None
    assert all(value.isfinite().all() for value in FamiliarityBank([same]).judge(torch.zeros(2, 5)))


def test_auroc_and_false_positives() -> None:
    own, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0])
    pairs = [(a > b) + 0.5 * (a == b) for a in own.tolist() for b in other.tolist()]
    assert auroc(own, other) == pytest.approx(sum(pairs) / len(pairs))
    assert false_positives(own, other, recall=1.0) == pytest.approx(2 / 3)
