"""The report of a training or an evaluation: one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from memoro.backbones import Backbone
from memoro.backbones.load import TINY, address_of
from memoro.console import format_bytes, format_count, quoted
from memoro.data import ImageSet, Splits
from memoro.data.screening import near_duplicates
from memoro.engine.composition import Composition
from memoro.errors import ImageError
from memoro.evaluation.metrics import COLUMNS, decide, reported, shown_metrics
from memoro.files import write_whole
from memoro.heads import Mistake, confusion
from memoro.pages.charts import bar_chart, histogram_chart, line_chart, matrix_chart, scatter_chart
from memoro.pages.elements import Html, fold_rows, join, picture, prose, render_page, table, table_of, tag
from memoro.tasks.calibration import decide_unseen
from memoro.tasks.familiarity import FALSE_ALARMS
from memoro.tasks.record import finite_number, short_facts
from memoro.tasks.spec import Model
from memoro.tasks.task import Task

MISTAKES = 12
"""Images in the gallery."""
DUPLICATES = 6
"""Pairs of near-duplicates that are shown; the others are listed."""
CLASSES = 15
"""The most classes in a confusion matrix; of more, those with the most mistakes are shown."""
DOTS = 1500
"""The most dots in a scatter plot; with more, they would take up most of the page."""


@dataclass(frozen=True)
class TaskReport:
    """What the page says about one task. What is empty is left out."""

    task: Model
    metrics: Mapping[str, Any]
    """Their `split` names the images that `logits` and `targets` belong to."""
    logits: Tensor
    targets: Tensor
    images: ImageSet
    splits: Splits
    notes: Sequence[str] = ()
    model: Composition | None = None
    """Contains the task, to show where it looked; None if it is not a Task."""
    history: Sequence[Mapping[str, Any]] = ()
    """The chosen run, epoch by epoch; empty for an evaluation."""
    settings: Table | None = None
    """The settings that were compared."""
    file: Path | None = None


def write_report(path: Path, title: str, backbone: Backbone, reports: Sequence[TaskReport]) -> Path:
    """Writes the page, a part for each task, and returns its path."""
    parts: list[Html] = []
    if len(reports) > 1:
        links = [tag("a", report.task.name, href=f"#task-{at}") for at, report in enumerate(reports)]
        parts += [tag("h1", title), tag("nav", *links)]
    for at, report in enumerate(reports):
        parts.append(tag("section", join(_task_parts(report, backbone)), id=f"task-{at}"))
    parts.append(tag("p", "Written by memoro.", class_="soft"))
    write_whole(path, render_page(title, *parts).encode())
    return path


def _task_parts(report: TaskReport, backbone: Backbone) -> Iterator[Html]:
    task, split = report.task, report.metrics["split"]
    yield tag("h1", task.name)
    name, count = report.splits.name, format_count(report.metrics["images"], "image")
    parts = {
        "test": "the test split",
        "val": "the validation split",
        "train": "the training split",
        "all": "all images",
    }
    on = f"on {parts[split]}" if split in parts else f"by {split}"
    text = f"Trained on {name}. Measured {on} ({count})" if report.history else f"Evaluated {on} of {name} ({count})"
    yield tag("p", f"{text}. Backbone: {backbone}.")
    figures = shown_metrics(reported(report.metrics)).items()
    shown = (tag("div", tag("b", f"{value:.4g}"), COLUMNS[name]) for name, value in figures)
    yield tag("div", *shown, class_="figures")
    if report.notes:
        yield tag("ul", *(tag("li", prose(note)) for note in report.notes))
    yield from _curves(report)
    yield from _confusions(report)
    yield from _classes(report)
    yield from _gallery(report)
    yield from _familiarity(report)
    yield from _left_out(report)
    yield from _duplicates(report)
    if report.settings is not None:
        yield tag("h2", "Settings tried")
        yield tag("p", "All were trained in the same passes of the backbone; the best was kept.")
        yield table_of(report.settings)
    yield from _facts(report, backbone)
    yield from _usage(report, backbone)


def _curves(report: TaskReport) -> Iterator[Html]:
    names = dict.fromkeys(name.partition("_")[2] for entry in report.history for name in entry if "_" in name)
    charts = []
    for name in [name for name in names if name in COLUMNS and name in {"loss", report.task.head_kind.main_metric}]:
        lines = []
        for split, look in (("train", "dashed"), ("val", ""), ("fold", "")):
            key = f"{split}_{name}"
            points = [(float(entry["epoch"]), float(entry[key])) for entry in report.history if key in entry]
            lines += [(look, points)] if points else []
        if lines:
            chart = line_chart(lines, "epoch", COLUMNS[name])
            charts.append(tag("figure", tag("figcaption", COLUMNS[name]), chart))
    if charts:
        yield tag("h2", "Training")
        yield tag("div", *charts, class_="charts")
        of = {"val_loss": "validation images", "fold_loss": "images that a fold held out (mean over the folds)"}
        solid = [f" Solid: {text}." for name, text in of.items() if any(name in entry for entry in report.history)]
        yield tag("p", f"Dashed: training images.{''.join(solid)}", class_="soft")


def _confusions(report: TaskReport) -> Iterator[Html]:
    task = report.task
    if task.head_kind.has_numbers:
        yield tag("h2", "Predicted and true numbers")
        charts = []
        for at, label in enumerate(task.labels):
            points = list(zip(report.targets[:DOTS, at].tolist(), report.logits[:DOTS, at].tolist(), strict=True))
            chart = scatter_chart(points, f"true {label}", f"predicted {label}")
            charts.append(tag("figure", tag("figcaption", f"{label}: predicted over true"), chart))
        yield tag("div", *charts, class_="charts")
        some = f" The first {DOTS:,} images." if len(report.targets) > DOTS else ""
        yield tag("p", f"On the dashed line, predictions are exact.{some}", class_="soft")
    if not task.head_kind.has_classes:
        return
    matrix = confusion(report.logits, report.targets)
    labels, counts, note = list(task.labels), matrix.tolist(), ""
    if len(labels) > CLASSES:
        wrong = matrix.clone().fill_diagonal_(0)
        chosen = (wrong.sum(0) + wrong.sum(1)).argsort(descending=True, stable=True)[: CLASSES - 1].sort().values
        note = f" The {len(chosen)} classes with the most mistakes, of {len(labels)}."
        counts, labels = matrix[chosen][:, chosen].tolist(), [labels[at] for at in chosen.tolist()]
    yield tag("h2", "Confusion matrix")
    yield tag("div", matrix_chart(counts, labels), class_="scroll", tabindex=0)
    text = f"Rows: the true class. Columns: the predicted one. Green is right, red is wrong.{note}"
    yield tag("p", text, class_="soft")


def _classes(report: TaskReport) -> Iterator[Html]:
    head, logits, calibration = report.task.head_kind, report.logits, report.task.spec.calibration
    limits = (0.5,) if calibration is None else calibration.thresholds
    if calibration is not None and report.history and report.metrics["split"] != "test":  # fitted on these answers
        unseen = decide_unseen(head.kind, logits, report.targets) if limits else None
        logits, calibration = logits if unseen is None else unseen, None
    columns, rows = head.figures(report.task.labels, *decide(head.kind, logits, calibration), report.targets.cpu())
    yield tag("h2", f"Each {head.noun}")
    if not head.has_classes and not head.has_numbers:
        low, high = f"{min(limits):.2f}", f"{max(limits):.2f}"
        least = f"at least {low}" if low == high else f"at least its threshold, from {low} to {high}"
        yield tag("p", f"A label is predicted if its probability is {least}.", class_="soft")
    yield fold_rows(columns, rows, 20, "row", left=2 if head.has_classes else 1)


def _gallery(report: TaskReport) -> Iterator[Html]:
    task = report.task
    numbers = task.head_kind.has_numbers
    yield tag("h2", "The largest errors" if numbers else "The most confident mistakes")
    answers = decide(task.kind, report.logits, report.task.spec.calibration)
    count, mistakes = task.head_kind.mistakes(task.labels, *answers, report.targets.cpu(), MISTAKES)
    if not mistakes:
        yield tag("p", f"There is no mistake among {format_count(len(report.targets), 'image')}.")
        return
    text = "" if numbers else f"{count:,} of {format_count(len(report.targets), 'image')} were answered wrongly. "
    cards = [_card(report, mistake) for mistake in mistakes]
    notes = list(filter(None, (note for _, note in cards)))
    if report.model is None:
        text += "What is not a task has no attention of its own to show."
    else:
        text += "Beside each image, where the task looked: yellow is the most, dark blue none."
        text += f" {notes[-1]}" if notes else ""
    if report.metrics["split"].endswith("folds"):
        text += " Each image was answered by a run that had not seen it; the attention is that of the final task."
    yield tag("p", text)
    yield tag("div", *(card for card, _ in cards), class_="cards wide")


def _card(report: TaskReport, mistake: Mistake) -> tuple[Html, str | None]:
    """The card of a mistake, and what a reader has to know about its map."""
    preprocessing, images = report.task.spec.preprocessing, report.images
    where, note = images.where(mistake.index), None
    try:
        image = images.open(mistake.index, draft=512 if preprocessing is None else max(512, preprocessing.draft or 512))
    except ImageError as error:
        shown = [tag("p", prose(str(error)), class_="soft")]
    else:
        shown = [picture(image, f"{where}, true: {mistake.true}")]
        if report.model is not None:
            found = report.model.explain(image, report.task.name)
            shown.append(picture(found.overlay(), "where the task looked"))
            note = found.note
    lines = [
        tag("div", "predicted ", tag("b", mistake.predicted, class_="bad")),
        tag("div", "true ", tag("b", mistake.true)),
        tag("div", where, class_="soft"),
    ]
    return tag("div", tag("div", *shown, class_="pair"), *lines, class_="card"), note


def _familiarity(report: TaskReport) -> Iterator[Html]:
    found = report.task.spec.familiarity
    if found is None:
        return
    yield tag("h2", "Familiar images")
    yield histogram_chart(found.held_out.tolist(), found.limit(FALSE_ALARMS), "how strange an image is")
    few = found.images * FALSE_ALARMS < 1
    yield tag(
        "p",
        f"How strange {format_count(found.images, 'held-out image')} of the task look. Images to the right of "
        "the dashed line are marked as unfamiliar: "
        f"{'none' if few else f'about {FALSE_ALARMS:.0%}'} of the task's own images.",
        class_="soft",
    )
    if found.coarse:
        why = "few" if few else "diverse"
        yield tag("p", f"This is coarse: the images are too {why} to tell well what is unfamiliar.")


def _left_out(report: TaskReport) -> Iterator[Html]:
    skipped = report.splits.skipped
    yield tag("h2", "Images left out")
    if skipped:
        yield tag("p", f"{format_count(len(skipped), 'image')} could not be read.")
        yield fold_rows(["image", "why"], [[where, prose(why)] for where, why in skipped], 10, "image", left=2)
    else:
        yield tag("p", "None: all images could be read.")


def _duplicates(report: TaskReport) -> Iterator[Html]:
    """Near-duplicates across splits: a score on images that were learned from is too good."""
    splits = report.splits
    sets = {"train": splits.train, "validation": splits.val, "test": splits.test}
    known = {name: images for name, images in sets.items() if images is not None}
    pairs_of = (("test", "train"), ("validation", "train"), ("test", "validation"))
    compared = [(a, b) for a, b in pairs_of if a in known and b in known]
    if not compared:
        return
    yield tag("h2", "Near-duplicates across splits")
    rows: list[list[str]] = []
    cards: list[Html] = []
    for first, second in compared:
        pairs = near_duplicates(known[first], known[second])
        if pairs is None:
            yield tag("p", f"{first} and {second} were not compared: the images were not screened, or are too many.")
        for a, b, alike in pairs or ():
            places = [(first, known[first], a), (second, known[second], b)]
            rows.append([*(f"{name}: {images.where(at)}" for name, images, at in places), f"{alike:.2f}"])
            if len(cards) < DUPLICATES:
                cards.append(_pair(places))
    if rows:
        yield tag(
            "p",
            f"{format_count(len(rows), 'pair')} of images in different splits look the same. Metrics are too "
            "optimistic if a test image is also in the training split: remove one image of each pair.",
        )
        yield tag("div", *cards, class_="cards wide")
        yield fold_rows(["image", "looks like", "similarity"], rows, DUPLICATES, "pair", left=2)
    else:
        yield tag("p", f"None found between {', '.join(f'{a} and {b}' for a, b in compared)}.")


def _pair(places: Sequence[tuple[str, ImageSet, int]]) -> Html:
    shown, lines = [], []
    for name, images, at in places:
        try:
            shown.append(picture(images.open(at, draft=256), f"{name}: {images.where(at)}"))
        except ImageError as error:
            shown.append(tag("p", prose(str(error)), class_="soft"))
        lines.append(tag("div", f"{name}: ", tag("span", images.where(at), class_="soft")))
    return tag("div", tag("div", *shown, class_="pair"), *lines, class_="card")


def _facts(report: TaskReport, backbone: Backbone) -> Iterator[Html]:
    task, training = report.task, dict(report.task.spec.training)
    sizes = [(name, getattr(report.splits, name)) for name in ("train", "val", "test")]
    counts = [f"{len(images):,} {name}" for name, images in sizes if images is not None]
    phases = training.pop("phases", None)
    rows: list[tuple[str, object]] = [
        ("data", report.splits.name),
        ("images", ", ".join(counts)),
        ("labels", _some(task.labels)),
        ("backbone", f"{backbone}, fingerprint {backbone.fingerprint.short}"),
    ]
    if isinstance(task, Task):
        extends = ", ".join(parent.name for parent in task.extends)
        rows += [("cells per layer", task.cells), ("rank", task.rank), ("from layer", task.from_layer)]
        rows.append(("extends", extends))
    if task.spec.preprocessing is not None and task.spec.preprocessing.size is not None:
        rows.append(("input", "{} x {} pixels".format(*task.spec.preprocessing.size)))
    given = {"data", "images", "seconds"} if report.history else {"seconds"}
    own = {name: value for name, value in short_facts(training).items() if name not in given}
    names = {"data": "trained on", "images": "training images"}
    rows += [
        (names.get(name, name.replace("_", " ")), f"{v:,}" if isinstance(v, int) else v) for name, v in own.items()
    ]
    yield tag("h2", "Training settings" if report.history else "Evaluation settings")
    yield table([], [row for row in rows if row[1] != ""], left=2)
    known = phases if phases and isinstance(phases, dict) else {"training": training.get("seconds")}  # any JSON
    numbers = {str(name): finite_number(value) for name, value in known.items()}
    total = sum(value for value in numbers.values() if value)
    spent = {name: value for name, value in numbers.items() if value and value >= 0.005 * total}
    if report.history and spent:
        yield tag("h2", "Time")
        yield tag("p", f"{total:.3g} seconds in all.")
        yield bar_chart(spent, " s")


def _usage(report: TaskReport, backbone: Backbone) -> Iterator[Html]:
    if not report.history:
        return
    yield tag("h2", "How to use it")
    if report.file is None:
        how = [tag("code", "memoro.save_task(task, FILE)"), " does it."] if isinstance(report.task, Task) else []
        yield tag("p", "The task was not written to a file. ", *how)
        return
    task, file = report.task, report.file
    parents = [parent.name for parent in task.extends]
    yield tag("p", f"The task is in {file} ({format_bytes(file.stat().st_size)}).")
    if not isinstance(task, Task):
        return
    if parents:
        yield tag("p", f"It extends {', '.join(parents)}: give the files of these tasks too.")
    files = [*(f"{name}.safetensors" for name in parents), str(file)]
    options = [
        *(word for name in files for word in ("-t", name)),
        *([] if backbone.name == TINY else ["-b", address_of(backbone.name)]),
    ]
    commands = (
        ["memoro", "predict", "photo.jpg", *options],
        ["memoro", "explain", "photo.jpg", *options, "-o", "overlay.png"],
        ["memoro", "serve", "--open", *options],
    )
    lines = (
        "import memoro",
        "",
        f"backbone = memoro.load_backbone({address_of(backbone.name)!r})",
        f"tasks = [memoro.load_task(file) for file in {files!r}]",
        "model = memoro.compose(backbone, tasks)",
        f'model.predict(["photo.jpg"])[0][{task.name!r}]',
    )
    yield tag("pre", join(quoted(*command) for command in commands))
    yield tag("pre", join(lines))


def _some(labels: Sequence[str]) -> str:
    return f"{len(labels)}: {', '.join(labels[:20])}{', …' if len(labels) > 20 else ''}"
