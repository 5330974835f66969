"""The one training loop, for any number of runs and sets of images in one pass."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.errors import TrainingError
from memoro.evaluation.logits import AnyBatch, collect_logits, inputs_of
from memoro.evaluation.metrics import measure, score
from memoro.heads import loss_sum
from memoro.training.checkpoint import load_checkpoint, save_checkpoint
from memoro.training.distributed import ALONE, Processes
from memoro.training.group import RunGroup
from memoro.training.run import OwnPass, Run, SharedPass, answer_together, pass_for


class Watcher(Protocol):
    """What wants to know how a training goes: a progress bar, a run folder."""

    def begin(self, groups: Sequence[RunGroup]) -> None: ...

    def step(self, group: RunGroup, entry: dict[str, Any]) -> None: ...

    def epoch(self, group: RunGroup, entries: list[dict[str, Any]]) -> None: ...


@dataclass
class Training:
    """RunGroups that go side by side: each step takes a batch of every one, and one base pass for all of them."""

    backbone: Backbone
    groups: Sequence[RunGroup]
    watchers: Sequence[Watcher] = ()
    checkpoint: Path | None = None
    every: float = 60.0
    """Seconds between checkpoints within an epoch; each epoch ends with one."""
    identity: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    processes: Processes = ALONE
    """Those that train together: each takes its part of every batch. Only the main one writes and is watched."""
    started: float = 0.0
    """On the monotonic clock, as if it had never been interrupted."""

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    def autocast(self) -> torch.autocast:
        # Not Accelerate's own: that is one setting for the whole life of a process.
        low = self.groups[0].recipe.precision == "bf16"
        return torch.autocast(self.backbone.device.type, dtype=torch.bfloat16, enabled=low)


def run_training(training: Training) -> float:
    """Trains all runs to their end and leaves each task with its best weights by validation score.

    Returns the seconds that took, over all sittings.
    """
    seconds, saved = 0.0, time.monotonic()
    found = training.resume and training.checkpoint is not None and training.checkpoint.is_file()
    _check_agreement(training, found)
    if found:
        assert training.checkpoint is not None
        seconds = load_checkpoint(training.checkpoint, training.groups, training.identity)
    training.processes.broadcast([parameter for run in training.runs for parameter in run.trained.values()])
    training.started = time.monotonic() - seconds
    if not any(group.progress.step for group in training.groups):
        _save(training)  # in place of what another training may have left in the folder
    for watcher in training.watchers:
        watcher.begin(training.groups)
    with _patient_interrupts() as interrupted:
        while going := [group for group in training.groups if not group.finished]:
            taken = [(group, group.take()) for group in going]
            if stepping := [(group, batches) for group, batches in taken if batches]:
                _step(training, stepping)
            for group, batches in taken:
                if not batches:
                    _end_epoch(training, group)
                    if not all(run.diverged for run in training.runs):  # else the last good one is kept
                        _save(training)
            if training.processes.any(interrupted()):
                _save(training)
                training.processes.all_gather("saved")  # a launcher ends all of them when the first one goes
                done = ", ".join(f"{group.progress.step} of {group.total_steps}" for group in training.groups)
                raise KeyboardInterrupt(f"stopped and saved after step {done}")
            if time.monotonic() - saved > training.every:
                if not all(run.diverged for run in training.runs):
                    _save(training)
                saved = time.monotonic()
    for run in training.runs:
        run.restore_best()
        run.task.requires_grad_(False)
    return time.monotonic() - training.started


@contextmanager
def _patient_interrupts() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only raises a flag, so that no step is left half done; a second one interrupts at once."""
    flag: list[bool] = []

    def handler(number: int, frame: Any) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.append(True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(flag)
    finally:
        signal.signal(signal.SIGINT, before)


def _check_agreement(training: Training, found: bool) -> None:
    """Processes that do not train the same would wait for each other in vain."""
    saved = training.resume and training.checkpoint is not None
    first, *others = training.processes.all_gather((training.identity, found))
    for number, (identity, there) in enumerate(others, start=1):
        changed = [key for key, value in first[0].items() if identity.get(key) != value]
        if changed:
            raise TrainingError(f"process {number} has another {', '.join(changed)} than the first: all need the same.")
        if saved and there != first[1]:
            raise TrainingError(
                f"not every process finds {training.checkpoint}: to resume, all machines need the run folder."
            )


def _save(training: Training) -> None:
    if training.checkpoint is not None and training.processes.main:
        seconds = time.monotonic() - training.started
        save_checkpoint(training.checkpoint, training.groups, training.identity, seconds)


@dataclass
class _Sums:
    """What the batches of one step add up to, for each active run of a group."""

    runs: list[Run]
    losses: Tensor
    right: Tensor
    images: Tensor
    """How many count; a run may have images held out."""


def _step(training: Training, taken: Sequence[tuple[RunGroup, Sequence[AnyBatch]]]) -> None:
    """One optimiser step of every active run over its group's batches; each run clips and steps for itself."""
    sums = [_count(group, batches, training.processes) for group, batches in taken]
    for step_batches in zip_longest(*(batches for _, batches in taken)):
        shared: list[tuple[SharedPass, AnyBatch, _Sums]] = []
        for (group, _), batch, found in zip(taken, step_batches, sums, strict=True):
            if batch is None or not len(batch.targets):  # none left, or none of it for this process
                continue
            way = group.shared(training.backbone)
            if isinstance(way, OwnPass):
                _learn_apart(training, way, batch, found)
            else:
                shared.append((way, batch, found))
        if shared:
            _learn_together(training, shared)
    for (group, batches), found in zip(taken, sums, strict=True):
        _apply(training, group, batches, found)


def _learn_together(training: Training, entries: Sequence[tuple[SharedPass, AnyBatch, _Sums]]) -> None:
    """Parameters of runs are disjoint, so one backward pass gives each run its own gradient."""
    inputs = [inputs_of(batch, training.backbone) for _, batch, _ in entries]
    with training.autocast():
        answers = answer_together([way for way, _, _ in entries], inputs)
    parts = [
        _loss(found, number, batch, out)
        for (_, batch, found), own in zip(entries, answers, strict=True)
        for number, out in enumerate(own)
    ]
    torch.autograd.backward(torch.stack(parts).sum())


def _learn_apart(training: Training, way: OwnPass, batch: AnyBatch, found: _Sums) -> None:
    """One baseline after the other, so that memory holds what backward needs of one of them at a time."""
    inputs = inputs_of(batch, training.backbone)
    for number, model in enumerate(way.models):
        with training.autocast():
            out = model(inputs)
        torch.autograd.backward(_loss(found, number, batch, out))


def _count(group: RunGroup, batches: Sequence[AnyBatch], processes: Processes) -> _Sums:
    runs, total = group.active, sum(batch.total for batch in batches)
    zeros = torch.zeros(len(runs), dtype=torch.float64)
    images = torch.full_like(zeros, total)
    held = [at for at, run in enumerate(runs) if run.goal.sample_weight is not None]
    if held:
        own = torch.stack([sum(runs[at].goal.sample_weight[batch.index].sum() for batch in batches) for at in held])  # type: ignore[index, misc]
        [images[held]] = processes.all_reduce([own.double()])
    return _Sums(runs, zeros, zeros.clone(), images)


def _loss(found: _Sums, number: int, batch: AnyBatch, out: Tensor) -> Tensor:
    """This batch's part of a run's mean loss, for backward; what it sums up to is added to `found`."""
    run, device = found.runs[number], out.device
    goal = run.goal
    targets = (batch.targets if goal.targets is None else goal.targets[batch.index]).to(device)
    sample_weight = None if goal.sample_weight is None else goal.sample_weight[batch.index].to(device)
    weights = None if goal.class_weights is None else goal.class_weights.to(device)
    smoothing = run.recipe.label_smoothing
    part = loss_sum(run.task.kind, out, targets, smoothing=smoothing, weights=weights, sample_weight=sample_weight)
    found.losses[number] += float(part.detach())
    if run.task.kind == "softmax":
        right = (out.detach().argmax(-1) == targets).double()
        found.right[number] += float((right if sample_weight is None else right * sample_weight).sum())
    return part / max(float(found.images[number]), 1.0)


def _reduce(processes: Processes, runs: Sequence[Run]) -> Iterator[list[Tensor]]:
    """Each run's gradients over all processes. A process that had no image of a batch has none: that is zero."""
    parameters = [parameter for run in runs for parameter in run.trained.values()]
    whole = iter(processes.all_reduce([torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]))
    for run in runs:
        yield list(islice(whole, len(run.trained)))


def _apply(training: Training, group: RunGroup, batches: Sequence[AnyBatch], found: _Sums) -> None:
    """Each run's step with its own clipping and rate; one without finite numbers leaves the group."""
    progress, total = group.progress, group.total_steps
    losses, right = training.processes.all_reduce([found.losses, found.right])
    entry: dict[str, Any] = {"step": progress.step + 1, "epoch": progress.epoch + 1, "steps": total}
    for number, (run, gradients) in enumerate(zip(found.runs, _reduce(training.processes, found.runs), strict=True)):
        images = float(found.images[number])
        value = float(losses[number]) / max(images, 1.0)
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).tolist()
        if not math.isfinite(sum(norms)) or not math.isfinite(value):
            run.diverge(f"loss {value:.3g}, gradient {math.hypot(*norms):.3g}", progress.step + 1)
            continue
        for parameter, gradient, norm in zip(run.trained.values(), gradients, norms, strict=True):
            parameter.grad = gradient * run.recipe.clip_scale(norm)
        rate = run.recipe.rate(progress.step, total)
        for settings in run.optimizer.param_groups:
            settings["lr"] = rate * settings["lr_scale"]
        run.optimizer.step()
        run.optimizer.zero_grad()
        sums = progress.sums.setdefault(str(group.runs.index(run)), [0.0, 0.0, 0.0])
        for at, amount in enumerate((float(losses[number]), float(right[number]), images)):
            sums[at] += amount
        if images and ("loss" not in entry or value < entry["loss"]):
            entry |= {"loss": value, "lr": rate}
            if run.task.kind == "softmax":
                entry["accuracy"] = float(right[number]) / images
    entry["images_per_second"] = group.count(batches)
    if len(training.groups) > 1:
        entry["group"] = group.name
    for watcher in training.watchers:
        watcher.step(group, entry)


def _end_epoch(training: Training, group: RunGroup) -> None:
    """Examines, keeps each run's best weights, stops those without patience left, and starts the next epoch."""
    progress, results = group.progress, dict[int, dict[str, Any]]()
    for val_set in group.val_sets:
        runs = [run for run in val_set.runs if run.stopped is None]
        if not runs:
            continue
        answer = pass_for(training.backbone, [run.task for run in runs])
        logits, targets = collect_logits(
            answer, training.backbone, val_set.loader, autocast=training.autocast, processes=training.processes
        )
        for run, out in zip(runs, logits, strict=True):
            own = targets if run.goal.val_targets is None else run.goal.val_targets
            results[id(run)] = measure(run.task.kind, run.task.labels, out, own)
    entries = []
    for run in group.active:
        found = results.get(id(run))
        if found is not None and not math.isfinite(found["loss"]):
            run.diverge(f"validation loss {found['loss']:.3g}", progress.step)
            continue
        if not all(bool(torch.isfinite(parameter).all()) for parameter in run.trained.values()):
            run.diverge("weights without bounds", progress.step)
            continue
        number = group.runs.index(run)
        loss, right, images = progress.sums.get(str(number), [0.0, 0.0, 0.0])
        entry: dict[str, Any] = {
            "run": training.runs.index(run),
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": loss / max(images, 1),
        }
        if len(training.groups) > 1:
            entry["group"] = group.name
        if run.task.kind == "softmax":
            entry["train_accuracy"] = right / max(images, 1)
        if found is not None:
            entry |= {f"val_{name}": value for name, value in found.items() if isinstance(value, float)}
        if found is None or run.goal.sample_weight is not None:
            # Nothing to choose by, or a fold, which stands for a run that has nothing to choose by: the last.
            run.keep_best((float(progress.epoch), 0.0), progress.epoch + 1)
        else:
            run.keep_best(score(run.task.kind, found), progress.epoch + 1)
        run.history.append(entry)
        entries.append(entry)
        if run.recipe.patience and progress.epoch + 1 - run.best_epoch >= run.recipe.patience:
            run.stopped = f"no better validation score for {run.recipe.patience} epochs"
    group.halve()
    group.next_epoch()
    for watcher in training.watchers:
        watcher.epoch(group, entries)
