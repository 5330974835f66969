"""How long each phase of a training takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
