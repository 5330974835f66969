"""What each table says: the paper's claim, what was measured, and how far they agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from memoro.lab.reproduce.methods import ADAPTERS, FEW, MASKED, STABLE, STABLE_FULL
from memoro.lab.reproduce.plan import Scale
from memoro.lab.reproduce.records import Records
from memoro.lab.tables.beyond_paper import report_extension, report_forks
from memoro.lab.tables.compare import add_comparisons, compare_pair
from memoro.lab.tables.plots import Point
from memoro.lab.tables.report import (
    NOT_RUN,
    Report,
    Row,
    accuracies,
    accuracy_report,
    figures_of,
    format_values,
    markdown_table,
    panels_of,
    point_of,
    select,
    without_short,
)

PAPER_TABLE2 = (
    ("SUN-397", 76.9, 75.9, 76.4, 77.0, 76.8, 76.9, 76.9),
    ("i-Naturalist", 54.0, 46.3, 48.7, 49.4, 50.1, 50.0, 50.0),
    ("CIFAR-100", 91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9),
    ("Places-365", 55.9, 50.9, 52.4, 53.3, 53.8, 53.9, 54.1),
)
"""Validation accuracy in %: full, head, head and class token, memory with 1, 5, 10 and 20 cells."""

PAPER_TABLE5 = {
    "full": (
        "80M, ≈1 GFLOP",
        "All of the encoder is 87.5M; its twelve layers alone are 85.1M. A model of its own needs a pass of its"
        " own: 8.8 GFLOP, 4.4 G multiply-adds. ≈1 G is neither; the nearest is a pass at 112 px (0.9 G "
        "multiply-adds). The paper does not say how it counted.",
    ),
    "head": (
        "768·k, 0",
        "As in the paper, plus k biases.",
    ),
    "class-full": (
        "768, 0",
        "As in the paper: the token takes the place of the pre-trained one.",
    ),
    "memory-full 5": (
        "768·12·5, ≈25 MFLOP",
        "Parameters as in the paper, plus the class token. Keys and values of the cells take 142 MFLOP, but do "
        "not depend on the image; attention to them takes 9. At 384 px (145 tokens), attention to them alone "
        "would take 26.7.",
    ),
}
"""By method: the paper's parameters and FLOPs, and why the count differs."""

INTRO = {
    "table2": (
        "The paper's Table 2 compares full fine-tuning, a head, head and class token, and memory with 1 to 20 "
        "cells. Here `class-full` and `memory-full N` are its regimes: every token sees memory. `class` and "
        "`memory N` have the paper's mask, which lets tasks be put together; `side 8` (low-rank weights of the "
        "task's token) and `lora 8` are not in the paper. Compare methods within a row: rows differ in the length of "
        "the training."
    ),
    "table4": (
        "The paper's Table 4 (i-Naturalist, parameters without the head): memory with 5 cells 50.1 %, 46K · "
        "adapters with a bottleneck of 5 49.9 %, 737K · both 50.3 %, 783K. Two adapters per layer of width 5 "
        "have 184,320 weights on ViT-B, a quarter of that; `adapter 20` has the paper's number. The paper also "
        "says that memory which is propagated from layer to layer generally hurts: `propagated 5`, and with a "
        "learned update `propagated-additive 5`."
    ),
    "table5": (
        "What a method adds to ViT-B/32 at 224 px for one image, counted by running it "
        "(`torch.utils.flop_counter`, random weights; two FLOPs for a multiplication and an addition). Head "
        "excluded: k classes have 768·k weights, k biases and 1,536·k FLOPs with every method. Masked methods "
        "are counted as memoro runs them: one token of its own for each task, keys and values of memory "
        "computed when the task is attached."
    ),
    "naive-concat": (
        "Models trained apart, each on its own set, put into one pass one after the other. Without masks "
        "(`NaiveConcatenation` of `memory-full` models), every token sees every memory. With masks (`compose` "
        "of `memory` tasks), nothing changes. The paper, i-Naturalist: 50.0 alone, 28.1 with Places, 27.8 with "
        "CIFAR, 17.3 with SUN."
    ),
    "masking": (
        "Full attention against the mask, with memory and without: `class-full` and `memory-full N` let every "
        "token see the new class token and memory, `class` and `memory N` only the task's own. Both are trained with "
        "the same optimiser, steps and seeds, at the better of two learning rates each. The paper finds that the mask "
        "costs little once there is memory."
    ),
    "models": "Backbones compared. The paper has ViT-B/32, B/16 and L/32; here are those that were given.",
    "lr-stability": (
        "Accuracy on held-out training images over four decades of learning rate, relative to the middle of "
        "each method's range (0.1 with SGD, 0.01 for `full`; 0.001 for `side 8`, which is trained with AdamW). The "
        "paper: full fine-tuning is sensitive to the learning rate, memory stays stable at large ones. 0: diverged. "
        "`full` and `memory-full 5` need passes of their own and have one seed, so no spread."
    ),
}
"""What each table measures, and the paper's claim."""

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
ADAPTER_CLAIMS = (
    ("memory-full 5", "adapter 5"), ("adapter 5 + memory-full 5", "memory-full 5"),
    ("memory-full 5", "propagated 5"), ("memory-full 5", "propagated-additive 5"),
)  # fmt: skip
BESIDE_PAPER = (("side 8", "head"), ("side 8", "memory 5"))


def _table2(records: Records, scale: Scale) -> Report:
    names = ["full", "head", *scale.unmasked_memory, *MASKED[1:], "lora 8"]
    found = accuracies(records, names, scale)
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
    memory = (f"memory {cells}" for cells in CELLS)
    columns = ["paper, validation accuracy in %", "full", "head", "head + class", *memory]
    report.lines += ["", "## The paper's figures (ViT-B/32, ImageNet-21k)", "", *markdown_table(columns, paper)]
    return report


def _table4(records: Records, scale: Scale) -> Report:
    # Memory alone is measured on more sets, for table 2.
    found = {row: cells for row, cells in accuracies(records, ADAPTERS, scale).items() if {*cells} != {ADAPTERS[0]}}
    report = accuracy_report("Table 4: memory and adapters", INTRO["table4"], found, ADAPTERS)
    counts: dict[str, dict[str, str]] = {}
    for row, cells in found.items():
        for name, record in cells.items():
            counts.setdefault(name, {})[row.backbone] = f"{record.result['parameters']:,}"
    backbones = list(dict.fromkeys(row.backbone for row in found))
    rows = [[name, *(counts[name].get(one, NOT_RUN) for one in backbones)] for name in ADAPTERS if name in counts]
    if rows:
        report.lines += ["", "Parameters without the head:", "", *markdown_table(["method", *backbones], rows)]
    panels: dict[str, Any] = {}
    for row, cells in found.items():
        places = {name: [(name, float(record.result["parameters"]))] for name, record in cells.items()}
        panels.update(panels_of({row: cells}, places))
    report.add_figure("accuracy over parameters", panels, "parameters without the head", "test accuracy", log=True)
    add_comparisons(report, "Comparisons", found, ADAPTER_CLAIMS)
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
    found = select(records, "concat", ("memory-full 5", "memory 5"), scale)
    report = Report("Naive concatenation", intro, used=found)
    gathered: dict[tuple[Row, tuple[str, ...]], list[dict[str, Any]]] = {}
    for record in found:
        for name, result in record.result["sets"].items():
            place = Row.of(record, scale)._replace(name=name), tuple(result["order"])
            gathered.setdefault(place, []).append(result)
    rows, panels = [], {}
    most = max((len(order) for _, order in gathered), default=0)
    for (row, order), results in gathered.items():
        lines: dict[str, list[Point]] = {}
        for kind in ("naive", "masked"):
            steps = list(zip(*(result[kind]["test"] for result in results), strict=True))
            shown = [
                f"{format_values(step)}{f' ({added})' if at else ''}"
                for at, (step, added) in enumerate(zip(steps, order, strict=True))
            ]
            shown += [""] * (most - len(steps))
            rows.append([row.where, row.name, row.training, kind, *shown, _change(results, kind), len(results)])
            lines[f"{kind} concatenation"] = [point_of(at, step) for at, step in enumerate(steps, start=1)]
            report.rows += [
                {**row.columns, "kind": kind, "models": at, "added": order[at - 1], **figures_of(step)}
                for at, step in enumerate(steps, start=1)
            ]
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
    masked = ["class", *(f"memory {cells}" for cells in scale.cells)]
    names, pairs = ["head", *scale.unmasked_memory, *masked], [*zip(scale.unmasked_memory, masked, strict=True)]
    # Methods with the mask have longer trainings in other tables, without anything to compare them with.
    found = {
        row: cells
        for row, cells in accuracies(records, names, scale).items()
        if any(one in cells and two in cells for one, two in pairs)
    }
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
    found = without_short(accuracies(records, FEW, scale), scale)
    report = accuracy_report("Backbones", INTRO["models"], found, FEW)
    panels: dict[str, dict[str, list[Point]]] = {}
    for row, cells in found.items():
        points = [point_of(at, cells[name].result["test"]) for at, name in enumerate(FEW) if name in cells]
        panels.setdefault(f"{row.name}\n{row.training}", {})[row.where] = points
    report.add_figure("test accuracy of each method", panels, "", "test accuracy", ticks=FEW)
    rows: list[list[Any]] = []
    for training in dict.fromkeys(row.training for row in found):
        alike = [row for row in found if row.training == training]
        backbones = dict.fromkeys(row.group for row in alike)
        shared = set.intersection(*({row.name for row in alike if row.where == one.where} for one in backbones))
        for backbone in backbones if shared and len(backbones) > 1 else ():
            sets = [found[backbone._replace(name=name)] for name in sorted(shared)]
            means = [
                f"{mean(mean(own[method].result['test']) for own in sets):.3f}"
                if all(method in own for own in sets)
                else NOT_RUN
                for method in FEW
            ]
            rows.append([backbone.where, training, len(sets), *means])
    if rows:
        columns = ["backbone", "training", "sets", *FEW]
        heading = "Means over the sets that all backbones were measured on:"
        report.lines += ["", heading, "", *markdown_table(columns, rows)]
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
    panels: dict[str, dict[str, list[Point]]] = {}
    for (row, method), record in found.items():
        scores = {float(rate): some for rate, some in record.result["scores"].items()}
        middle = sorted(scores)[len(scores) // 2]
        cells = [format_values(scores[rate]) for rate in sorted(scores)]
        seeds = len(scores[middle])
        rows.append([row.where, row.name, row.training, method, seeds, f"{middle:g}", *cells])
        points = [point_of(rate / middle, some) for rate, some in scores.items()]
        panels.setdefault(f"{row.name}\n{row.where}", {})[f"{method}, {row.training}"] = points
        report.rows += [
            {**row.columns, "method": method, "lr": rate, **figures_of(some)} for rate, some in scores.items()
        ]
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
