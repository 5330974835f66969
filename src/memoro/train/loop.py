"""The one training loop, for any number of runs in one pass."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Batch, Loader
from memoro.errors import TrainingError
from memoro.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from memoro.train.metrics import measure, score
from memoro.train.objective import loss_sum
from memoro.train.recipe import Recipe
from memoro.train.runs import Run, SharedPass


class Watcher(Protocol):
    """What wants to know how a training goes: a progress bar, a run folder."""

    def begin(self, progress: Progress) -> None: ...

    def step(self, progress: Progress, entry: dict[str, Any]) -> None: ...

    def epoch(self, progress: Progress, entries: list[dict[str, Any]]) -> None: ...


@dataclass
class Training:
    """Runs over the same images. Data order and views come from the first run's recipe, which all share."""

    backbone: Backbone
    runs: Sequence[Run]
    train: Loader
    val: Loader | None
    weights: Tensor | None = None
    """Per class, see `objective.class_weights`."""
    watchers: Sequence[Watcher] = ()
    checkpoint: Path | None = None
    every: float = 60.0
    """Seconds between checkpoints within an epoch; each epoch ends with one."""
    identity: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    started: float = 0.0
    """On the monotonic clock, as if it had never been interrupted."""

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe

    @property
    def total_steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        return self.recipe.epochs * -(-len(self.train) // self.recipe.accumulate)

    def autocast(self) -> torch.autocast:
        # Not Accelerate's own: that is one setting for the whole life of a process.
        return torch.autocast(self.backbone.device.type, dtype=torch.bfloat16, enabled=self.recipe.precision == "bf16")


def run_training(training: Training) -> Progress:
    """Trains all runs to their end and leaves each task with its best weights by validation score."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    progress = Progress()
    if training.resume and training.checkpoint is not None and training.checkpoint.is_file():
        progress = load_checkpoint(training.checkpoint, training.runs, training.identity)
    training.started = time.monotonic() - progress.seconds
    if not progress.step:
        _save(training, progress)  # in place of what another training may have left in the folder
    for watcher in training.watchers:
        watcher.begin(progress)
    total = training.total_steps
    with _patient_interrupts() as interrupted:
        # A checkpoint may lie between the last step of an epoch and its validation: then batches are counted as done.
        while (progress.step < total or progress.batch) and _active(training.runs):
            if progress.step < total:
                _train_epoch(training, progress, total, accelerator, interrupted)
            if _active(training.runs):
                _end_epoch(training, progress)
            if not all(run.diverged for run in training.runs):  # else the last good one is kept
                _save(training, progress)
    progress.seconds = time.monotonic() - training.started
    for run in training.runs:
        run.restore_best()
        run.task.requires_grad_(False)
    return progress


def _train_epoch(
    training: Training, progress: Progress, total: int, accelerator: Any, interrupted: Callable[[], bool]
) -> None:
    """The rest of the epoch under way, or as many steps of it as are left."""
    shared = SharedPass(training.backbone, [run.task for run in _active(training.runs)])
    started, images, saved = time.monotonic(), 0, time.monotonic()
    for group in _groups(training.train.epoch(progress.epoch, start=progress.batch), training.recipe.accumulate):
        entry = _step(training, shared, group, progress, total, accelerator)
        progress.step += 1
        progress.batch += len(group)
        images += sum(batch.total for batch in group)
        entry["images_per_second"] = images / (time.monotonic() - started)
        for watcher in training.watchers:
            watcher.step(progress, entry)
        active = _active(training.runs)
        if not active:
            return
        if interrupted():
            _save(training, progress)
            raise KeyboardInterrupt(f"stopped and saved after step {progress.step} of {total}")
        if len(active) < len(shared.rows):  # a run was dropped: compute it no longer
            shared = SharedPass(training.backbone, [run.task for run in active])
        if time.monotonic() - saved > training.every:
            _save(training, progress)
            saved = time.monotonic()
        if progress.step == total:
            return


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


def _save(training: Training, progress: Progress) -> None:
    progress.seconds = time.monotonic() - training.started
    if training.checkpoint is not None:
        save_checkpoint(training.checkpoint, progress, training.runs, training.identity)


def _active(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.stopped is None]


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group


def _step(
    training: Training,
    shared: SharedPass,
    group: Sequence[Batch],
    progress: Progress,
    total: int,
    accelerator: Any,
) -> dict[str, Any]:
    """One optimiser step of every active run over a group of batches; each run clips and steps for itself."""
    runs, device = _active(training.runs), training.backbone.device
    count = sum(batch.total for batch in group)
    losses = torch.zeros(len(runs), dtype=torch.float64)
    right = torch.zeros(len(runs), dtype=torch.float64)
    for batch in group:
        pixels, targets = batch.pixels.to(device, training.backbone.dtype), batch.targets.to(device)
        with training.autocast():
            logits = shared(pixels)
        parts = [
            loss_sum(
                run.task.kind, out, targets, smoothing=run.recipe.label_smoothing, weights=_to(training.weights, device)
            )
            for run, out in zip(runs, logits, strict=True)
        ]
        # Parameters of runs are disjoint, so one backward pass gives each run its own gradient.
        torch.autograd.backward(torch.stack(parts).sum() / count)
        for number, (part, out) in enumerate(zip(parts, logits, strict=True)):
            losses[number] += float(part.detach())
            if runs[number].task.kind == "softmax":
                right[number] += float((out.detach().argmax(-1) == targets).sum())
    losses, right = accelerator.reduce(losses.to(device)).cpu(), accelerator.reduce(right.to(device)).cpu()
    entry: dict[str, Any] = {"step": progress.step + 1, "epoch": progress.epoch + 1, "steps": total}
    for number, run in enumerate(runs):
        value = float(losses[number]) / count
        gradients = [accelerator.reduce(parameter.grad) for parameter in run.trained.values()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        if not torch.isfinite(norm) or not math.isfinite(value):
            run.diverge(f"loss {value:.3g}, gradient {float(norm):.3g}", progress.step + 1)
            continue
        for parameter, gradient in zip(run.trained.values(), gradients, strict=True):
            parameter.grad = gradient * run.recipe.clip_scale(gradient)
        rate = run.recipe.rate(progress.step, total)
        for settings in run.optimizer.param_groups:
            settings["lr"] = rate * settings["share"]
        run.optimizer.step()
        run.optimizer.zero_grad()
        sums = progress.sums.setdefault(str(training.runs.index(run)), [0.0, 0.0, 0.0])
        for at, amount in enumerate((float(losses[number]), float(right[number]), float(count))):
            sums[at] += amount
        if "loss" not in entry or value < entry["loss"]:
            entry |= {"loss": value, "lr": rate}
            if run.task.kind == "softmax":
                entry["accuracy"] = float(right[number]) / count
    return entry


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _end_epoch(training: Training, progress: Progress) -> None:
    """Validates, keeps each run's best weights, stops those without patience left, and starts the next epoch."""
    entries = []
    runs = _active(training.runs)
    results: list[dict[str, Any] | None] = [None] * len(runs)
    if training.val is not None:
        shared = SharedPass(training.backbone, [run.task for run in runs])
        logits, targets = collect_logits(shared, training.backbone, training.val, autocast=training.autocast)
        results = [measure(run.task.kind, run.task.labels, out, targets) for run, out in zip(runs, logits, strict=True)]
    for run, found in zip(runs, results, strict=True):
        if found is not None and not math.isfinite(found["loss"]):
            run.diverge(f"validation loss {found['loss']:.3g}", progress.step)
            continue
        if not all(bool(torch.isfinite(parameter).all()) for parameter in run.trained.values()):
            run.diverge("weights without bounds", progress.step)
            continue
        number = training.runs.index(run)
        loss, right, images = progress.sums.get(str(number), [0.0, 0.0, 0.0])
        entry: dict[str, Any] = {
            "run": number,
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": loss / max(images, 1),
        }
        if run.task.kind == "softmax":
            entry["train_accuracy"] = right / max(images, 1)
        if found is not None:
            entry |= {f"val_{name}": value for name, value in found.items() if isinstance(value, float)}
            run.keep_best(score(run.task.kind, found), progress.epoch + 1)
        else:
            run.keep_best((float(progress.epoch), 0.0), progress.epoch + 1)  # nothing to choose by: the last
        run.history.append(entry)
        entries.append(entry)
        if run.recipe.patience and progress.epoch + 1 - run.best_epoch >= run.recipe.patience:
            run.stopped = f"no better validation score for {run.recipe.patience} epochs"
    progress.epoch += 1
    progress.batch = 0
    progress.sums = {}
    for watcher in training.watchers:
        watcher.epoch(progress, entries)


def collect_logits(
    answer: Callable[[Tensor], Sequence[Tensor]],
    backbone: Backbone,
    loader: Loader,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tick: Callable[[int], None] = lambda images: None,
) -> tuple[list[Tensor], Tensor]:
    """The logits that `answer` gives for each of its tasks over all images of a loader, and the targets, on the CPU."""
    parts: list[Sequence[Tensor]] = []
    targets: list[Tensor] = []
    with torch.no_grad():
        for batch in loader.epoch(0):
            with autocast():
                out = answer(batch.pixels.to(backbone.device, backbone.dtype))
            parts.append([logits.float().cpu() for logits in out])
            targets.append(batch.targets)
            tick(len(batch.targets))
    if not targets:
        raise TrainingError(f"{loader.images.name}: there are no images to evaluate on.")
    return [torch.cat(part) for part in zip(*parts, strict=True)], torch.cat(targets)
