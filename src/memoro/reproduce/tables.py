"""What each table says: the paper's claim, what was measured, and how far they agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from memoro.reproduce.claims import INTRO, PAPER_TABLE2, PAPER_TABLE5
from memoro.reproduce.compare import compare_chain, compare_pair
from memoro.reproduce.methods import FORKED, MASKED
from memoro.reproduce.records import Record, Records
from memoro.reproduce.report import (
    NOT_RUN,
    Report,
    Row,
    accuracy_report,
    figure_of,
    markdown_table,
    panels_of,
    spread,
)

CELLS = (1, 5, 10, 20)
UNMASKED_CHAIN = ("full", "memory-full 5", "class-full", "head")
MASKED_CHAIN = ("full", "memory 5", "class", "head")


def _table2(records: Records) -> Report:
    masked = [method.name for method in MASKED]
    names = ["full", "head", "class-full", *(f"memory-full {cells}" for cells in CELLS), *masked[1:], "lora 8"]
    intro = [INTRO["table2"]]
    report, found = accuracy_report(records, "Table 2: accuracy by regime", intro, names)
    report.lines += _ordering(found)
    paper = [[name, *map(str, figures)] for name, *figures in PAPER_TABLE2]
    columns = [
        "paper, validation accuracy in %",
        "full",
        "head",
        "head + class",
        *(f"memory {cells}" for cells in CELLS),
    ]
    report.lines += ["", "## The paper's figures (ViT-B/32, ImageNet-21k)", "", *markdown_table(columns, paper)]
    lines = {
        "memory (masked)": [("class", 0), *((f"memory {cells}", cells) for cells in CELLS)],
        "memory-full": [("class-full", 0), *((f"memory-full {cells}", cells) for cells in CELLS)],
        **{name: [(name, 0), (name, CELLS[-1])] for name in ("head", "full", "side 8", "lora 8")},  # level lines
    }
    if found:
        panels = panels_of(found, lines)
        report.figures["test accuracy over memory cells"] = figure_of(panels, "memory cells", "test accuracy")
    return report


def _ordering(found: Mapping[Row, Mapping[str, Record]]) -> list[str]:
    """The paper's ordering, link by link, with and without the mask."""
    rows = []
    for (backbone, name), cells in found.items():
        results = {method: record.result for method, record in cells.items()}
        for chain in (UNMASKED_CHAIN, MASKED_CHAIN):
            for link in compare_chain(chain, results):
                sign = "≥" if link.first == "full" else ">"
                verdict = link.verdict
                if sign == "≥" and verdict == "not told apart":
                    verdict = "holds"
                shown = f"{link.difference:+.3f} ± {link.error:.3f}"
                rows.append([backbone, name, f"{link.first} {sign} {link.second}", shown, link.seeds, verdict])
    if not rows:
        return []
    counts = {word: sum(row[-1] == word for row in rows) for word in ("holds", "not told apart", "fails")}
    summary = ", ".join(f"{word}: {count}" for word, count in counts.items())
    return [
        "", "## The ordering full ≥ memory > class > head", "",
        "Differences in test accuracy of runs with the same seed, on the same images, ± standard error (of seeds and "
        "test images together). A link holds if the difference is above two standard errors (`≥`: not below minus "
        f"two), and fails if it is below minus two. {summary}.", "",
        *markdown_table(["backbone", "set", "claim", "difference", "seeds", ""], rows),
    ]  # fmt: skip


def _table4(records: Records) -> Report:
    names = [
        "memory-full 5",
        "adapter 5",
        "adapter 20",
        "adapter 5 + memory-full 5",
        "propagated 5",
        "propagated-additive 5",
    ]
    intro = [INTRO["table4"]]
    report, found = accuracy_report(records, "Table 4: memory and adapters", intro, names)
    if found:
        first = next(iter(found.values()))
        counted = [[name, f"{first[name].result['parameters']:,}"] for name in names if name in first]
        report.lines += ["", *markdown_table(["method", f"parameters without head ({next(iter(found))[0]})"], counted)]
    return report


def _table5(records: Records) -> Report:
    intro = [INTRO["table5"]]
    found = records.current("counts")
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


def _naive(records: Records) -> Report:
    intro = [INTRO["naive-concat"]]
    found = records.current("concat")
    report = Report("Naive concatenation", intro, used=found)
    gathered: dict[Row, list[dict[str, Any]]] = {}
    for record in found:
        for name, result in record.result["sets"].items():
            gathered.setdefault((record.key["backbone"], name), []).append(result)
    rows, panels = [], {}
    for (backbone, name), results in gathered.items():
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for kind in ("naive", "masked"):
            steps = list(zip(*(result[kind] for result in results), strict=True))
            rows.append([backbone, name, kind, *(f"{mean(step):.3f} ± {spread(step):.3f}" for step in steps)])
            lines[f"{kind} concatenation"] = [(at, mean(step), spread(step)) for at, step in enumerate(steps, start=1)]
            report.rows += [
                {"backbone": backbone, "set": name, "kind": kind, "models": at, "added": results[0]["order"][at - 1],
                 "accuracy": round(mean(step), 4), "spread": round(spread(step), 4), "seeds": len(step)}
                for at, step in enumerate(steps, start=1)
            ]  # fmt: skip
        panels[f"{name}, {backbone}"] = lines
    if rows:
        models = len(rows[0]) - 3
        columns = ["backbone", "set", "", "alone", *(f"+{number}" for number in range(1, models))]
        change = max(result["largest_change"] for results in gathered.values() for result in results)
        seeds = len(next(iter(gathered.values())))
        orders = "; ".join(", ".join(results[0]["order"]) for results in gathered.values())
        report.lines = [
            *intro, "", *markdown_table(columns, rows), "",
            f"Test accuracy, mean ± standard deviation of {seeds} seeds. In the order {orders}. With masks, the "
            f"largest change of any logit is {change:.1g} (float32 rounding).",
        ]  # fmt: skip
        report.figures["accuracy over the number of models"] = figure_of(panels, "models in one pass", "test accuracy")
    return report


def _masking(records: Records) -> Report:
    full = ["class-full", *(f"memory-full {cells}" for cells in CELLS)]
    masked = ["class", *(f"memory {cells}" for cells in CELLS)]
    intro = [INTRO["masking"]]
    report, found = accuracy_report(records, "Masking", intro, [*full, *masked])
    lines = {
        "mask": list(zip(masked, (0, *CELLS), strict=True)),
        "full attention": list(zip(full, (0, *CELLS), strict=True)),
    }
    both = {row: cells for row, cells in found.items() if set(cells) & set(full) and set(cells) & set(masked)}
    rows = []
    for (backbone, name), cells in both.items():
        for one, two in zip(full, masked, strict=True):
            if one in cells and two in cells:
                link = compare_pair((one, cells[one].result), (two, cells[two].result))
                if link is not None:
                    rows.append(
                        [backbone, name, f"{one} − {two}", f"{link.difference:+.3f} ± {link.error:.3f}", link.seeds]
                    )
    if rows:
        report.lines += [
            "",
            "What full attention gains:",
            "",
            *markdown_table(["backbone", "set", "", "difference", "seeds"], rows),
        ]
    if found:
        report.figures["accuracy over memory cells"] = figure_of(
            panels_of(found, lines), "memory cells (0: none)", "test accuracy"
        )
    return report


def _fork(records: Records) -> Report:
    names = [method.name for method in FORKED]
    intro = [INTRO["fork"]]
    report, found = accuracy_report(records, "Forks", intro, names)
    lines: dict[str, list[tuple[str, float]]] = {"memory 5": [("memory 5", 0.0)], "side 2": [], "side 8": []}
    for method in FORKED:
        if method.fork is not None:
            lines[method.name.partition(",")[0]].append((method.name, method.fork))
    for places in lines.values():
        places.append(("head", 1.0))
    if found:
        panels = panels_of(found, lines)
        report.figures["accuracy over the fork"] = figure_of(
            panels, "fork, as a fraction of the depth", "test accuracy"
        )
    return report


def _extension(records: Records) -> Report:
    intro = [INTRO["extension"]]
    found = records.current("extension")
    report = Report("Extension: does a parent help?", intro, used=found)
    rows, panels = [], {}
    for record in found:
        key, child = record.key, ("classes", "groups")[record.key["number"]]
        test_images = record.result["test_images"]
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for size, cases in record.result["sizes"].items():
            for case, result in cases.items():
                test = result["test"]
                method, _, parent = case.partition(", ")
                alone = cases[f"{method}, alone"]
                link = compare_pair(
                    (case, {**result, "test_images": test_images}), ("alone", {**alone, "test_images": test_images})
                )
                gain = "" if link is None or parent == "alone" else f"{link.difference:+.3f} ± {link.error:.3f}"
                rows.append(
                    [
                        key["backbone"],
                        key["sets"][0],
                        child,
                        size,
                        method,
                        parent,
                        f"{mean(test):.3f} ± {spread(test):.3f}",
                        gain,
                    ]
                )
                lines.setdefault(case, []).append((float(size), mean(test), spread(test)))
                report.rows.append({
                    "backbone": key["backbone"], "set": key["sets"][0], "child": child, "images": int(size),
                    "method": method, "parent": parent, "accuracy": round(mean(test), 4),
                    "spread": round(spread(test), 4), "seeds": len(test),
                    "gain": "" if link is None else round(link.difference, 4),
                    "error": "" if link is None else round(link.error, 4),
                })  # fmt: skip
        panels[f"{key['sets'][0]}: {child}, {key['backbone']}"] = lines
    if rows:
        columns = ["backbone", "set", "child", "training images", "method", "parent", "test accuracy", "gain"]
        report.lines = [
            *intro, "", *markdown_table(columns, rows), "",
            "`gain`: over the same method alone, same seeds and images, ± standard error.",
        ]  # fmt: skip
        report.figures["accuracy over training images"] = figure_of(
            panels, "training images of the child", "test accuracy", log=True
        )
    return report


def _models(records: Records) -> Report:
    names = ["head", "class", "memory 5", "side 8"]
    intro = [INTRO["models"]]
    report, found = accuracy_report(records, "Backbones", intro, names)
    backbones = sorted({backbone for backbone, _ in found})
    shared = (
        set.intersection(*({name for one, name in found if one == backbone} for backbone in backbones))
        if found
        else set()
    )
    if shared and len(backbones) > 1:
        rows = []
        for backbone in backbones:
            cells = [found[backbone, name] for name in sorted(shared)]
            means = [
                f"{mean(mean(row[method].result['test']) for row in cells):.3f}"
                if all(method in row for row in cells)
                else NOT_RUN
                for method in names
            ]
            rows.append([backbone, len(cells), *means])
        report.lines += [
            "",
            "Means over the sets that all backbones were measured on:",
            "",
            *markdown_table(["backbone", "sets", *names], rows),
        ]
    return report


def _stability(records: Records) -> Report:
    intro = [INTRO["lr-stability"]]
    found = [one for one in records.current("accuracy") if not one.result["test"] and len(one.result["scores"]) >= 5]
    report = Report("Stability over learning rates", intro, used=found)
    rows: list[list[Any]] = []
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for record in found:
        scores = {float(rate): some for rate, some in record.result["scores"].items()}
        middle = sorted(scores)[len(scores) // 2]
        cells = [f"{mean(scores[rate]):.3f} ± {spread(scores[rate]):.3f}" for rate in sorted(scores)]
        rows.append([record.key["backbone"], record.key["sets"][0], record.method, f"{middle:g}", *cells])
        points = [(rate / middle, mean(some), spread(some)) for rate, some in scores.items()]
        panels.setdefault(f"{record.key['sets'][0]}, {record.key['backbone']}", {})[record.method] = points
        report.rows += [
            {"backbone": record.key["backbone"], "set": record.key["sets"][0], "method": record.method, "lr": rate,
             "accuracy": round(mean(some), 4), "spread": round(spread(some), 4), "seeds": len(some)}
            for rate, some in scores.items()
        ]  # fmt: skip
    if rows:
        columns = ["backbone", "set", "method", "middle rate", "÷ 100", "÷ 10", "× 1", "× 10", "× 100"]
        report.lines = [*intro, "", *markdown_table(columns, rows)]
        report.figures["accuracy over learning rates"] = figure_of(
            panels, "learning rate ÷ the middle one", "held-out accuracy", log=True
        )
    return report


REPORTS: dict[str, Callable[[Records], Report]] = {
    "table2": _table2,
    "naive-concat": _naive,
    "masking": _masking,
    "fork": _fork,
    "extension": _extension,
    "table4": _table4,
    "lr-stability": _stability,
    "models": _models,
    "table5": _table5,
}
