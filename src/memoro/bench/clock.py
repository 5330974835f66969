"""Timing several candidates side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping


def time_rounds(candidates: Mapping[str, Callable[[], object]], rounds: int) -> Iterator[tuple[str, float]]:
    """Yields (name, seconds) of single runs: all candidates once each round, so that drift hits them alike.

    The first round warms up and is not yielded.
    """
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                yield name, time.perf_counter() - start


def best_times(
    candidates: Mapping[str, Callable[[], object]], rounds: int, tick: Callable[[], None]
) -> dict[str, float]:
    """The fastest run of each candidate: the one that other programs disturbed least. `tick` is called at each run."""
    best = dict.fromkeys(candidates, float("inf"))
    for name, seconds in time_rounds(candidates, rounds):
        best[name] = min(best[name], seconds)
        tick()
    return best
