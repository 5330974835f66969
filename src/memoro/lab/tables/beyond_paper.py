"""What the tables say that the paper does not have: forks, and tasks that extend others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from memoro.lab.reproduce.measure import is_flat
from memoro.lab.reproduce.methods import FORKED, FORKED_SIZES, METHODS
from memoro.lab.reproduce.plan import CHILDREN, Scale
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.reproduce.several import ALONE
from memoro.lab.tables.compare import LEAST_PAIRS, Comparison, add_comparisons, average_comparisons, compare_pair
from memoro.lab.tables.plots import Point
from memoro.lab.tables.report import (
    NOT_FLAT,
    NOT_RUN,
    Found,
    Report,
    Row,
    accuracies,
    accuracy_rows,
    figures_of,
    format_accuracy,
    format_values,
    legend_of,
    markdown_table,
    panels_of,
    point_of,
    select,
    without_short,
)

FORKS = (
    "Accuracy over the layer at which a task leaves the backbone (its fork), as a fraction of the depth: 0 "
    "is the paper, 1 a linear head. A task's cost, file and cached features shrink to 1 − fork of those of a "
    "task from layer 0. Not in the paper."
)
EXTENSION = (
    "A task that extends another (it attends to the other's class token and memory) against the same task "
    "alone, over the number of its training images. Child `classes`: every second class of a set; its "
    "parent knows the classes between them (`sibling classes`), or another set. Child `groups`: whether the"
    " number of an image's class is odd; its parent was trained to tell the classes, on other images. The "
    "paper shows that tasks can be extended, not when it helps."
)


def report_forks(records: Records, scale: Scale) -> Report:
    methods = (*FORKED, *FORKED_SIZES)
    between = {name for name in methods if METHODS[name].fork}
    measured = without_short(accuracies(records, methods, scale), scale)
    found = {row: cells for row, cells in measured.items() if between & cells.keys()}
    used = [record for cells in found.values() for record in cells.values()]
    report = Report("Forks", [FORKS], accuracy_rows(found), used=used)
    if not found:
        return report
    counted = [record for record in records.current("counts") if record.key["backbone"]]
    report.used += counted
    costs = {
        (record.key["backbone"], record.key["image_size"], row["name"]): row["flops"] / 1e6
        for record in counted
        for row in record.result["rows"]
    }
    forks = {name: 1.0 if name == "head" else METHODS[name].fork or 0.0 for name in methods}
    for line in report.rows:
        line["fork"] = round(forks[line["method"]], 2)
        line["mflop"] = costs.get((line["backbone"], line["image_size"], line["method"]), "")
    report.lines += [
        "", *_fork_table(found, forks, costs), "", legend_of(found), "",
        "Parameters without the head. MFLOP: what a task adds to one pass of the backbone for one image.",
    ]  # fmt: skip
    lines: dict[str, list[str]] = {}
    for name in methods:
        if name not in ("head", "class"):
            lines.setdefault(name.partition(",")[0], []).append(name)
    by_fork: dict[str, Any] = {}
    by_cost: dict[str, Any] = {}
    for row, cells in found.items():
        prices = {name: costs.get((row.backbone, row.pixels, name)) for name in forks}
        for panels, places in ((by_fork, forks), (by_cost, prices)):
            drawn = {
                line: [(name, x) for name in (*names, "head") if (x := places[name]) is not None]
                for line, names in lines.items()
                if any(name in cells for name in names[1:])  # the ends alone would be a straight line
            }
            panels.update(panels_of({row: cells}, drawn))
    by_fork = {**_mean_panels(found, lines, forks), **by_fork}
    report.add_figure("accuracy over the fork", by_fork, "fork, as a fraction of the depth", "test accuracy")
    report.add_figure("accuracy over the cost", by_cost, "MFLOP per image", "test accuracy")
    later = [(name, names[0]) for names in lines.values() for name in names[1:]]
    add_comparisons(report, "Is a later fork better than layer 0?", found, later, each=False)
    return report


def _mean_panels(found: Found, lines: Mapping[str, Sequence[str]], forks: Mapping[str, float]) -> dict[str, Any]:
    """A panel for each backbone with several sets: lines of methods that all of its sets have."""
    panels: dict[str, Any] = {}
    for group in dict.fromkeys(row.group for row in found):
        sets = [cells for row, cells in found.items() if row.group == group]
        drawn: dict[str, list[Point]] = {}
        for line, names in lines.items():
            known = [name for name in (*names, "head") if all(name in cells for cells in sets)]
            points = [(forks[one], mean(mean(cells[one].result["test"]) for cells in sets), 0.0) for one in known]
            if set(names[1:]) & set(known):
                drawn[line] = points
        if len(sets) > 1 and drawn:
            panels[f"mean of {len(sets)} sets{group.title}"] = drawn
    return panels


def _fork_table(found: Found, forks: Mapping[str, float], costs: Mapping[tuple[str, int, str], float]) -> list[str]:
    """A row for each method: there are more of them than sets."""
    sets = sorted({row.name for row in found})
    rows: list[list[Any]] = []
    for group in dict.fromkeys(row.group for row in found):
        for name, fork in sorted(forks.items(), key=_line_and_fork):
            cells = [found.get(group._replace(name=one), {}).get(name) for one in sets]
            first = next((record for record in cells if record is not None), None)
            if first is None:
                continue
            cost = costs.get((group.backbone, group.pixels, name))
            rows.append([
                group.where, group.training, name.partition(",")[0], f"{fork:.2f}", f"{first.result['parameters']:,}",
                NOT_RUN if cost is None else f"{cost:,.1f}", *map(format_accuracy, cells),
            ])  # fmt: skip
    return markdown_table(["backbone", "training", "method", "fork", "parameters", "MFLOP", *sets], rows)


def _line_and_fork(one: tuple[str, float]) -> tuple[str, int, str, float]:
    line = one[0].partition(",")[0]
    return line.partition(" ")[0], len(line), line, one[1]  # memory 5 before memory 20


def report_extension(records: Records, scale: Scale) -> Report:
    found: dict[tuple[Row, str, str], Record] = {}
    for record in select(records, "extension", ("memory 5", "side 8"), scale):
        child = CHILDREN[record.key["number"]]
        other = (
            "" if child == "groups" else ", ".join(record.key["sets"][1:])
        )  # groups have one parent, of their own set
        found[Row.of(record, scale), child, other] = record
    report = Report("Extension: does a parent help?", [EXTENSION], used=[*found.values()])
    rows: list[list[Any]] = []
    panels: dict[str, Any] = {}
    gains: dict[tuple[Row, str, str, str], dict[int, dict[str, Comparison]]] = {}
    for (row, child, other), record in found.items():
        test_images = record.result["test_images"]
        lines: dict[str, list[Point]] = {}
        for size, cases in record.result["sizes"].items():
            for case, result in cases.items():
                test = result["test"]
                method, _, kind = case.partition(", ")
                alone = cases[f"{method}, {ALONE}"]
                parent = f"{kind} ({other})" if kind == "another set" else kind
                link = None
                if kind != ALONE:
                    link = compare_pair(
                        (case, {**result, "test_images": test_images}), (ALONE, {**alone, "test_images": test_images})
                    )
                if link is not None:
                    sizes = gains.setdefault((row.group, child, kind, method), {})
                    sizes.setdefault(int(size), {})[row.name] = link
                mark = "" if is_flat(result["curve"]) else NOT_FLAT
                shown = [child, size, method, parent, f"{format_values(test)}{mark}", "" if link is None else str(link)]
                rows.append([row.where, row.name, row.training, *shown])
                lines.setdefault(case, []).append(point_of(float(size), test))
                report.rows.append({
                    **row.columns, "child": child, "images": int(size), "method": method, "parent": parent,
                    **figures_of(test),
                    "gain": "" if link is None else round(link.difference, 4),
                    "error": "" if link is None else round(link.error, 4),
                })  # fmt: skip
        title = f"{child} of {row.title}"
        panels[f"{title}, {other}" if title in panels else title] = lines
    if not rows:
        return report
    means, differences = _average_gains(gains)
    columns = ["backbone", "set", "training", "child", "images", "method", "parent", "test accuracy", "gain"]
    averaged = ["backbone", "training", "child", "parent", "method", "images", "sets", "gain", "verdict"]
    report.lines = [
        EXTENSION, "", *(["Means over sets:", "", *markdown_table(averaged, means), ""] if means else ()),
        "Each set by itself:", "", *markdown_table(columns, rows), "",
        "`gain`: over the same method alone, same seeds and images, ± half of the 95 % interval, which does not "
        "include other runs of the parent. A parent helps (holds) or hurts (fails) if the interval does not include "
        f"zero. `{NOT_FLAT}`: not reached, the accuracy on held-out images was still rising in the last third of the "
        "training.",
    ]  # fmt: skip
    report.add_figure(
        "accuracy over training images", panels, "training images of the child", "test accuracy", log=True
    )
    if differences:
        report.add_differences("gains of a parent, with 95 % intervals", differences)
    return report


def _average_gains(
    gains: Mapping[tuple[Row, str, str, str], Mapping[int, Mapping[str, Comparison]]],
) -> tuple[list[list[Any]], dict[str, dict[str, tuple[float, float]]]]:
    """Rows of means over sets, and panels of all gains that have an interval."""
    means: list[list[Any]] = []
    panels: dict[str, dict[str, tuple[float, float]]] = {}
    for (row, child, kind, method), sizes in gains.items():
        drawn: dict[str, Comparison] = {}
        for size, sets in sorted(sizes.items()):
            drawn |= {f"{name}, {size}": link for name, link in sets.items()}
            if len(sets) > 1:
                average = average_comparisons([*sets.values()])
                drawn[f"mean, {size}"] = average
                means.append([
                    row.where, row.training, child, kind, method, size, len(sets), str(average), average.judge(),
                ])  # fmt: skip
        title = f"{method}: {child}, parent: {kind}\n{row.where}, {row.training}"
        if shown := {name: (link.difference, link.margin) for name, link in drawn.items() if link.seeds >= LEAST_PAIRS}:
            panels[title] = shown
    return means, panels
