"""Timing several candidates side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


def best_times(
    candidates: Mapping[str, Callable[[], object]], rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The fastest run of each candidate in seconds: the one that other programs disturbed least.

    All candidates run once in each round, so that drift affects them alike; an extra first round warms up. `tick` is
    called after every timed run.
    """
    best = dict.fromkeys(candidates, math.inf)
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
                tick()
    return best
