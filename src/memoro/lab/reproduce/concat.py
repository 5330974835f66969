"""Section 4.4: models trained apart, put together without masks and with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from memoro.data import Loader, Splits
from memoro.engine.composition import compose
from memoro.evaluation.logits import collect_logits
from memoro.lab.baselines.naive import NaiveConcatenation
from memoro.lab.reproduce.measure import (
    Bench,
    Budget,
    compare_answers,
    describe_splits,
    select_rates,
    summarise_answers,
    train_seeds,
)
from memoro.lab.reproduce.methods import Method

Rates = dict[str, dict[str, float]]
"""Learning rates by set and method."""


def measure_concat(
    bench: Bench, sets: Sequence[Splits], methods: Sequence[Method], budget: Budget, seed: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Test accuracy of each set's model alone, then with those of the other sets beside it, one after the other.

    `methods` are the unmasked and the masked one. `known` holds rates that were chosen before, by set and method.
    """
    rates: Rates = {}
    curves: dict[str, Any] = {}
    trained: dict[str, dict[str, Any]] = {method.name: {} for method in methods}
    for splits in sets:
        own = budget.on_set(splits.name)
        for method in methods:
            lr = known.get(splits.name, {}).get(method.name)
            if lr is None:
                chosen = select_rates(bench, splits, [method], own)[method.name]
                lr, curves[f"{splits.name}, {method.name}"] = chosen.lr, chosen.to_json()["curve"]
            rates.setdefault(splits.name, {})[method.name] = lr
            [result] = train_seeds(bench, splits, [(method, lr)], own, seeds=[seed])[method.name]
            trained[method.name][splits.name] = result.task
    unmasked, masked = (trained[method.name] for method in methods)
    answers: dict[str, Any] = {"rates": rates, "curves": curves, "sets": {}}
    for splits in sets:
        others = [one.name for one in sets if one is not splits]
        order = [splits.name, *others]
        naive = [NaiveConcatenation([unmasked[name] for name in order[:count]]) for count in range(1, len(order) + 1)]
        composed = [
            compose(bench.backbone, [masked[name] for name in order[:count]]) for count in range(1, len(order) + 1)
        ]
        answer = _answer_all([*naive, *composed], splits.name)
        logits, targets = _test_logits(bench, splits, answer, budget.batch_size)
        right = [compare_answers(one, targets) for one in logits]
        alone = logits[len(naive)]
        answers["sets"][splits.name] = {
            "order": order,
            "naive": summarise_answers(right[: len(naive)]),
            "masked": summarise_answers(right[len(naive) :]),
            "largest_change": max(float((one - alone).abs().max()) for one in logits[len(naive) :]),
            **describe_splits(splits),
        }
    return answers


def _answer_all(models: Sequence[Callable[[Tensor], Any]], name: str) -> Callable[[Tensor], list[Tensor]]:
    return lambda pixels: [model(pixels)[name] for model in models]


def _test_logits(
    bench: Bench, splits: Splits, answer: Callable[[Tensor], list[Tensor]], batch_size: int
) -> tuple[Sequence[Tensor], Tensor]:
    assert splits.test is not None
    loader = Loader(splits.test, bench.preprocessing, batch_size=batch_size, workers=bench.options.workers)
    return collect_logits(answer, bench.backbone, loader)
