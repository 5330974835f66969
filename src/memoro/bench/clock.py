"""Timing several candidates side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping


def best_times(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    *,
    seconds: float = math.inf,
) -> dict[str, float]:
    """The fastest run of each candidate in seconds: the one that other programs disturbed least.

    All candidates run once in each round, so that drift affects them alike; an extra first round warms up. `tick` is
    called after every timed run. After this many seconds, no further round begins, but there is at least one.
    """
    end = time.perf_counter() + seconds
    best = dict.fromkeys(candidates, math.inf)
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() > end:
            break
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
                tick()
    return best
