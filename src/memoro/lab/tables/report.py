"""Tables from records: Markdown for people, CSV for programs, and figures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from memoro.console import format_count
from memoro.files import write_whole
from memoro.lab.reproduce.measure import is_flat
from memoro.lab.reproduce.methods import Method
from memoro.lab.reproduce.plan import SCALES, Scale
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.tables.plots import Point, draw_differences, draw_panels

NOT_RUN = "–"
NOT_FLAT = "†"


def spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def format_values(values: Sequence[float]) -> str:
    """`0.858 ± 0.011`; a single value has no spread."""
    return f"{mean(values):.3f}" + (f" ± {spread(values):.3f}" if len(values) > 1 else "")


def figures_of(values: Sequence[float]) -> dict[str, Any]:
    """As a CSV file has them."""
    return {"accuracy": round(mean(values), 4), "spread": round(spread(values), 4), "seeds": len(values)}


def point_of(x: float, values: Sequence[float]) -> Point:
    return (x, mean(values), spread(values))


class Row(NamedTuple):
    """Measurements that may be compared with each other."""

    backbone: str
    pixels: int
    name: str
    """The name of the data set."""
    training: str

    @classmethod
    def of(cls, record: Record, scale: Scale) -> Row:
        key = record.key
        return cls(key["backbone"], key["image_size"], key["sets"][0], describe_training(key["budget"], scale))

    @property
    def columns(self) -> dict[str, Any]:
        """As a CSV file has it."""
        return {"backbone": self.backbone, "image_size": self.pixels, "set": self.name, "training": self.training}

    @property
    def group(self) -> Row:
        """What it has in common with rows of other sets."""
        return self._replace(name="")

    @property
    def where(self) -> str:
        return f"{self.backbone}, {self.pixels} px"

    @property
    def title(self) -> str:
        return f"{self.name}\n{self.where}, {self.training}"


def describe_training(budget: Mapping[str, Any], scale: Scale) -> str:
    """The length of a training, and what else differs from the scale's: `150 steps, batch size 16`.

    Folds only choose rates, and a set's augmentation is the same with all methods.
    """
    length = format_count(*((budget["steps"], "step") if budget["steps"] else (budget["epochs"], "epoch")))
    plain = asdict(scale.unmasked)
    names = ("batch_size", "views", "most", "seeds", "val_fraction")
    others = [f"{name.replace('_', ' ')} {budget[name]}" for name in names if budget[name] not in (plain[name], 0)]
    return ", ".join([length, *others])


def steps_of(record: Record) -> int:
    budget = record.key["budget"]
    return int(budget["steps"] or budget["epochs"] * math.ceil(record.result["train_images"] / budget["batch_size"]))


def select(records: Records, kind: str, methods: Iterable[str | Method], scale: Scale) -> list[Record]:
    """The newest record of every measurement of a kind whose methods are defined as the scale's plan has them now."""
    planned = json.loads(json.dumps([method.to_json() for method in scale.methods(methods)]))
    return records.current(kind, planned)


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

    def add_figure(self, caption: str, panels: Mapping[str, Any], xlabel: str, ylabel: str, **how: Any) -> None:
        """A figure of panels, if there are any. Keyword arguments are those of `draw_panels`."""
        if panels:
            self.figures[caption] = lambda path: draw_panels(path, panels, xlabel, ylabel, **how)

    def add_differences(self, caption: str, panels: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
        """A figure of differences and half of their intervals, by panel and row."""
        self.figures[caption] = lambda path: draw_differences(path, panels, "difference in test accuracy")


def write_table(table: str, records: Records, scale: str, out: Path) -> Path:
    """Writes the table's Markdown, CSV and figures from all that is recorded; returns the path of the first."""
    from memoro.lab.tables.paper import REPORTS

    out.mkdir(parents=True, exist_ok=True)
    report = REPORTS[table](records, SCALES[scale])
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
        return [
            f"Nothing is recorded yet. To run it: `memoro lab reproduce {table} --scale {scale} --data SET.zip`.",
            "",
        ]
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
    length = format_count(*((budget["steps"], "step") if budget["steps"] else (budget["epochs"], "epoch")))
    most = "all training images" if budget["most"] is None else f"at most {budget['most']} training images"
    views = "new random views" if budget["views"] is None else "plain views"
    masked = (
        "masked" if all(one["regime"] in {"head", "memory", "side"} for one in record.key["methods"]) else "unmasked"
    )
    judges = "a validation split" if budget["val_fraction"] else f"{budget['folds'] or '1 to 4'} of 4 folds of train"
    batches = f"{length}, batches of {budget['batch_size']}"
    return f"{masked.capitalize()} regimes: {batches}, {most} of a set, {views}; rates judged on {judges}."


# ------------------------------------------------------------------------------------------------ accuracy by method


Found = Mapping[Row, Mapping[str, Record]]
"""Records by row and method."""


def accuracies(records: Records, methods: Iterable[str], scale: Scale) -> dict[Row, dict[str, Record]]:
    """The newest record of each method in each row, for methods that were measured on the test split."""
    found: dict[Row, dict[str, Record]] = {}
    for record in select(records, "accuracy", methods, scale):
        if record.result["test"]:
            found.setdefault(Row.of(record, scale), {})[record.method] = record
    return dict(sorted(found.items()))


def format_accuracy(record: Record | None) -> str:
    """`0.858 ± 0.011`, with a mark where the validation curve was not flat."""
    if record is None:
        return NOT_RUN
    mark = "" if was_flat(record) else NOT_FLAT
    diverged = f" ({record.result['diverged']} diverged)" if record.result["diverged"] else ""
    return f"{format_values(record.result['test'])}{mark}{diverged}"


def was_flat(record: Record) -> bool:
    return is_flat(record.result["curve"])


def legend_of(found: Found) -> str:
    seeds = sorted({len(record.result["test"]) for cells in found.values() for record in cells.values()})
    runs = " or ".join([*map(str, seeds[:-1]), format_count(seeds[-1], "seed")])
    return (
        f"Test accuracy, mean ± standard deviation of {runs}. Learning rates were "
        "chosen on held-out training images (the rate is in the CSV file); then each seed was trained on all training "
        f"images and measured once. `{NOT_FLAT}`: not reached, the accuracy on held-out images was still rising by "
        f"more than 0.01 in the last third of the training. `{NOT_RUN}`: not run."
    )


def accuracy_rows(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "backbone": row.backbone, "weights": record.key["fingerprint"], "image_size": row.pixels,
            "set": row.name, "method": method, "training": row.training, "steps": steps_of(record),
            "train_images": record.result["train_images"],
            "test_images": record.result["test_images"], "lr": record.result["lr"],
            **figures_of(record.result["test"]), "flat": was_flat(record),
            "parameters_without_head": record.result["parameters"], "seconds_of_job": record.seconds,
        }
        for row, cells in found.items()
        for method, record in cells.items()
    ]  # fmt: skip


def accuracy_report(title: str, intro: str, found: Found, methods: Sequence[str]) -> Report:
    """A report with one table of accuracies."""
    used = [record for cells in found.values() for record in cells.values()]
    report = Report(title, [intro, ""], accuracy_rows(found), used=used)
    if not found:
        return report
    there = [name for name in methods if any(name in row for row in found.values())]
    rows = []
    for row, cells in found.items():
        first = next(iter(cells.values()))
        images = f"{first.result['train_images']} / {first.result['test_images']}"
        training = row.training if first.key["budget"]["steps"] else f"{row.training} ({steps_of(first)} steps)"
        rows.append([row.where, row.name, images, training, *(format_accuracy(cells.get(one)) for one in there)])
    report.lines += markdown_table(["backbone", "set", "train / test", "training", *there], rows)
    if missing := [name for name in methods if name not in there]:
        report.lines += ["", f"Not run yet: {', '.join(missing)}."]
    report.lines += ["", legend_of(found)]
    return report


def panels_of(found: Found, lines: Mapping[str, Sequence[tuple[str, float]]]) -> dict[str, dict[str, list[Point]]]:
    """A panel for each row: `lines` gives, for each line, its methods with their places on the x axis."""
    panels = {}
    for row, cells in found.items():
        drawn = {
            line: [point_of(x, cells[method].result["test"]) for method, x in places if method in cells]
            for line, places in lines.items()
        }
        drawn = {line: points for line, points in drawn.items() if points}
        if drawn:
            panels[row.title] = drawn
    return panels


def without_short(found: Found, scale: Scale) -> Found:
    """Without the shorter runs of methods with the mask, which are for comparisons with those without it: their length
    is given in steps instead of epochs, or the reverse."""
    in_epochs = scale.masked.steps is None
    return {
        row: cells
        for row, cells in found.items()
        if (next(iter(cells.values())).key["budget"]["steps"] is None) == in_epochs
    }
