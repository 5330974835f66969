"""How far a task's answers can be relied on: calibration, images of other sets, tasks that are not told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import format_count, make_table
from memoro.data import ImageSet, Loader, Splits, load_data
from memoro.data.annotations import left_out
from memoro.data.unlabelled_set import load_any
from memoro.engine.answers import Outputs, Recognition
from memoro.engine.composition import Composition, compose
from memoro.engine.featurestore import default_folder
from memoro.engine.streams import pool_pass
from memoro.errors import DataError
from memoro.evaluation.evaluate import load_test_images
from memoro.evaluation.logits import collect_logits
from memoro.evaluation.metrics import COLUMNS, measure, measure_task
from memoro.evaluation.photographs import find_photographs, read_photographs
from memoro.evaluation.training_images import learned_from
from memoro.plots import drawable, save_figure
from memoro.tasks.calibration import decide_unseen, describe_calibration, fit_calibration
from memoro.tasks.familiarity import FALSE_ALARMS, fit_familiarity
from memoro.tasks.task import Task
from memoro.tasks.taskspec import ReadOut

COVERAGES = (1.0, 0.9, 0.8, 0.7, 0.5)
"""Shares of the images, the surest answers first, over which accuracy is reported."""
RECALL = 0.95


def collect_outputs(
    model: Composition, images: ImageSet, names: Sequence[str], *, batch_size: int = 32, workers: int | None = None
) -> tuple[Outputs, Tensor]:
    """What tasks give for all images of a set, and the targets; one pass for each preprocessing."""
    logits: dict[str, Tensor] = {}
    recognition: dict[str, Recognition] = {}
    targets = torch.empty(0, device="cpu")
    for preprocessing, together in model.passes(names).items():
        known = [name for name in together if model.tasks[name].spec.familiarity is not None]

        def answer(pixels: Tensor, together: list[str] = together, known: list[str] = known) -> list[Tensor]:
            out = model.run(pixels, together)
            return [
                *(out.logits[name] for name in together),
                *(torch.stack(out.recognition[name], dim=1) for name in known),
            ]

        loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
        found, targets = collect_logits(answer, model.backbone, loader)
        logits |= dict(zip(together, found, strict=False))
        recognition |= {name: Recognition(*one.T) for name, one in zip(known, found[len(together) :], strict=True)}
    return Outputs(logits, recognition), targets


def auroc(own: Tensor, other: Tensor) -> float:
    """How often one of a task's own images has a higher score than one of another set; equal scores count half."""
    ranked = other.double().sort().values
    below = torch.searchsorted(ranked, own.double()) + torch.searchsorted(ranked, own.double(), right=True)
    return float(below.double().mean() / 2 / len(ranked))


def false_positives(own: Tensor, other: Tensor, recall: float = RECALL) -> float:
    """The share of another set's images above the score that `recall` of a task's own images reach."""
    limit = own.double().quantile(1 - recall)
    return float((other.double() >= limit).double().mean())


def evaluate_trust(
    backbone: Backbone,
    models: Sequence[Task],
    data: Any,
    others: Mapping[str, Any],
    *,
    false_alarms: float = FALSE_ALARMS,
    batch_size: int = 32,
    workers: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    **reading: Any,
) -> dict[str, dict[str, Any]]:
    """For each task: calibration on the test images of its own `data`, and how well it tells `others` from them.

    Images whose familiarity is below `false_alarms` count as unfamiliar.
    `reading` are options of `load_data`; `label_column` is for a task's own images only.
    """
    model = compose(backbone, models)
    sources = dict(data) if type(data) is dict else dict.fromkeys([one.name for one in models], data)
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    unlabelled = {name: value for name, value in reading.items() if name in {"image_column", "allow_absolute"}}
    unlike = {}
    for other, place in others.items():
        images, skipped = load_any(place, workers, **unlabelled)
        if skipped:
            log(f"note: {other}: {left_out(skipped, 'image', ' that cannot be read')}.")
        unlike[other] = collect_outputs(model, images, list(sources), **how)[0]
    results = {}
    for name, source in sources.items():
        _, images, *_ = load_test_images(source, model.tasks[name], workers=workers, **reading)
        own, targets = collect_outputs(model, images, [name], **how)
        results[name] = _calibration_of(model.tasks[name], own.logits[name], targets)
        if name in own.recognition:
            shares, described = own.recognition[name].familiarity, model.tasks[name].spec.familiarity
            if described is not None and described.images * false_alarms < 1:
                log(
                    f"note: {name}: familiarity is based on {format_count(described.images, 'image')}, too few for a "
                    f"false-alarm rate of {false_alarms:g}: only images more unusual than all of them are unfamiliar."
                )
            results[name] |= {
                "false_alarms": float((shares < false_alarms).double().mean()),
                "histogram": _histogram(shares),
            }
        results[name]["others"] = {}
        for other, found in unlike.items():
            results[name]["others"][other] = _compare(model.tasks[name], own, found)
            if name in found.recognition:
                shares = found.recognition[name].familiarity
                unfamiliar = float((shares < false_alarms).double().mean())
                results[name]["others"][other] |= {"unfamiliar": unfamiliar, "histogram": _histogram(shares)}
    return results


def name_sets(places: Sequence[str]) -> dict[str, str]:
    """Sets by name: that of the file or folder, or the whole path where several have the same name."""
    stems = [Path(place).stem for place in places]
    return {stem if stems.count(stem) == 1 else place: place for stem, place in zip(stems, places, strict=True)}


def _calibration_of(task: Task, logits: Tensor, targets: Tensor) -> dict[str, Any]:
    """Of a softmax task: accuracy, calibration error before and after, accuracy over coverage, reliability."""
    found: dict[str, Any] = {"images": len(targets)}
    if task.kind != "softmax":
        return found
    measured = measure_task(task, logits, targets)
    found["accuracy"] = measured["accuracy"]
    if task.spec.calibration is None:
        found["calibration_error_before"] = measured["calibration_error"]
    else:
        found |= {key: measured[key] for key in ("calibration_error_before", "calibration_error")}
    sure, answer = task.probabilities(logits).max(dim=-1)
    right = (answer == targets).double()
    order = sure.argsort(descending=True)
    found["accuracy_over_coverage"] = {
        f"{share:g}": float(right[order[: max(1, round(share * len(order)))]].mean()) for share in COVERAGES
    }
    bins = (sure * 10).long().clamp(max=9)
    found["reliability"] = [
        {"probability": float(sure[bins == at].mean()), "accuracy": float(right[bins == at].mean()), "images": count}
        for at in range(10)
        if (count := int((bins == at).sum()))
    ]
    return found


def _compare(task: Task, own: Outputs, other: Outputs) -> dict[str, Any]:
    name, found = task.name, {"images": len(other.logits[task.name])}
    scores: dict[str, tuple[Tensor, Tensor]] = {}
    if name in own.recognition:
        # The familiarity of most other images is 0: among equals, the score decides.
        first, second = (
            one.familiarity.double() + 1e-7 * one.score for one in (own.recognition[name], other.recognition[name])
        )
        scores["familiarity"] = first, second
    if task.kind == "softmax":
        first, second = (task.head_kind.probabilities(one.logits[name]).amax(dim=-1) for one in (own, other))
        scores["softmax"] = first, second
    record: dict[str, Any] = {
        how: {"auroc": auroc(*pair), "false_positives_at_95": false_positives(*pair)} for how, pair in scores.items()
    }
    return {**found, **record}


def _histogram(shares: Tensor) -> list[int]:
    return (shares * 20).long().clamp(max=19).bincount(minlength=20).tolist()


def trust_tables(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The results of `evaluate_trust`: a table about the task's own images, one about those of other sets."""

    def show(record: Mapping[str, Any], key: str) -> str:
        return f"{record[key]:.4f}" if key in record else "-"

    keys = {
        "calibration_error_before": "calib. error before",
        "calibration_error": "after",
        "false_alarms": "unfamiliar",
    }
    own = [
        [name, str(found["images"]), *(show(found, key) for key in keys), _coverage(found)]
        for name, found in results.items()
    ]
    columns = ["task", "images", *keys.values(), "accuracy of the surest"]
    tables = [make_table(columns, own, "Own images", left=1)]
    rows = [
        [
            *(name, other, str(record["images"])),
            show(record, "unfamiliar"),
            *(show(record.get("familiarity", {}), key) for key in ("auroc", "false_positives_at_95")),
            show(record.get("softmax", {}), "auroc"),
        ]
        for name, found in results.items()
        for other, record in found["others"].items()
    ]
    heads = ["task", "other set", "images", "unfamiliar", "AUROC", "FPR at 95 %", "softmax AUROC"]
    return [*tables, *([make_table(heads, rows, "Images of other sets", left=2)] if rows else [])]


def _coverage(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{float(k):.0%} {v:.3f}" for k, v in found.get("accuracy_over_coverage", {}).items()) or "-"


def draw_trust(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each task: its reliability, and how familiar its own and other images are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 2, squeeze=False)
    for (left, right), (name, found) in zip(axes, results.items(), strict=True):
        points, edges = found.get("reliability", []), [at / 20 for at in range(21)]
        if points:
            sizes = [20 + 180 * point["images"] / found["images"] for point in points]
            xs, ys = ([point[key] for point in points] for key in ("probability", "accuracy"))
            left.plot([0, 1], [0, 1], color="#bbb", linewidth=1)
            left.plot(xs, ys, color="#1a73e8", linewidth=1)
            left.scatter(xs, ys, sizes, color="#1a73e8")  # the area of a dot is the number of images
            limits = (-0.03, 1.03)
            left.set_title(drawable(f"{name}: reliability"), parse_math=False)
            left.set(xlabel="probability", ylabel="accuracy", xlim=limits, ylim=limits)
        else:
            left.axis("off")
        if "histogram" in found:
            right.stairs(_shares(found["histogram"]), edges, label="own images", fill=True, color="#ccc")
            for other, record in found["others"].items():
                right.stairs(_shares(record["histogram"]), edges, label=drawable(other), linewidth=1.5)
            right.set_title(drawable(f"{name}: familiarity"), parse_math=False)
            right.set(xlabel="familiarity", ylabel="share of images", xlim=(-0.01, 1.01))
            for text in right.legend().get_texts():
                text.set_parse_math(False)
        else:
            right.axis("off")
    save_figure(figure, path, dpi=110)


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / max(1, sum(counts)) for count in counts]


def verify_tasks(model: Composition, data: Mapping[str, Any], **reading: Any) -> dict[str, dict[str, Any]]:
    """For each softmax task with data: its accuracy alone, composed, and with routing.

    Then the image goes to the task with the highest score; the answer counts if task and label are right. `reading` are
    options of `load_data`.
    """
    candidates = [name for name, task in model.tasks.items() if task.spec.familiarity is not None]
    results = {}
    for name, source in data.items():
        if name not in model.names:
            raise DataError(f"no task {name!r} among {', '.join(model.names)}: write NAME=DATA with one of these.")
        if model.tasks[name].kind != "softmax":
            raise DataError(
                f"{name!r} is not a single-label task, so its accuracy cannot be compared: remove it from --data."
            )
        _, images, split, _ = load_test_images(source, model.tasks[name], **reading)
        alone, targets = collect_outputs(model.alone(name), images, [name])
        together, _ = collect_outputs(model, images, model.names)
        right = [one.logits[name].argmax(dim=-1) == targets for one in (alone, together)]
        results[name] = {
            "split": split,
            "images": len(targets),
            "alone": float(right[0].double().mean()),
            "composed": float(right[1].double().mean()),
        }
        if name in candidates:
            scores = torch.stack([together.recognition[other].score for other in candidates])
            found = scores.argmax(dim=0) == candidates.index(name)
            results[name] |= {
                "right_task": float(found.double().mean()),
                "routed": float((found & right[1]).double().mean()),
            }
    return results


def verify_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = {"alone": "alone", "composed": "composed", "routed": "routed", "right_task": "right task"}
    rows = [
        [name, str(found["images"]), *(f"{found[key]:.4f}" if key in found else "-" for key in columns)]
        for name, found in results.items()
    ]
    return make_table(["task", "images", *columns.values()], rows, "Accuracy", left=1)


def calibrate(
    backbone: Backbone,
    task: Task,
    data: Any,
    *,
    parents: Sequence[Task] = (),
    others: Any = None,
    batch_size: int = 32,
    workers: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    **reading: Any,
) -> None:
    """Gives a task a new calibration and familiarity, from images that look like those it is for.

    The calibration is fitted on the validation split, or on all images of `data` where there is none, never on a test
    split. Where the task was trained on some of those images, it is left as it is, and so is a familiarity that the
    task has. `others` are ordinary photographs, from which it is learned what is unfamiliar (see
    `find_photographs`). `reading` are options of `load_data`.
    """
    model = compose(backbone, [task, *parents])
    labels: dict[str, Any] = {"kind": task.kind, "labels": task.labels, "drop_unknown": True, "task": task.name}
    labels |= reading
    splits = data
    if not isinstance(data, Splits):
        splits = load_data(data, **labels, val_fraction=0, workers=workers, quiet=True)
    (preprocessing,) = model.passes([task.name])
    parts = [images for images in (splits.train, splits.val) if images is not None]
    if not parts:
        raise DataError(
            f"{splits.name} has only a test split, which is not used for calibration. Rename test/ to train/ to use it."
        )
    reason = learned_from(task, parts[-1], splits, parents)
    if reason is not None and task.spec.familiarity is not None:
        log(f"{reason}: nothing is changed. Pass images that the task was not trained on.")
        return
    statistics, targets = [], []
    first = ReadOut.of(backbone.anatomy).from_layer
    for images in parts:
        loader = Loader(images, preprocessing, batch_size=batch_size, workers=workers)
        (found,), own = collect_logits(lambda x: [pool_pass(backbone.anatomy, x, first)], backbone, loader)
        statistics.append(found)
        targets.append(own)
    classes = torch.cat(targets) if task.kind == "softmax" else None
    folder = default_folder()
    if others is None:
        photographs = find_photographs(backbone, preprocessing, folder)
    else:
        photographs = read_photographs(backbone, preprocessing, others, folder, workers=workers)
    familiarity = fit_familiarity(torch.cat(statistics), classes, photographs)
    changes: dict[str, Any] = {}
    facts = dict(task.spec.training)
    if familiarity is None:
        log("familiarity was not updated: there are too few images, or the backbone's features are out of range.")
    else:
        changes["familiarity"] = familiarity
        facts["familiarity"] = f"{familiarity.images} images of {splits.name}, out of fold"
        known = task.spec.familiarity
        before = "" if known is None else f" (before: {known.images})"
        log(f"familiarity: from {format_count(familiarity.images, 'image')}{before}")
    if reason is not None:
        log(f"{reason}: the calibration stays as it is. To calibrate, pass images that the task was not trained on.")
    else:
        answers, held = collect_outputs(model, parts[-1], [task.name], batch_size=batch_size, workers=workers)
        calibration = fit_calibration(task.kind, answers.logits[task.name], held, splits.name)
        if calibration is None:
            reason = describe_calibration(None, len(held)).removeprefix("none: ")
            log(f"the calibration stays as it is: {reason}.")
        else:
            changes["calibration"] = calibration
            facts["calibration"] = describe_calibration(calibration, len(held))
            log(f"calibration: from {format_count(calibration.images, 'image')} (the task must not be trained on them)")
            former = measure_task(task, answers.logits[task.name], held)
            decided = decide_unseen(task.kind, answers.logits[task.name], held)
            after = {} if decided is None else measure(task.kind, task.labels, decided, held)
            for name in ("calibration_error", "f1"):
                if name in former and name in after:
                    log(
                        f"{COLUMNS[name]}: {former[name]:.3f} before, {after[name]:.3f} after (each quarter of the "
                        "images is evaluated with a calibration fitted on the others)"
                    )
    if changes:
        task.update_spec(**changes, training=facts)
