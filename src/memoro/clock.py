"""How long things take: the phases of a training, and candidates timed side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Phases:
    """Measures the seconds of named phases. Every moment belongs to one phase, so they add up to the wall time."""

    def __init__(self, first: str = "start-up") -> None:
        self._seconds: dict[str, float] = {}
        self._current, self._since = first, time.monotonic()

    def switch(self, name: str) -> None:
        """Ends the current phase and begins, or continues, another."""
        now = time.monotonic()
        self._seconds[self._current] = self._seconds.get(self._current, 0.0) + now - self._since
        self._current, self._since = name, now

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A phase within another, which continues afterwards."""
        before = self._current
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def add(self, name: str, seconds: float) -> None:
        """Counts seconds of an earlier process."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase so far, in the order in which they first ended."""
        self.switch(self._current)
        return dict(self._seconds)


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
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()
    return time.perf_counter()
