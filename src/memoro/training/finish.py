"""Finishing: trained runs become tasks that are calibrated, described, measured and recorded; the best of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.clock import Phases
from memoro.console import bar
from memoro.data import ImageSet
from memoro.errors import TrainingError
from memoro.evaluation.logits import Batches, collect_logits
from memoro.evaluation.metrics import add_folds, measure, measure_task, recorded, score, warn_of
from memoro.evaluation.training_images import learned_from, sketch_images
from memoro.heads import HEADS
from memoro.tasks.calibration import describe_calibration, fit_calibration
from memoro.tasks.spec import Model
from memoro.tasks.task import Task
from memoro.training.loop import Trainer
from memoro.training.plan import Plan, Setting
from memoro.training.recipe import TrainOptions
from memoro.training.result import SettingRow, TrainResult
from memoro.training.run import LEFT_OUT, Run, build_forward
from memoro.training.statistics import Describer, ReadOuts

SEEN = "none: an earlier training may have seen these images; use memoro calibrate with new ones"
Answers = tuple[Tensor, Tensor]
"""Logits, and the targets of their images."""


def answer_held_out(trainer: Trainer, readouts: ReadOuts) -> None:
    """Fills `Run.answers` of all runs, with one pass over each set of images, and gives their tasks their read-outs.

    For images whose features are kept, read-outs are added afterwards, since those of training images are answers of
    solutions without them. Then tasks get their read-outs, and answer the other images as they will from now on.
    """
    kept = {"fold", "val"}
    by_loader: dict[tuple[bool, int], tuple[Batches, list[tuple[Run, str]]]] = {}
    for run in trainer.runs:
        for split in () if run.diverged else run.evaluated:
            loader = trainer.loaders.evaluation(run, run.evaluated[split], keep=split in kept)
            by_loader.setdefault((split in kept, id(loader)), (loader, []))[1].append((run, split))
    total = sum(len(loader.images) for loader, _ in by_loader.values())
    with bar("evaluating", total, quiet=trainer.options.quiet) as tick:
        for held_out in (True, False):
            for loader, members in (found for (own, _), found in by_loader.items() if own is held_out):
                forward = build_forward(trainer.backbone, [run.task for run, _ in members])
                gather = trainer.processes.all_gather
                logits, _ = collect_logits(forward, trainer.backbone, loader, tick=tick, all_gather=gather)
                for (run, split), out in zip(members, logits, strict=True):
                    images = run.evaluated[split]  # its own targets: other labels may share the loader
                    if held_out and run.regime.readout:
                        out = torch.lerp(out, readouts.answers(run, split, images), run.regime.readout)
                    run.answers[split] = out, images.targets
            for run in trainer.runs if held_out else ():
                if run.regime.readout and run.held_out is None and isinstance(run.task, Task):
                    readouts.solve(run).attach(run.task, run.regime.readout)
    for run in trainer.all_runs:
        if run.regime.readout == 1 and isinstance(run.task, Task):
            (split, images), solved = run.final, readouts.solve(run)
            solved.attach(run.task, 1.0)
            if split == LEFT_OUT:
                run.answers[split] = solved.held_out, images.targets[solved.answered]
            else:
                run.answers[split] = readouts.answers(run, split, images), images.targets


class Finisher:
    """Makes results of runs that are trained and have answered."""

    def __init__(self, backbone: Backbone, readouts: ReadOuts, describer: Describer, options: TrainOptions) -> None:
        self._backbone, self._options = backbone, options
        self._readouts, self._describer = readouts, describer

    def finish(self, runs: Sequence[Run]) -> TrainResult:
        """The result of the last run, after those of its folds if there are any.

        Its metrics are those of its best weights, on images that it did not learn from if there are any.
        """
        *folds, run = runs
        notes, history = run.splits.notes, run.history
        if run.stopped is not None:
            notes = (*notes, run.stopped)
        if run.diverged:
            return TrainResult(cast(Task, run.task), history, {}, self._options.folder, notes)
        task, (split, images) = run.task, run.final
        seen = bool(task.spec.training.keys() - {"seed"})  # it was trained before, on images that may be these
        self._record_training(run)
        self._describer.add_familiarity(run)
        out, targets = run.answers[split]
        fitted_on = split in {"val", LEFT_OUT}
        if folds:
            parts = [fold.answers["fold"] for fold in folds]
            held_out = torch.cat([logits for logits, _ in parts]), torch.cat([own for _, own in parts])
            source = f"{len(folds)} folds"
            add_calibration(task, held_out, source, seen=was_seen(task, run.train))
            history = add_folds(history, [fold.history for fold in folds], [len(own) for _, own in parts])
            if split != "test":
                fitted_on, split, (out, targets) = True, source, held_out
                images = run.train.subset(
                    np.concatenate([fold.held_out for fold in folds if fold.held_out is not None])
                )
        elif run.regime.readout == 1:
            solved = self._readouts.solve(run)
            held_out = solved.held_out, run.train.targets[solved.answered]
            images = run.train.subset(solved.answered.numpy()) if split == LEFT_OUT else images
            add_calibration(task, held_out, LEFT_OUT, seen=was_seen(task, run.train))
        else:
            add_calibration(task, run.answers.get("val"), "validation", seen=seen or was_seen(task, run.splits.val))
        metrics = {"split": split, **measure_task(task, out, targets, fitted_on=fitted_on)}
        task.update_spec(metrics=recorded(task.kind, metrics, out, targets))
        result = TrainResult(cast(Task, task), history, metrics, self._options.folder, notes, out, targets, images)
        return replace(result, notes=(*notes, *self._warn(result)))

    def _record_training(self, run: Run) -> None:
        """Records in the task how it was trained."""
        task, facts = run.task, dict[str, Any]()
        known = task.spec.training  # of an earlier training, or from where the task was made
        if run.history:
            facts = {
                "optimizer": run.recipe.optimizer,
                "lr": run.recipe.lr,
                "batch_size": run.recipe.batch_size,
                "epochs": len(run.history),
                "steps": run.history[-1]["step"],
                "best_epoch": run.best_epoch,
            }
        trained = sum(parameter.numel() for parameter in run.trained.values())
        if run.regime.readout:
            readout = self._readouts.solve(run)
            trained += readout.weight.numel() + readout.bias.numel()
            facts["penalty"] = readout.penalty
        task.update_spec(
            preprocessing=run.preprocessing,
            training={
                "data": run.splits.name,
                "images": len(run.train),
                "regime": run.regime.name,
                "precision": str(self._backbone.dtype).removeprefix("torch."),
                **facts,
                **({"balance": True} if run.recipe.balance else {}),
                "trained_parameters": trained,
                **{name: known[name] for name in ("seed", "history") if name in known},
                **sketch_images(run.train, known),
            },
        )

    def _warn(self, result: TrainResult) -> list[str]:
        """Warnings, if the metrics call for them; the user sees them too."""
        found = [warn_of(result.metrics, balanced=bool(result.task.spec.training.get("balance")))]
        if result.metrics["split"] != "train":
            learned = learned_from(result.task, result.images, parents_only=True)
            found.append(None if learned is None else f"{learned}, so its metrics overestimate accuracy on new images.")
        texts = [text for text in found if text is not None]
        for text in texts:
            self._options.note(f"warning: {result.task.name}: {text}")
        return texts


def was_seen(task: Model, images: ImageSet | None) -> bool:
    """Whether an earlier training may have learned from images: of the task that this one started from, or of an
    ancestor."""
    return "history" in task.spec.training or learned_from(task, images, parents_only=True) is not None


def add_calibration(task: Model, held_out: Answers | None, source: str, *, seen: bool = False) -> None:
    """Calibrates a Task on its answers to images that it did not learn from; records whether it was possible.

    `seen`: an earlier training, or that of a task that it extends, may have learned from these images.
    """
    if not isinstance(task, Task):
        return
    found = None if held_out is None or seen else fit_calibration(task.kind, *held_out, source)
    text = SEEN if seen else describe_calibration(found, 0 if held_out is None else len(held_out[1]))
    task.update_spec(calibration=found, training={**task.spec.training, "calibration": text})


def record_time(results: Sequence[TrainResult], phases: Phases) -> None:
    """Records in the tasks how long all of it took, and its phases."""
    seconds = {name: round(value, 2) for name, value in phases.seconds.items()}
    for result in results:
        facts = {**result.task.spec.training, "seconds": round(sum(phases.seconds.values()), 1), "phases": seconds}
        result.task.update_spec(training=facts)


Score = tuple[float, float]
"""(validation score, -validation loss)"""


def finish_plans(
    plans: Sequence[Plan], runs: Sequence[Mapping[Setting, Sequence[Run]]], finisher: Finisher, options: TrainOptions
) -> list[TrainResult]:
    """The result of each plan: of the best seed of its best setting."""
    chosen = [_choose(plan, by_setting) for plan, by_setting in zip(plans, runs, strict=True)]
    for plan, (rows, _) in zip(plans, chosen, strict=True):
        for row in rows:
            if row.val and row.diverged:
                which = f"{row.cells} cells, rank {row.rank}, from layer {row.from_layer}, lr {row.lr:g}"
                seeds = f"{row.diverged} of {row.diverged + len(row.val)} seeds"
                options.note(f"{plan.name}: {which} diverged with {seeds} and is ranked last.")
    if not any(row.chosen for rows, _ in chosen for row in rows):
        names = ", ".join(plan.splits.name for plan in plans)
        raise TrainingError(f"{names}: all settings diverged: choose smaller learning rates.")
    results = []
    for plan, (rows, best) in zip(plans, chosen, strict=True):
        shown = rows if len(plan.settings) > 1 else ()
        result = finisher.finish(best)
        result = replace(result, rows=shown, score_name=plan.score_name, skipped=plan.splits.skipped)
        results.append(result)
        if result.metrics and shown and result.metrics["split"] != "test":
            options.note(
                f"{plan.name}: no test split, so metrics are those of the images that settings were chosen on: they "
                "are optimistic."
            )
        if result.metrics and isinstance(result.task, Task) and result.task.spec.calibration is None:
            why = str(result.task.spec.training["calibration"]).removeprefix("none: ")
            what = (
                "values have no interval" if result.task.head_kind.has_numbers else "probabilities are not calibrated"
            )
            options.note(f"{plan.name}: {what} ({why}).")
    return results


def _choose(plan: Plan, runs: Mapping[Setting, Sequence[Run]]) -> tuple[list[SettingRow], Sequence[Run]]:
    """A row for each combination over its seeds, and the runs of the best seed, which become the task. If all
    diverged, no row is chosen."""
    seeds: dict[Setting, list[Setting]] = {}
    for setting in runs:
        seeds.setdefault(setting._replace(seed=plan.recipe.seed), []).append(setting)
    scores = {setting: score for setting, own in runs.items() if (score := _score(plan, own)) is not None}
    rows, figure = [], HEADS[plan.splits.kind].main_metric
    for combination, members in seeds.items():
        finished = [setting for setting in members if setting in scores]
        rows.append(
            SettingRow(
                *(combination.cells or 0, combination.from_layer or 0, combination.rank or 0, combination.lr),
                val=tuple(scores[setting][0] for setting in finished),
                val_loss=-mean(scores[setting][1] for setting in finished) if finished else float("inf"),
                diverged=len(members) - len(finished),
            )
        )
    at = max(range(len(rows)), key=lambda number: rows[number].order)
    finished = [setting for setting in list(seeds.values())[at] if setting in scores]
    if not finished:
        return rows, [next(run for own in runs.values() for run in own if run.diverged)]
    tested = [runs[setting][-1] for setting in finished if "test" in runs[setting][-1].answers]
    found = [measure(run.splits.kind, run.splits.labels, *run.answers["test"]).get(figure) for run in tested]
    rows[at] = replace(rows[at], chosen=True, test=tuple(value for value in found if value is not None))
    return rows, runs[max(finished, key=lambda setting: scores[setting])]


def _score(plan: Plan, runs: Sequence[Run]) -> Score | None:
    """What a setting is compared by, higher is better: with folds, by the answers to all images, each from the run that
    did not see it; else by the epoch whose weights were kept. None if one of its runs diverged."""
    if any(run.diverged for run in runs):
        return None
    (*folds, last), splits = runs, plan.splits
    if folds or not last.history:
        answers = [run.answers["fold"] for run in folds] or [last.answers[last.final[0]]]
        logits, targets = (torch.cat(parts) for parts in zip(*answers, strict=True))
        return score(splits.kind, measure(splits.kind, splits.labels, logits, targets))
    figure, nothing = HEADS[splits.kind].main_metric, float("-inf")
    return max((entry.get(f"val_{figure}", nothing), -entry.get("val_loss", -nothing)) for entry in last.history)
