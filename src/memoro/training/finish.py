"""Finishing: trained runs become tasks with read-outs, calibration, familiarity, metrics and a record; the best of a
plan."""

from __future__ import annotations

import time
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
from memoro.data.screening import near_groups
from memoro.errors import TrainingError
from memoro.evaluation.calibrate import find_photographs, read_changes, read_photographs
from memoro.evaluation.logits import Batches, collect_logits
from memoro.evaluation.metrics import COLUMNS, add_folds, measure, measure_task, recorded, score, warn_of
from memoro.evaluation.training_images import learned_from, sketch_images
from memoro.heads import HEADS
from memoro.images import Preprocessing
from memoro.tasks.calibration import describe_calibration, fit_calibration
from memoro.tasks.familiarity import MIN_IMAGES, Familiarity, Others, fit_familiarity
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import Read, RidgeSystem
from memoro.tasks.spec import Model, ReadOut
from memoro.tasks.task import Task
from memoro.training.cached import read_statistics
from memoro.training.loop import Trainer
from memoro.training.plan import Plan, Setting
from memoro.training.recipe import TrainOptions
from memoro.training.result import SettingRow, TrainResult
from memoro.training.run import LEFT_OUT, Run, build_forward, content_key

SEEN = "none: an earlier training may have seen these images; use memoro calibrate with new ones"
MOST_IMAGES = 10_000
"""Training images that a description is made from."""
Answers = tuple[Tensor, Tensor]
"""Logits, and the targets of their images."""


class Finisher:
    """Solves read-outs, lets trained tasks answer, and makes results of their runs.

    Runs over the same images and labels share a read-out, and a description of the images.
    """

    def __init__(self, backbone: Backbone, options: TrainOptions) -> None:
        self._backbone, self._options = backbone, options
        self._statistics: dict[Any, Read] = {}
        self._solved: dict[Any, SolvedReadOut] = {}
        self._systems: dict[Any, RidgeSystem] = {}
        self._described: dict[Any, Familiarity | None] = {}
        self._changed: dict[Any, Tensor | None] = {}
        self._others: dict[Preprocessing, Others | None] = {}

    def solve(self, run: Run) -> SolvedReadOut:
        """The read-out of a run's training images. The user is told how good it is."""
        images, labels = run.train, run.splits.labels
        key = content_key(images), run.preprocessing, id(images.targets), run.recipe.balance
        if key not in self._solved:
            started = time.monotonic()
            found = solve_readout(
                run.splits.kind,
                ReadOut.of(self._backbone.anatomy),
                lambda weights: self._factorise(images, run.preprocessing, weights),
                images.targets,
                len(labels),
                balance=run.recipe.balance,
                groups=torch.from_numpy(near_groups(images).numbers),
            )
            self._solved[key] = found
            figure = HEADS[run.splits.kind].main_metric
            score = measure(run.splits.kind, labels, found.held_out, images.targets[found.answered]).get(figure)
            seconds = time.monotonic() - started
            told = "" if score is None else f"{COLUMNS[figure]} {score:.3f} on images left out one by one, "
            self._options.note(f"{run.splits.name}: read-out: {told}solved in {seconds:.1f} s.")
        return self._solved[key]

    def _factorise(self, images: ImageSet, preprocessing: Preprocessing, weights: Tensor | None) -> RidgeSystem:
        """The system of these images; without weights, columns of labels share one."""
        if weights is not None:
            return RidgeSystem(len(images), self._read(images, preprocessing), weights)
        key = content_key(images), preprocessing
        if key not in self._systems:
            self._systems[key] = RidgeSystem(len(images), self._read(images, preprocessing))
        return self._systems[key]

    def _read(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        """A function from the numbers (b) of images to their statistics (b, layers, statistics, dim)."""
        key, options = (content_key(images), preprocessing), self._options
        if key not in self._statistics:
            self._statistics[key] = read_statistics(
                self._backbone,
                images,
                preprocessing,
                options.wanted_cache,
                workers=options.workers,
                processes=options.processes,
                quiet=options.quiet,
            )
        return self._statistics[key]

    def _read_out(self, run: Run, split: str, images: ImageSet) -> Tensor:
        """The logits (n, labels) of a run's read-out for the images of a split; those to training images are of
        solutions without them."""
        solved = self.solve(run)
        if len(solved.answered) == len(run.train):  # of very many images, only some are left out
            if run.held_out is not None and split == "fold":
                return solved.held_out[torch.from_numpy(run.held_out)]
            if images is run.train:
                return solved.held_out
        read = self._read(images, run.preprocessing)
        blocks = torch.split(torch.arange(len(images), device="cpu"), 1024)
        return torch.cat([read(block).float().flatten(1) @ solved.weight.T + solved.bias for block in blocks])

    def answer_held_out(self, trainer: Trainer) -> None:
        """Fills `Run.answers` of all runs, with one pass over each set of images, and gives their tasks their
        read-outs.

        For images whose features are kept, read-outs are added afterwards, since those of training images are answers
        of solutions without them. Then tasks get their read-outs, and answer the other images as they will from now on.
        """
        kept = {"fold", "val"}
        by_loader: dict[tuple[bool, int], tuple[Batches, list[tuple[Run, str]]]] = {}
        for run in trainer.runs:
            for split in () if run.diverged else run.evaluated:
                loader = trainer.loaders.evaluation(run, run.evaluated[split], keep=split in kept)
                by_loader.setdefault((split in kept, id(loader)), (loader, []))[1].append((run, split))
        total = sum(len(loader.images) for loader, _ in by_loader.values())
        with bar("evaluating", total, quiet=self._options.quiet) as tick:
            for held_out in (True, False):
                for loader, members in (found for (own, _), found in by_loader.items() if own is held_out):
                    forward = build_forward(trainer.backbone, [run.task for run, _ in members])
                    gather = trainer.processes.all_gather
                    logits, _ = collect_logits(forward, trainer.backbone, loader, tick=tick, all_gather=gather)
                    for (run, split), out in zip(members, logits, strict=True):
                        images = run.evaluated[split]  # its own targets: other labels may share the loader
                        if held_out and run.regime.readout:
                            out = torch.lerp(out, self._read_out(run, split, images), run.regime.readout)
                        run.answers[split] = out, images.targets
                for run in trainer.runs if held_out else ():
                    if run.regime.readout and run.held_out is None and isinstance(run.task, Task):
                        self.solve(run).attach(run.task, run.regime.readout)
        for run in trainer.all_runs:
            if run.regime.readout == 1 and isinstance(run.task, Task):
                solved, (split, images) = self.solve(run), run.final
                solved.attach(run.task, 1.0)
                run.answers[LEFT_OUT] = solved.held_out, run.train.targets[solved.answered]
                if split != LEFT_OUT:
                    run.answers[split] = self._read_out(run, split, images), images.targets

    def finish(self, runs: Sequence[Run]) -> TrainResult:
        """The result of the last run, after those of its folds if there are any.

        Its metrics are those of its best weights, on images that it did not learn from if there are any.
        """
        *folds, run = runs
        notes, history, folder = run.splits.notes, run.history, self._options.folder
        if run.stopped is not None:
            notes = (*notes, run.stopped)
        if run.diverged:
            return TrainResult(cast(Task, run.task), history, {}, folder, notes)
        task, (split, images) = run.task, run.final
        trained_before = bool(task.spec.training.keys() - {"seed"})  # on images that may be these
        self._record_training(run)
        self._add_familiarity(run)
        source, held_out = "validation", run.answers.get("val")
        out, targets = run.answers[split]
        fitted_on = split in {"val", LEFT_OUT}
        if folds:
            source, parts = f"{len(folds)} folds", [fold.answers["fold"] for fold in folds]
            held_out = torch.cat([logits for logits, _ in parts]), torch.cat([own for _, own in parts])
            history = add_folds(history, [fold.history for fold in folds], [len(own) for _, own in parts])
            if split != "test":
                fitted_on, split, (out, targets) = True, source, held_out
                rows = [fold.held_out for fold in folds if fold.held_out is not None]
                images = run.train.subset(np.concatenate(rows))
        elif LEFT_OUT in run.answers:
            source, held_out = LEFT_OUT, run.answers[LEFT_OUT]
            images = run.train.subset(self.solve(run).answered.numpy()) if split == LEFT_OUT else images
        judged = run.splits.val if source == "validation" else run.train
        seen = (source == "validation" and trained_before) or was_seen(task, judged)
        add_calibration(task, held_out, source, seen=seen)
        metrics = {"split": split, **measure_task(task, out, targets, fitted_on=fitted_on)}
        task.update_spec(metrics=recorded(task.kind, metrics, out, targets))
        warnings = [warn_of(metrics, balanced=run.recipe.balance)]
        if split != "train" and (reason := learned_from(task, images, parents_only=True)) is not None:
            warnings.append(f"{reason}, so its metrics overestimate accuracy on new images.")
        shown = [text for text in warnings if text is not None]
        for text in shown:
            self._options.note(f"warning: {task.name}: {text}")
        return TrainResult(cast(Task, task), history, metrics, folder, (*notes, *shown), out, targets, images)

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
            readout = self.solve(run)
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

    def _add_familiarity(self, run: Run) -> None:
        """Gives a run's task the description of its training images, and records what it is made from."""
        images = run.train
        if not isinstance(run.task, Task) or run.held_out is not None:
            return
        key = content_key(images), run.preprocessing, id(run.splits)
        if key not in self._described:
            samples = torch.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES), device="cpu").round().long()
            statistics = self._read(images, run.preprocessing)(samples)
            classes = images.targets[samples] if HEADS[run.splits.kind].has_classes else None
            others = self._photographs(run.preprocessing)
            changes = None if others is None else self._changes(images, run.preprocessing)
            self._described[key] = fit_familiarity(statistics, classes, others, changes)
        found, text = self._described[key], "none: too few images, or tokens out of range"
        if found is not None:
            against = "ordinary photographs" if len(found.reader) else "no photographs"
            text = f"{found.images} training images, left out in turn, against {against}"
        run.task.update_spec(familiarity=found, training={**run.task.spec.training, "familiarity": text})

    def _changes(self, images: ImageSet, preprocessing: Preprocessing) -> Tensor | None:
        key = content_key(images), preprocessing
        if key not in self._changed:  # columns of labels share them
            enough = len(images) >= MIN_IMAGES
            self._changed[key] = read_changes(self._backbone, preprocessing, images) if enough else None
        return self._changed[key]

    def _photographs(self, preprocessing: Preprocessing) -> Others | None:
        if preprocessing not in self._others:
            cache, others = self._options.wanted_cache, self._options.others
            folder, workers = None if cache is None else cache.folder, self._options.workers
            self._others[preprocessing] = (
                find_photographs(self._backbone, preprocessing, folder)
                if others is None
                else read_photographs(self._backbone, preprocessing, others, folder, workers=workers)
            )
        return self._others[preprocessing]


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


def _score(plan: Plan, runs: Sequence[Run]) -> tuple[float, float] | None:
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
