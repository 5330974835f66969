"""Familiarity: distances, strangeness and scores against dense formulas, the limit, memory and size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from trust import draw, fit, photographs, spread

from memoro.answer import Answer
from memoro.engine.answers import Routing
from memoro.evaluation.evaluate import auroc, false_positives
from memoro.tasks.familiarity import (
    PRINCIPAL,
    ROUTING,
    SHRINKAGE,
    Familiarity,
    FamiliarityBank,
    Others,
    entering_token,
    fit_familiarity,
)


def test_the_distance_is_that_of_a_dense_gaussian() -> None:
    tokens, targets = draw(300, 13, 3, seed=0)
    found = fit(tokens, targets)
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
    dense = torch.einsum("ncd,de,nce->nc", away, precision, away).amin(dim=1)
    measured = FamiliarityBank([found]).measure(new)[:, 0].double()
    assert torch.allclose(measured, dense, rtol=0.04), "directions are in half precision: lengths are off by 1e-3"


@pytest.mark.parametrize("against", [False, True], ids=["alone", "against photographs"])
def test_own_images_are_familiar_and_others_are_not(against: bool) -> None:
    found = fit(*draw(400, 29, 5, seed=0), photographs(29) if against else None)
    assert found is not None
    assert found.images == 400
    assert len(found.reader) == (4 * 3 * 29 if against else 0)
    bank = FamiliarityBank([found])
    own, other = (spread(draw(500, 29, 5, seed=seed, shift=shift)[0]) for seed, shift in ((1, 0.0), (2, 2.0)))
    shares = bank.judge(own)[1][:, 0]
    assert abs(float(shares.mean()) - 0.5) < 0.05, "shares of own images are spread evenly"
    assert 0.0 <= float((shares < 0.01).double().mean()) < 0.03
    assert float((bank.judge(other)[1] < 0.01).double().mean()) > 0.95
    assert auroc(-bank.strangeness(own)[:, 0], -bank.strangeness(other)[:, 0]) > 0.99


def test_strangeness_is_the_sum_of_two_standardised_parts() -> None:
    tokens, targets = draw(400, 29, 5, seed=0)
    plain, both = fit(tokens, targets), fit(tokens, targets, photographs(29))
    assert plain is not None
    assert both is not None
    assert float(plain.held_out.mean()) == pytest.approx(0, abs=1e-4)
    assert float(plain.held_out.std()) == pytest.approx(1, abs=1e-3)
    assert float(both.held_out.mean()) == pytest.approx(0, abs=1e-4)
    assert float(both.held_out.std()) > 1.1
    assert (both.slope, torch.equal(both.means, plain.means)) == (plain.slope, True)
    new = spread(draw(300, 29, 5, seed=1)[0])
    bank = FamiliarityBank([plain, both])
    first, second = bank.strangeness(new).T.double()
    distance = FamiliarityBank([plain]).measure(entering_token(new))[:, 0].double()
    assert torch.allclose(first, plain.slope * distance.log() + plain.offset, atol=1e-4)
    answers = new.flatten(1).double() @ both.reader.double()
    assert torch.allclose(second, both.slope * distance.log() + both.offset - answers, atol=1e-3), "float32"
    own = answers - (both.offset - plain.offset)
    assert float(own.mean()) == pytest.approx(0, abs=0.15), "in standard deviations of the answers to own images"
    assert float(own.std()) == pytest.approx(1, abs=0.15)
    scores = bank.judge(new)[0].double()
    densities = 29 * scores + ROUTING * bank.strangeness(new).double()
    assert torch.allclose(*densities.T, atol=1e-3), "float32: the layer counts in the score by the strangeness alone"
    assert not torch.allclose(*scores.T, atol=1e-3)


def test_photographs_teach_what_the_token_does_not_tell() -> None:
    """Images with tokens like a task's own, which differ in the other statistics: only the linear layer notices."""
    own, targets = draw(400, 29, 5, seed=0)
    elsewhere = spread(4 * torch.randn(300, 29, generator=torch.Generator().manual_seed(5)))
    strange = spread(4 * torch.randn(200, 29, generator=torch.Generator().manual_seed(6)))
    strange[:, -2, 0] = draw(200, 29, 5, seed=3)[0]
    plain, taught = fit(own, targets), fit(own, targets, Others.of(elsewhere))
    assert plain is not None
    assert taught is not None
    shares = FamiliarityBank([plain, taught]).judge(strange)[1]
    noticed = (shares < 0.01).double().mean(dim=0)
    assert float(noticed[0]) < 0.05
    assert float(noticed[1]) > 0.6


def test_images_after_known_changes_are_familiar() -> None:
    """Of two directions in which photographs differ, the linear layer takes the one that mild changes do not move."""
    noise = torch.Generator().manual_seed(8)
    move, apart = torch.randn(2, 4, 3, 29, generator=noise)
    move[2] = apart[2] = 0  # of the layer whose token the distance reads

    def own(count: int, seed: int) -> Tensor:
        jitter = 0.3 * torch.randn(2, count, 1, 1, 1, generator=noise)
        return spread(draw(count, 29, 5, seed)[0]) + jitter[0] * move + jitter[1] * apart

    some = spread(4 * torch.randn(400, 29, generator=noise)) + 3 * move + 3 * apart
    changes = (2 + 0.1 * torch.randn(8, 1, 1, 1, generator=noise)) * move
    found = [fit_familiarity(own(400, 0), None, Others.of(some[:300]), known) for known in (None, changes)]
    bank = FamiliarityBank([one for one in found if one is not None])
    fresh = own(300, 1)
    kinds = (fresh, fresh + 2 * move, some[300:])
    plain, changed, other = ((bank.judge(images)[1] < 0.01).double().mean(dim=0).tolist() for images in kinds)
    assert max(plain) < 0.04
    assert changed[0] > 0.6
    assert changed[1] < 0.06
    assert min(other) > 0.9


def test_photographs_are_kept_as_their_mean_and_covariance() -> None:
    rows = spread(3 + torch.randn(PRINCIPAL, 11, generator=torch.Generator().manual_seed(0)), 2)
    others = Others.of(rows)
    assert (others.mean.shape, others.directions.shape) == ((2, 3, 11), (PRINCIPAL, 2, 3, 11))
    found, flat = others.rows().flatten(1), rows.flatten(1)
    assert len(found) == 2 * PRINCIPAL
    assert torch.allclose(found.mean(dim=0), flat.mean(dim=0), atol=0.01), "half precision"
    covariances = [one.T.cov(correction=0) for one in (found, flat)]
    assert torch.allclose(*covariances, atol=0.03)
    assert float(covariances[1].abs().max()) > 1
    more = Others.of(spread(torch.randn(500, 47, generator=torch.Generator().manual_seed(1))))
    assert more.directions.shape == (PRINCIPAL, 4, 3, 47), "no more directions for more photographs"


def test_a_diverse_or_small_task_is_coarse() -> None:
    tokens, targets = draw(200, 29, 2, seed=0)
    some = 4 * torch.randn(600, 29, generator=torch.Generator().manual_seed(5))
    others = Others.of(spread(some[:300]))
    clear, alike = fit(tokens, targets, others), fit(some[300:], None, others)
    assert clear is not None
    assert alike is not None
    assert (clear.coarse, alike.coarse) == (False, True)
    assert alike.noticed < 0.2 < 0.9 < clear.noticed
    few = [fit(tokens[:count], targets[:count], others) for count in (99, 100)]
    assert [found is not None and found.coarse for found in few] == [True, False]
    assert replace(clear, noticed=0.49).coarse
    # How many are noticed, on photographs that nothing was learned from.
    fresh = spread(4 * torch.randn(500, 29, generator=torch.Generator().manual_seed(8)))
    for found, own in ((clear, draw(500, 29, 2, seed=9)[0]), (alike, 4 * torch.randn(500, 29))):
        answers = [one.flatten(1) @ found.reader.float() for one in (fresh, spread(own))]
        limit = answers[1].quantile(0.01)
        assert float((answers[0] < limit).double().mean()) == pytest.approx(found.noticed, abs=0.12)


def test_several_tasks_are_judged_as_each_alone() -> None:
    sizes = ((60, 2, photographs(29)), (25, 3, None), (90, 1, photographs(29, layers=2)))
    items = [fit(*draw(count, 29, classes, seed=count), others) for count, classes, others in sizes]
    known = [item for item in items if item is not None]
    assert [item.means.shape for item in known] == [(2, 29), (3, 24), (1, 29)]  # few images have few directions
    assert [len(item.reader) for item in known] == [4 * 3 * 29, 0, 2 * 3 * 29]
    new = spread(draw(11, 29, 4, seed=5)[0])
    bank = FamiliarityBank(known)
    assert bank.layers(3) == 4
    (scores, shares), strange = bank.judge(new), bank.strangeness(new)
    for at, one in enumerate(known):
        alone = FamiliarityBank([one])
        assert alone.layers(3) == max(2, len(one.reader) // 87)
        last = new[:, -alone.layers(3) :]  # it reads no others
        assert torch.allclose(strange[:, at], alone.strangeness(last)[:, 0], atol=1e-3), "summed in another order"
        # Strangeness that differs in its last bits may change places with that of a held-out image.
        assert torch.allclose(shares[:, at], alone.judge(last)[1][:, 0], atol=0.05)
    assert not torch.allclose(scores[:, 0], scores[:, 1], atol=0.01)
    assert not torch.allclose(strange[:, 0], strange[:, 2], atol=0.1)


def test_a_large_task_takes_memory_for_itself_only() -> None:
    small = fit(*draw(60, 29, 2, seed=0), photographs(29))
    assert small is not None
    means = torch.randn(5000, len(small.directions), generator=torch.Generator().manual_seed(1)).half()
    large = replace(small, means=means)
    bank = FamiliarityBank([*[small] * 50, large])
    held = sum(tensor.numel() for tensor in vars(bank).values() if isinstance(tensor, Tensor))
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
    means, reader = torch.zeros(5000, len(small.directions)).half(), torch.zeros(145_000).half()
    large = replace(small, means=means, reader=reader)
    with Watch() as watch:
        assert large.valid
    assert watch.largest < means.numel() / 10


@pytest.mark.parametrize("count", [3, 100, 512])
def test_the_limit_is_where_answers_are_marked(count: int) -> None:
    found = fit(*draw(60, 5, 2, seed=0))
    assert found is not None
    own = torch.arange(1.0, count + 1)
    found = replace(found, held_out=own, images=count)
    shares = {strange: float((own >= strange).sum() / count) for strange in (*own.tolist(), count + 0.5)}
    for false_alarms in (0.0, 1e-9, 0.01, 0.07, 0.5, 1 / count, 1.0):
        routing, limit = Routing(false_alarms=false_alarms), found.limit(false_alarms)
        for strange, share in shares.items():
            assert routing.apply(Answer(familiarity=share)).unfamiliar == (strange > limit), (
                false_alarms,
                strange,
            )


def test_scores_tell_whose_image_it_is() -> None:
    """Scores are log-densities of mixtures with one covariance for all, the mean of the tasks' covariances, less a
    multiple of the strangeness."""
    parts = [draw(400, 11, classes, seed=classes, shift=classes) for classes in (2, 5)]
    known = [found for tokens, classes in parts if (found := fit(tokens[:300], classes[:300])) is not None]
    bank = FamiliarityBank(known)
    covariances = [
        one.directions.double().T @ torch.diag(one.variances.double()) @ one.directions.double() for one in known
    ]
    pooled = torch.stack(covariances).mean(dim=0)
    for at, (tokens, _) in enumerate(parts):
        new = tokens[300:]
        scores = bank.judge(spread(new))[0]
        assert float((scores.argmax(dim=1) == at).double().mean()) > 0.95
        dense = []
        for one in known:
            means = one.means.double() @ one.directions.double() + one.center
            normal = torch.distributions.MultivariateNormal(means, pooled)
            dense.append(normal.log_prob(new.double().unsqueeze(1)).logsumexp(dim=1) - math.log(len(means)))
        strangeness = bank.strangeness(spread(new)).double()
        expected = (dense[0] - dense[1] - ROUTING * (strangeness[:, 0] - strangeness[:, 1])) / 11
        assert torch.allclose((scores[:, 0] - scores[:, 1]).double(), expected, rtol=0.02, atol=0.02), "half precision"


def test_a_description_is_small_enough_to_ship() -> None:
    """Of a ViT-B with 100 classes, whose upper two thirds are read."""
    tokens, targets = draw(600, 768, 100, seed=0)
    found = fit(tokens, targets, photographs(768, 40, layers=8))
    assert found is not None
    assert len(found.reader) == 8 * 3 * 768
    assert found.bytes <= 96 << 10
    assert found.means.shape == (100, 31)
    assert len(found.held_out) == 512


def test_too_little_to_describe() -> None:
    tokens, targets = draw(19, 5, 2, seed=0)
    assert fit(tokens, targets) is None
    assert fit(torch.full((30, 5), torch.nan), None) is None


def test_images_that_are_all_alike_are_described() -> None:
    for others in (None, photographs(5)):
        same = fit(torch.ones(30, 5), None, others)
        assert same is not None
        scores, shares = FamiliarityBank([same]).judge(spread(torch.stack([torch.ones(5), torch.zeros(5)])))
        assert scores.isfinite().all()
        assert shares[:, 0].tolist() == [1.0, 0.0]


def test_statistics_out_of_range_are_not_described() -> None:
    statistics = spread(draw(60, 5, 2, seed=0)[0])
    assert isinstance(fit_familiarity(statistics, None, photographs(5)), Familiarity)
    statistics[7, 0, 1, 2] = torch.inf  # not in the token
    assert fit_familiarity(statistics, None, photographs(5)) is None


def test_auroc_and_false_positives() -> None:
    own, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0])
    pairs = [(a > b) + 0.5 * (a == b) for a in own.tolist() for b in other.tolist()]
    assert auroc(own, other) == pytest.approx(sum(pairs) / len(pairs))
    assert false_positives(own, other, recall=1.0) == pytest.approx(2 / 3)
