"""Finishing a training: measured, calibrated and described tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memoro.console import bar
from memoro.data import ImageSet
from memoro.evaluation.logits import Batches, collect_logits
from memoro.evaluation.metrics import measure_task, recorded
from memoro.evaluation.training_images import sketch_images
from memoro.phases import Phases
from memoro.tasks.readout import SolvedReadOut
from memoro.tasks.task import Task
from memoro.training.group import LEFT_OUT, RunSpec
from memoro.training.loop import Trainer
from memoro.training.readouts import ReadOuts
from memoro.training.run import Run, build_forward
from memoro.training.trust import Describer, add_calibration, was_seen


@dataclass(frozen=True)
class FitResult:
    """A trained task and how its training went."""

    task: Any
    """The Task, or what another regime trains, with its best weights."""
    history: list[dict[str, Any]] = field(repr=False)
    """One entry per epoch. Where folds were held out, `fold_loss` and the like are the means over their runs."""
    metrics: dict[str, Any]
    """Of the test split, or of the validation split where there is none; `split` says which. Empty for a run that
    diverged while others did not; the last note says why."""
    folder: Path | None
    notes: tuple[str, ...]
    logits: Tensor | None = field(default=None, repr=False)
    """Its answers to the images of that split."""
    targets: Tensor | None = field(default=None, repr=False)
    images: ImageSet | None = field(default=None, repr=False)
    validated: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """Its answers to the validation images, and their targets, where it is calibrated on them."""

    def __iter__(self) -> Iterator[Any]:
        """`task, history, metrics = fit(…)`"""
        return iter((self.task, self.history, self.metrics))


def record_time(results: Sequence[FitResult], phases: Phases) -> None:
    """Records in the tasks how long all of it took, and its phases."""
    seconds = {name: round(value, 2) for name, value in phases.seconds.items()}
    for result in results:
        facts = {**result.task.spec.training, "seconds": round(sum(phases.seconds.values()), 1), "phases": seconds}
        result.task.update_spec(training=facts)


def evaluate_runs(trainer: Trainer, readouts: ReadOuts, describer: Describer) -> list[FitResult]:
    """The result of each run: metrics of its best weights, on images that it did not learn from if there are any.

    Its task gets its read-out, is calibrated on held-out images, and described by its training images.
    """
    runs, folder = {id(run.task): run for run in trainer.runs}, trainer.options.folder
    answers, results = _answer_held_out(trainer, readouts), []
    for spec in trainer.specs:
        run = runs.get(id(spec.task))
        notes, history = spec.splits.notes, [] if run is None else run.history
        if run is not None and run.stopped is not None:
            notes = (*notes, run.stopped)
        if run is not None and run.diverged:
            results.append(FitResult(run.task, history, {}, folder, notes))
            continue
        task, (split, images) = spec.task, spec.final
        if spec.regime.readout == 1:
            assert isinstance(task, Task)
            readouts.solve(spec).attach(task, 1.0)
            answers[id(task), split] = readouts.answers(spec, split, images), images.targets
        out, targets = answers[id(task), split]
        seen = bool(task.spec.training.keys() - {"seed"})  # it was trained before, on images that may be these
        seen = seen or was_seen(task, spec.splits.val)
        _describe(spec, run, None if not spec.regime.readout else readouts.solve(spec), trainer.backbone.dtype)
        validated = answers.get((id(task), "val"))
        if spec.regime.readout == 1:
            held_out = readouts.solve(spec).held_out, spec.train.targets
            add_calibration(task, held_out, LEFT_OUT, seen=was_seen(task, spec.train))
        else:
            add_calibration(task, validated, "validation", seen=seen)
        describer.add_familiarity(spec)
        metrics = {"split": split, **measure_task(task, out, targets, fitted_on=split in {"val", LEFT_OUT})}
        task.update_spec(metrics=recorded(task.kind, metrics, out, targets))
        results.append(FitResult(task, history, metrics, folder, notes, out, targets, images, validated))
    return results


def _answer_held_out(trainer: Trainer, readouts: ReadOuts) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """The logits of each task for the images of the splits that it is measured on, and their targets.

    For images whose features are kept, read-outs are added afterwards, since those of training images are answers of
    solutions without them. Then tasks get their read-outs, and answer the other images as they will from now on.
    """
    kept = {"fold", "val"}
    answers: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    pairs = [
        (spec, run, split) for spec, run in zip(trainer.trained, trainer.runs, strict=True)
        for split in (spec.evaluated if not run.diverged else ())
    ]  # fmt: skip
    by_loader: dict[tuple[bool, int], tuple[Batches, list[tuple[RunSpec, Run, str]]]] = {}
    for spec, run, split in pairs:
        loader = trainer.loaders.evaluation(spec, spec.evaluated[split], keep=split in kept)
        by_loader.setdefault((split in kept, id(loader)), (loader, []))[1].append((spec, run, split))
    total = sum(len(loader.images) for loader, _ in by_loader.values())
    with bar("evaluating", total, quiet=trainer.options.quiet) as tick:
        for held_out in (True, False):
            for loader, members in (found for (own, _), found in by_loader.items() if own is held_out):
                forward = build_forward(trainer.backbone, [run.task for _, run, _ in members])
                how: dict[str, Any] = {"tick": tick, "all_gather": trainer.processes.all_gather}
                logits, _ = collect_logits(forward, trainer.backbone, loader, **how)
                for (spec, run, split), out in zip(members, logits, strict=True):
                    images = spec.evaluated[split]  # its own targets: other labels may share the loader
                    if held_out and spec.regime.readout:
                        out = torch.lerp(out, readouts.answers(spec, split, images), spec.regime.readout)
                    answers[id(run.task), split] = out, images.targets
            for spec in trainer.trained if held_out else ():
                if spec.regime.readout and spec.held_out is None and isinstance(spec.task, Task):
                    readouts.solve(spec).attach(spec.task, spec.regime.readout)
    return answers


def _describe(spec: RunSpec, run: Run | None, readout: SolvedReadOut | None, computed: torch.dtype) -> None:
    """Records in the task how it was trained."""
    images, task, facts = spec.train, spec.task, dict[str, Any]()
    known = task.spec.training  # of an earlier training, or where a sweep made the task
    if run is not None:
        facts = {
            "optimizer": run.recipe.optimizer,
            "lr": run.recipe.lr,
            "batch_size": run.recipe.batch_size,
            "epochs": len(run.history),
            "steps": run.history[-1]["step"],
            "best_epoch": run.best_epoch,
        }
    trained = sum(parameter.numel() for parameter in run.trained.values()) if run is not None else 0
    if readout is not None:
        trained += readout.weight.numel() + readout.bias.numel()
        facts["penalty"] = readout.penalty
    task.update_spec(
        preprocessing=spec.preprocessing,
        training={
            "data": spec.splits.name,
            "images": len(images),
            "regime": spec.regime.name,
            "precision": str(computed).removeprefix("torch."),
            **facts,
            **({"balance": True} if spec.recipe.balance else {}),
            "trained_parameters": trained,
            **{name: known[name] for name in ("seed", "history") if name in known},
            **sketch_images(images, known),
        },
    )
