"""Two methods compared on the same test images, run by run: which is better, if that can be decided, and how reports
say it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from memoro.lab.tables.report import NOT_FLAT, Found, Report, Row, markdown_table, was_flat

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


JUDGED = (
    "Differences in test accuracy of runs with the same seed and the same training length, on the same images, ± half "
    "of the 95 % interval (of seeds and test images together; Student's t with Satterthwaite's degrees of freedom). "
    "The interval does not include the choice of the learning rate. A run that diverged has all images wrong. A claim "
    "holds if the difference is above that, fails if it is below minus that, and is inconclusive in between; `≥` is "
    "then not refuted. Fewer than three seeds get no verdict. One interval in twenty excludes zero by chance. "
    f"`{NOT_FLAT}`: not reached, as above."
)
"""How claims are judged."""


def add_comparisons(
    report: Report, heading: str, found: Found, chains: Sequence[Sequence[str]], *, each: bool = True
) -> None:
    """Adds the links' means over the sets of a backbone and a training length, with `each` those of every set, and a
    figure of all."""
    rows, means = [], []
    links: dict[tuple[Row, str, str], dict[str, Comparison]] = {}
    for row, cells in found.items():
        results = {method: record.result for method, record in cells.items()}
        marked = {method: method + ("" if was_flat(record) else NOT_FLAT) for method, record in cells.items()}
        for link in _compare_chains(chains, results):
            rows.append([row.where, row.name, row.training, *_judge(link, marked[link.first], marked[link.second])])
            links.setdefault((row.group, link.first, link.second), {})[row.name] = link
    if not rows:
        return
    panels = {}
    for (row, first, second), sets in links.items():
        some = [*sets.values()]
        drawn = dict(sets)
        if len(some) > 1:
            drawn["mean"] = average_comparisons(some)
            ahead = f"{sum(link.difference > 0 for link in some)} of {len(some)}"
            means.append([row.where, row.training, ahead, *_judge(drawn["mean"], first, second)])
        if min(link.seeds for link in some) >= LEAST_PAIRS:
            title = f"{_claim(some[0], first, second)}\n{row.where}, {row.training}"
            panels[title] = {name: (link.difference, link.margin) for name, link in drawn.items()}
    counts = Counter(row[-1] for row in rows)
    summary = ", ".join(f"{word}: {counts[word]}" for word in get_args(Verdict) if counts[word])
    shown = ["claim", "difference", "seeds", "verdict"]
    explained = JUDGED not in report.lines
    report.lines += ["", f"## {heading}", "", *([JUDGED, ""] if explained else ())]
    if means:
        columns = ["backbone", "training", "ahead on sets", *shown]
        report.lines += ["Means over sets:", "", *markdown_table(columns, means), ""]
    if each:
        columns = ["backbone", "set", "training", *shown]
        report.lines += [f"Each set by itself ({summary}):", "", *markdown_table(columns, rows)]
    else:
        report.lines.append(f"Each set by itself: {summary} (in the figure).")
    if panels:
        report.add_differences(f"{heading}: differences on each set, with 95 % intervals", panels)


def _compare_chains(chains: Sequence[Sequence[str]], results: Mapping[str, Mapping[str, Any]]) -> Iterator[Comparison]:
    """Each method of an ordering with the next one, where both were measured."""
    for one, two in (link for chain in chains for link in pairwise(chain)):
        if one in results and two in results:
            link = compare_pair((one, results[one]), (two, results[two]))
            if link is not None:
                yield link


def _judge(link: Comparison, first: str, second: str) -> list[Any]:
    return [_claim(link, first, second), str(link), link.seeds, link.judge(equal=link.first == "full")]


def _claim(link: Comparison, first: str, second: str) -> str:
    """`full ≥ memory 5`, with the methods as they are shown."""
    return f"{first} {'≥' if link.first == 'full' else '>'} {second}"
