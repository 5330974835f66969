"""Two methods compared on the same test images, run by run: which is better, and can it be told?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Verdict = Literal["holds", "not told apart", "fails"]


@dataclass(frozen=True)
class Comparison:
    """The difference in test accuracy, first minus second, and its standard error."""

    first: str
    second: str
    difference: float
    error: float
    """Of seeds and test images together."""
    seeds: int

    @property
    def verdict(self) -> Verdict:
        """Whether the first is better: the difference is compared with two standard errors."""
        if abs(self.difference) <= 2 * self.error:
            return "not told apart"
        return "holds" if self.difference > 0 else "fails"


def compare_pair(first: tuple[str, Mapping[str, Any]], second: tuple[str, Mapping[str, Any]]) -> Comparison | None:
    """Pairs runs of the same seed and their answers to the same images; None where there is no such pair."""
    (name, one), (other, two) = first, second
    images = one["test_images"]
    if images != two["test_images"]:
        return None
    pairs = [
        (read_correct(a, images), read_correct(b, images))
        for a, b in zip(one["correct"], two["correct"], strict=False)
        if a and b
    ]
    if not pairs:
        return None
    differences = np.stack([a.astype(float) - b.astype(float) for a, b in pairs])  # seeds, images
    runs = differences.mean(axis=1)
    of_images = differences.mean(axis=0).std(ddof=1) / math.sqrt(images)
    # A single pair of runs says nothing of how runs differ: an error of the images alone.
    of_runs = runs.std(ddof=1) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    return Comparison(name, other, float(runs.mean()), math.hypot(of_images, of_runs), len(runs))


def read_correct(text: str, images: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The bits that `measure.summarise` wrote."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[:images].astype(bool)


def compare_chain(names: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> list[Comparison]:
    """An ordering, link by link: each method with the next one, where both were measured."""
    links = [(one, two) for one, two in pairwise(names) if one in results and two in results]
    found = (compare_pair((one, results[one]), (two, results[two])) for one, two in links)
    return [comparison for comparison in found if comparison is not None]
