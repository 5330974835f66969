"""Timing several candidates side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch


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
            start = read_clock()
            run()
            took = read_clock() - start
            if number:
                best[name] = min(best[name], took)
                tick()
    return best


def read_clock() -> float:
    """The time in seconds, once the GPU has done what it was given: its work is started, not waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()
    return time.perf_counter()
