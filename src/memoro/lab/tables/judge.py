"""Claims that one method is better than another, judged on recorded runs: lines and a figure of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from memoro.lab.tables.compare import LEAST_PAIRS, Comparison, Verdict, average_comparisons, compare_chain
from memoro.lab.tables.report import NOT_FLAT, Found, Report, Row, markdown_table, was_flat

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
        for link in (link for chain in chains for link in compare_chain(chain, results)):
            rows.append([row.where, row.name, row.training, *_judge(link, marked[link.first], marked[link.second])])
            links.setdefault((row._replace(name=""), link.first, link.second), {})[row.name] = link
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


def _judge(link: Comparison, first: str, second: str) -> list[Any]:
    return [_claim(link, first, second), str(link), link.seeds, link.judge(equal=link.first == "full")]


def _claim(link: Comparison, first: str, second: str) -> str:
    """`full ≥ memory 5`, with the methods as they are shown."""
    return f"{first} {'≥' if link.first == 'full' else '>'} {second}"
