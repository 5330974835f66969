"""What each table says: the paper's claim, what was measured, and how far they agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from memoro.lab.reproduce.methods import (
    ADAPTER,
    ADAPTER_MEMORY,
    ADAPTER_WIDE,
    ADDITIVE,
    CLASS_FULL,
    FULL,
    HEAD,
    LORA,
    MASKED,
    PROPAGATED,
    STABLE,
    STABLE_FULL,
    memory,
    memory_full,
    side,
)
from memoro.lab.reproduce.plan import Scale
from memoro.lab.reproduce.records import Records
from memoro.lab.tables.beyond_paper import report_extension, report_forks
from memoro.lab.tables.claims import INTRO, PAPER_TABLE2, PAPER_TABLE5
from memoro.lab.tables.compare import compare_pair
from memoro.lab.tables.judge import add_comparisons
from memoro.lab.tables.plots import Point
from memoro.lab.tables.report import (
    NOT_RUN,
    Report,
    Row,
    accuracies,
    accuracy_report,
    format_values,
    markdown_table,
    panels_of,
    point_of,
    select,
    spread,
    without_short,
)

CELLS = (1, 5, 10, 20)
ORDERING = (
    ("full", "memory-full 5", "class-full", "head"), ("memory-full 5", "head"),
    ("full", "memory 5", "class", "head"), ("memory 5", "head"),
)  # fmt: skip
"""The paper's, without the mask and with it."""
MORE_CELLS = (
    ("memory-full 20", "memory-full 5"), ("memory-full 5", "memory-full 1"),
    ("memory 20", "memory 5"), ("memory 5", "memory 1"),
)  # fmt: skip
ADAPTERS = (
    ("memory-full 5", "adapter 5"), ("adapter 5 + memory-full 5", "memory-full 5"),
    ("memory-full 5", "propagated 5"), ("memory-full 5", "propagated-additive 5"),
)  # fmt: skip
BESIDE_PAPER = (("side 8", "head"), ("side 8", "memory 5"))


def _table2(records: Records, scale: Scale) -> Report:
    methods = [FULL, HEAD, CLASS_FULL, *map(memory_full, scale.cells), *MASKED[1:], LORA]
    found = accuracies(records, methods, scale)
    names = [method.name for method in methods]
    report = accuracy_report("Table 2: accuracy by regime", INTRO["table2"], found, names)
    level = ("head", "full", "side 8", "lora 8")
    lines = {
        "memory (masked)": [("class", 0), *((f"memory {cells}", cells) for cells in CELLS)],
        "memory-full": [("class-full", 0), *((f"memory-full {cells}", cells) for cells in CELLS)],
        **{name: [(name, 0), (name, CELLS[-1])] for name in level},
    }
    panels = panels_of({row: cells for row, cells in found.items() if len(cells) > 1}, lines)
    report.add_figure("test accuracy over memory cells", panels, "memory cells", "test accuracy", level=level)
    add_comparisons(report, "The ordering full ≥ memory > class > head", found, ORDERING)
    add_comparisons(report, "Do more cells help?", found, MORE_CELLS)
    add_comparisons(report, "Not in the paper", found, BESIDE_PAPER)
    paper = [[name, *map(str, figures)] for name, *figures in PAPER_TABLE2]
    columns = [
        "paper, validation accuracy in %",
        "full",
        "head",
        "head + class",
        *(f"memory {cells}" for cells in CELLS),
    ]
    report.lines += ["", "## The paper's figures (ViT-B/32, ImageNet-21k)", "", *markdown_table(columns, paper)]
    return report


def _table4(records: Records, scale: Scale) -> Report:
    methods = [memory_full(5), ADAPTER, ADAPTER_WIDE, ADAPTER_MEMORY, PROPAGATED, ADDITIVE]
    names = [method.name for method in methods]
    # Memory alone is measured on more sets, for table 2.
    found = {row: cells for row, cells in accuracies(records, methods, scale).items() if {*cells} != {names[0]}}
    report = accuracy_report("Table 4: memory and adapters", INTRO["table4"], found, names)
    counts: dict[str, dict[str, str]] = {}
    for row, cells in found.items():
        for name, record in cells.items():
            counts.setdefault(name, {})[row.backbone] = f"{record.result['parameters']:,}"
    backbones = list(dict.fromkeys(row.backbone for row in found))
    rows = [[name, *(counts[name].get(one, NOT_RUN) for one in backbones)] for name in names if name in counts]
    if rows:
        report.lines += ["", "Parameters without the head:", "", *markdown_table(["method", *backbones], rows)]
    panels: dict[str, Any] = {}
    for row, cells in found.items():
        places = {name: [(name, float(record.result["parameters"]))] for name, record in cells.items()}
        panels.update(panels_of({row: cells}, places))
    report.add_figure("accuracy over parameters", panels, "parameters without the head", "test accuracy", log=True)
    add_comparisons(report, "Comparisons", found, ADAPTERS)
    return report


def _table5(records: Records, scale: Scale) -> Report:
    intro = [INTRO["table5"]]
    found = [record for record in records.current("counts") if not record.key["backbone"]]
    if not found:
        return Report("Table 5: parameters and FLOPs", intro)
    result = found[-1].result
    rows = []
    for row in result["rows"]:
        paper, why = PAPER_TABLE5.get(row["name"], ("", ""))
        rows.append([row["name"], f"{row['parameters']:,}", f"{row['flops'] / 1e6:,.1f}", paper, why])
    passes = ", ".join(f"{int(flops) / 1e9:.2f} at {size} px" for size, flops in result["passes"].items())
    lines = [
        *intro, "", *markdown_table(["method", "parameters", "MFLOP", "paper", "difference"], rows), "",
        f"A plain pass of the encoder, GFLOP: {passes}.",
    ]  # fmt: skip
    return Report("Table 5: parameters and FLOPs", lines, [dict(row) for row in result["rows"]], used=found[-1:])


def _naive(records: Records, scale: Scale) -> Report:
    intro = [INTRO["naive-concat"]]
    found = select(records, "concat", (memory_full(5), memory(5)), scale)
    report = Report("Naive concatenation", intro, used=found)
    gathered: dict[tuple[Row, tuple[str, ...]], list[dict[str, Any]]] = {}
    for record in found:
        for name, result in record.result["sets"].items():
            place = Row.of(record, scale)._replace(name=name), tuple(result["order"])
            gathered.setdefault(place, []).append(result)
    rows, panels = [], {}
    most = max((len(order) for _, order in gathered), default=0)
    for (row, order), results in gathered.items():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for kind in ("naive", "masked"):
            steps = list(zip(*(result[kind]["test"] for result in results), strict=True))
            shown = [
                f"{format_values(step)}{f' ({added})' if at else ''}"
                for at, (step, added) in enumerate(zip(steps, order, strict=True))
            ]
            shown += [""] * (most - len(steps))
            rows.append([row.where, row.name, row.training, kind, *shown, _change(results, kind), len(results)])
            lines[f"{kind} concatenation"] = [(at, mean(step), spread(step)) for at, step in enumerate(steps, start=1)]
            report.rows += [
                {"backbone": row.backbone, "image_size": row.pixels, "set": row.name, "training": row.training,
                 "kind": kind, "models": at, "added": order[at - 1], "accuracy": round(mean(step), 4),
                 "spread": round(spread(step), 4), "seeds": len(step)}
                for at, step in enumerate(steps, start=1)
            ]  # fmt: skip
        panels[f"{row.title}, {len(order)} models"] = lines
    if rows:
        added = (f"+{number}" for number in range(1, most))
        columns = ["backbone", "set", "training", "concatenation", "alone", *added, "change", "seeds"]
        change = max(result["largest_change"] for results in gathered.values() for result in results)
        report.lines = [
            *intro, "", *markdown_table(columns, rows), "",
            "Test accuracy, mean ± standard deviation over seeds; in brackets the set of the model that was added. "
            "`change`: with all models against alone, same seeds and images, ± half of the 95 % interval. With masks, "
            f"the largest change of any logit is {change:.1g} (float32 rounding).",
        ]  # fmt: skip
        report.add_figure("accuracy over the number of models", panels, "models in one pass", "test accuracy")
    return report


def _change(results: Sequence[Mapping[str, Any]], kind: str) -> str:
    """What all other models change in the accuracy of one."""
    last, alone = (
        {"test_images": results[0]["test_images"], "correct": [result[kind]["correct"][at] for result in results]}
        for at in (-1, 0)
    )
    return str(compare_pair(("all", last), ("alone", alone)) or NOT_RUN)


def _masking(records: Records, scale: Scale) -> Report:
    counts = (0, *scale.cells)
    unmasked, masked = [CLASS_FULL, *map(memory_full, scale.cells)], [*map(memory, counts)]
    pairs = [(one.name, two.name) for one, two in zip(unmasked, masked, strict=True)]
    # Methods with the mask have longer trainings in other tables, without anything to compare them with.
    found = {
        row: cells
        for row, cells in accuracies(records, [HEAD, *unmasked, *masked], scale).items()
        if any(one in cells and two in cells for one, two in pairs)
    }
    names = [method.name for method in (HEAD, *unmasked, *masked)]
    report = accuracy_report("Masking", INTRO["masking"], found, names)
    lines = {
        "full attention": [(one, count) for (one, _), count in zip(pairs, counts, strict=True)],
        "mask": [(two, count) for (_, two), count in zip(pairs, counts, strict=True)],
        "head": [("head", 0), ("head", counts[-1])],
    }
    panels = panels_of(found, lines)
    report.add_figure("accuracy over memory cells", panels, "memory cells (0: none)", "test accuracy", level=["head"])
    add_comparisons(report, "Is full attention better than the mask?", found, pairs)
    return report


def _models(records: Records, scale: Scale) -> Report:
    methods = (HEAD, memory(0), memory(5), side())
    names = [method.name for method in methods]
    found = without_short(accuracies(records, methods, scale), scale)
    report = accuracy_report("Backbones", INTRO["models"], found, names)
    panels: dict[str, dict[str, list[Point]]] = {}
    for row, cells in found.items():
        points = [point_of(at, cells[name]) for at, name in enumerate(names) if name in cells]
        panels.setdefault(f"{row.name}\n{row.training}", {})[row.where] = points
    report.add_figure("test accuracy of each method", panels, "", "test accuracy", ticks=names)
    rows: list[list[Any]] = []
    for training in dict.fromkeys(row.training for row in found):
        alike = [row for row in found if row.training == training]
        backbones = dict.fromkeys(row._replace(name="") for row in alike)
        shared = set.intersection(*({row.name for row in alike if row.where == one.where} for one in backbones))
        for backbone in backbones if shared and len(backbones) > 1 else ():
            sets = [found[backbone._replace(name=name)] for name in sorted(shared)]
            means = [
                f"{mean(mean(own[method].result['test']) for own in sets):.3f}"
                if all(method in own for own in sets)
                else NOT_RUN
                for method in names
            ]
            rows.append([backbone.where, training, len(sets), *means])
    if rows:
        report.lines += [
            "",
            "Means over the sets that all backbones were measured on:",
            "",
            *markdown_table(["backbone", "training", "sets", *names], rows),
        ]
    return report


def _stability(records: Records, scale: Scale) -> Report:
    intro = [INTRO["lr-stability"]]
    found = {
        (Row.of(record, scale), record.method): record
        for record in select(records, "accuracy", (*STABLE, *STABLE_FULL), scale)
        if not record.result["test"]
    }
    report = Report("Stability over learning rates", intro, used=[*found.values()])
    rows: list[list[Any]] = []
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (row, method), record in found.items():
        scores = {float(rate): some for rate, some in record.result["scores"].items()}
        middle = sorted(scores)[len(scores) // 2]
        cells = [format_values(scores[rate]) for rate in sorted(scores)]
        seeds = len(scores[middle])
        rows.append([row.where, row.name, row.training, method, seeds, f"{middle:g}", *cells])
        points = [(rate / middle, mean(some), spread(some)) for rate, some in scores.items()]
        panels.setdefault(f"{row.name}\n{row.where}", {})[f"{method}, {row.training}"] = points
        report.rows += [
            {"backbone": row.backbone, "image_size": row.pixels, "set": row.name, "training": row.training,
             "method": method, "lr": rate, "accuracy": round(mean(some), 4), "spread": round(spread(some), 4),
             "seeds": len(some)}
            for rate, some in scores.items()
        ]  # fmt: skip
    if rows:
        rates = ["middle rate", "÷ 100", "÷ 10", "× 1", "× 10", "× 100"]
        report.lines = [*intro, "", *markdown_table(["backbone", "set", "training", "method", "seeds", *rates], rows)]
        report.add_figure(
            "accuracy over learning rates", panels, "learning rate ÷ the middle one", "held-out accuracy", log=True
        )
    return report


REPORTS: dict[str, Callable[[Records, Scale], Report]] = {
    "table2": _table2,
    "naive-concat": _naive,
    "masking": _masking,
    "fork": report_forks,
    "extension": report_extension,
    "table4": _table4,
    "lr-stability": _stability,
    "models": _models,
    "table5": _table5,
}
