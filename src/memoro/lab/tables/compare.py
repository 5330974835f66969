"""Two methods compared on the same test images, run by run: which is better, if that can be decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Verdict = Literal["holds", "not refuted", "inconclusive", "fails", "too few seeds"]
LEAST_PAIRS = 3
T95 = {
    1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip
"""By degrees of freedom: the 97.5 % quantile of Student's t."""


@dataclass(frozen=True)
class Comparison:
    """The difference in test accuracy, first minus second, and its standard error."""

    first: str
    second: str
    difference: float
    error: float
    """The standard error, from seeds and test images together."""
    seeds: int
    freedom: float
    """Degrees of freedom of the error: few where seeds dominate it, many where test images do."""

    @property
    def margin(self) -> float:
        """Half of the 95 % interval."""
        return self.error * T95[max(degrees for degrees in T95 if degrees <= self.freedom)]

    def judge(self, *, equal: bool = False) -> Verdict:
        """Whether the first is better; `equal`: or as good."""
        if self.seeds < LEAST_PAIRS:
            return "too few seeds"
        if abs(self.difference) <= self.margin:
            return "not refuted" if equal else "inconclusive"
        return "holds" if self.difference > 0 else "fails"

    def __str__(self) -> str:
        margin = f" ± {self.margin:.3f}" if self.seeds >= LEAST_PAIRS else ""
        return f"{self.difference:+.3f}{margin}"


def compare_pair(first: tuple[str, Mapping[str, Any]], second: tuple[str, Mapping[str, Any]]) -> Comparison | None:
    """Pairs runs of the same seed and their answers to the same images; None if there is no such pair.

    A run that diverged has all images wrong.
    """
    (name, one), (other, two) = first, second
    images = one["test_images"]
    if images != two["test_images"]:
        return None
    pairs = [
        (read_correct(a, images), read_correct(b, images)) for a, b in zip(one["correct"], two["correct"], strict=False)
    ]
    if not pairs:
        return None
    differences = np.stack([a.astype(float) - b.astype(float) for a, b in pairs])  # seeds, images
    runs = differences.mean(axis=1)
    # Variances of the mean. One value says nothing of how others would differ.
    parts = [
        (float(some.var(ddof=1)) / len(some), len(some) - 1)
        for some in (differences.mean(axis=0), runs)
        if len(some) > 1
    ]
    error, freedom = _add_variances(parts)
    return Comparison(name, other, float(runs.mean()), error, len(runs), freedom)


def average_comparisons(links: Sequence[Comparison]) -> Comparison:
    """The mean difference over several sets: over these sets, not over others that might have been chosen."""
    parts = [((link.error / len(links)) ** 2, link.freedom) for link in links]
    error, freedom = _add_variances(parts)
    difference = sum(link.difference for link in links) / len(links)
    return Comparison(links[0].first, links[0].second, difference, error, min(link.seeds for link in links), freedom)


def _add_variances(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The standard error of a sum from independent variances and their degrees of freedom, and its own (Welch and
    Satterthwaite)."""
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts) if variance else math.inf
    return math.sqrt(variance), max(freedom, 1.0)


def read_correct(text: str, images: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The bits that `measure.summarise` wrote."""
    if not text:  # the run diverged
        return np.zeros(images, dtype=bool)
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[:images].astype(bool)


def compare_chain(names: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> list[Comparison]:
    """An ordering, link by link: each method with the next one, where both were measured."""
    links = [(one, two) for one, two in pairwise(names) if one in results and two in results]
    found = (compare_pair((one, results[one]), (two, results[two])) for one, two in links)
    return [comparison for comparison in found if comparison is not None]
