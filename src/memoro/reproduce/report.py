"""Tables from records: Markdown for people, CSV for programs, and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from memoro.console import format_count
from memoro.files import write_whole
from memoro.plots import Point, draw_panels
from memoro.reproduce.records import Record, Records

Row = tuple[str, str]
"""Backbone and set."""
NOT_RUN = "–"
NOT_FLAT = "†"


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


@dataclass
class Report:
    """What a table's page says, and the rows of its CSV file."""

    title: str
    lines: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Callable[[Path], Path]] = field(default_factory=dict)
    """By caption: what draws the figure into a file."""
    used: list[Record] = field(default_factory=list)


def write_table(table: str, records: Records, scale: str, out: Path) -> Path:
    """Writes the table's Markdown, CSV and figures from all that is recorded; returns the path of the first."""
    from memoro.reproduce.tables import REPORTS

    out.mkdir(parents=True, exist_ok=True)
    report = REPORTS[table](records)
    lines = [f"# {report.title}", "", *report.lines, ""]
    for number, (caption, draw) in enumerate(report.figures.items(), start=1):
        file = draw(out / f"{table}{'' if number == 1 else f'-{number}'}.png")
        lines += [f"![{caption}]({file.name})", ""]
    lines += how_it_was_made(table, report.used, scale)
    path = out / f"{table}.md"
    write_whole(path, "\n".join(lines).encode())
    if report.rows:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(report.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(report.rows)
        write_whole(path.with_suffix(".csv"), text.getvalue().encode())
    return path


def how_it_was_made(table: str, used: Sequence[Record], scale: str) -> list[str]:
    """The commands, the machine and the time."""
    if not used:
        return [f"Nothing is recorded yet. To run it: `memoro reproduce {table} --scale {scale} --data SET.zip`.", ""]
    lines = ["## How it was made", "", *(f"    {text}" for text in dict.fromkeys(one.command for one in used)), ""]
    machines = {repr(sorted(record.machine.items(), key=str)): record.machine for record in used}
    for machine in machines.values():
        versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
        threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
        lines.append(
            f"- {machine['cores']} cores, {threads}, {machine['device']}, {machine['architecture']}; {versions}"
        )
    seconds = sum(record.seconds / record.together for record in used)
    dates = sorted({record.date[:10] for record in used})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    measured = format_count(len(used), "measurement")
    lines.append(
        f"- Scale `{scale}`; {days}; {measured} in {seconds / 60:.0f} minutes of wall time, while other programs may "
        "have been running."
    )
    lines += [f"- {text}" for text in sorted({describe_budget(record) for record in used} - {""})]
    lines.append(
        f"- Every measurement with its settings is in the `.jsonl` files beside this one (`{table}.csv`: a row each)."
    )
    return [*lines, ""]


def describe_budget(record: Record) -> str:
    """How long its runs were, and on how many images at most."""
    budget = record.key["budget"]
    if record.key["kind"] == "counts":
        return ""
    length = f"{budget['steps']} steps" if budget["steps"] else f"{budget['epochs']} epochs"
    most = "all training images" if budget["most"] is None else f"at most {budget['most']} training images"
    views = "new random views" if budget["views"] is None else "plain views"
    masked = (
        "masked" if all(one["regime"] in {"head", "memory", "side"} for one in record.key["methods"]) else "unmasked"
    )
    judges = "a validation split" if budget["val_fraction"] else f"{budget['folds'] or 'up to 4'} quarters of train"
    batches = f"{length}, batches of {budget['batch_size']}"
    return f"{masked.capitalize()} regimes: {batches}, {most} of a set, {views}; rates judged on {judges}."


# ------------------------------------------------------------------------------------------------ accuracy by method


def accuracies(records: Records, methods: Sequence[str]) -> dict[Row, dict[str, Record]]:
    """The newest record of each method by backbone and set, for methods that were measured on the test split."""
    found: dict[Row, dict[str, Record]] = {}
    for record in records.current("accuracy"):
        if record.method in methods and record.result["test"]:
            found.setdefault((record.key["backbone"], record.key["sets"][0]), {})[record.method] = record
    return dict(sorted(found.items()))


def format_accuracy(record: Record | None) -> str:
    """`0.858 ± 0.011`, with a mark where the validation curve was not flat."""
    if record is None:
        return NOT_RUN
    test = record.result["test"]
    mark = "" if was_flat(record) else NOT_FLAT
    diverged = f" ({record.result['diverged']} diverged)" if record.result["diverged"] else ""
    return f"{mean(test):.3f} ± {spread(test):.3f}{mark}{diverged}"


def was_flat(record: Record) -> bool:
    from memoro.reproduce.measure import is_flat

    return is_flat([(step, accuracy) for step, accuracy in record.result["curve"]])


def accuracy_lines(found: Mapping[Row, Mapping[str, Record]], methods: Sequence[str]) -> list[str]:
    """The table of accuracies and its legend."""
    there = [name for name in methods if any(name in row for row in found.values())]
    rows = []
    for (backbone, name), cells in found.items():
        first = next(iter(cells.values()))
        images = f"{first.result['train_images']} / {first.result['test_images']}"
        where = f"{backbone}, {first.key['image_size']} px"
        rows.append([where, name, images, *(format_accuracy(cells.get(method)) for method in there)])
    used = [record for cells in found.values() for record in cells.values()]
    seeds = sorted({len(record.result["test"]) for record in used})
    legend = (
        f"Test accuracy, mean ± standard deviation of {' or '.join(map(str, seeds))} seeds. Learning rates were "
        "chosen on held-out training images (the rate is in the CSV file); then each seed was trained on all training "
        f"images and measured once. `{NOT_FLAT}`: not reached, the accuracy on held-out images was still rising by "
        f"more than 0.01 in the last third of the training. `{NOT_RUN}`: not run."
    )
    missing = [name for name in methods if name not in there]
    not_run = ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    return [*markdown_table(["backbone", "set", "train / test", *there], rows), *not_run, "", legend]


def accuracy_rows(found: Mapping[Row, Mapping[str, Record]]) -> list[dict[str, Any]]:
    return [
        {
            "backbone": backbone, "weights": record.key["fingerprint"], "image_size": record.key["image_size"],
            "set": name, "method": method, "train_images": record.result["train_images"],
            "test_images": record.result["test_images"], "lr": record.result["lr"],
            "accuracy": round(mean(record.result["test"]), 4), "spread": round(spread(record.result["test"]), 4),
            "seeds": len(record.result["test"]), "flat": was_flat(record),
            "parameters_without_head": record.result["parameters"], "seconds_of_cell": record.seconds,
        }
        for (backbone, name), cells in found.items()
        for method, record in cells.items()
    ]  # fmt: skip


def accuracy_report(
    records: Records, title: str, intro: Sequence[str], methods: Sequence[str]
) -> tuple[Report, dict[Row, dict[str, Record]]]:
    """A report with one table of accuracies, and what it shows."""
    found = accuracies(records, methods)
    used = [record for cells in found.values() for record in cells.values()]
    lines = [*intro, ""]
    if found:
        lines += accuracy_lines(found, methods)
    return Report(title, lines, accuracy_rows(found), used=used), found


def point_of(x: float, record: Record) -> Point:
    return (x, mean(record.result["test"]), spread(record.result["test"]))


def panels_of(
    found: Mapping[Row, Mapping[str, Record]], lines: Mapping[str, Sequence[tuple[str, float]]]
) -> dict[str, dict[str, list[Point]]]:
    """A panel for each backbone and set: `lines` gives, for each line, its methods with their places on the x axis."""
    panels = {}
    for (backbone, name), cells in found.items():
        drawn = {
            line: [point_of(x, cells[method]) for method, x in places if method in cells]
            for line, places in lines.items()
        }
        drawn = {line: points for line, points in drawn.items() if points}
        if drawn:
            panels[f"{name}, {backbone}"] = drawn
    return panels


def figure_of(panels: Mapping[str, Any], xlabel: str, ylabel: str, *, log: bool = False) -> Callable[[Path], Path]:
    return lambda path: draw_panels(path, panels, xlabel, ylabel, log=log)
