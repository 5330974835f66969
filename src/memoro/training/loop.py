"""The training loop: any number of runs, over any number of sets of images, with one base pass per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.data import Batch
from memoro.engine.forward import answer_together
from memoro.errors import TaskFileError, TrainingError
from memoro.evaluation.logits import AnyBatch, collect_logits, inputs_of
from memoro.evaluation.metrics import measure, score
from memoro.processes import Processes, deferred_interrupts
from memoro.tasks.task import Task
from memoro.training.cached import Cache, compute_missing
from memoro.training.checkpoint import (
    check_agreement,
    load_checkpoint,
    make_way,
    run_identity,
    save_checkpoint,
    where_it_continues,
)
from memoro.training.lossscale import LossScale
from memoro.training.recipe import TrainOptions
from memoro.training.run import Loaders, Run, RunGroup, build_forward, standardised, start_groups


class Callback(Protocol):
    """Follows a training: a progress bar, a run folder."""

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None: ...

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None: ...

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None: ...


class Trainer:
    """Trains groups of runs side by side: each step takes a batch of every group, and one base pass for all of them.

    With several processes, each takes its part of every batch; only the main one writes files and calls callbacks.
    """

    checkpoint_seconds = 60.0
    """Seconds between checkpoints within an epoch; every epoch ends with one."""
    checkpoint_quick, checkpoint_pause = 1.0, 10.0
    """A checkpoint that takes more than so many seconds to write is followed by a pause, so many times as long."""

    def __init__(
        self,
        backbone: Backbone,
        runs: Sequence[Run],
        options: TrainOptions | None = None,
        *,
        cache: Cache | None = None,
    ) -> None:
        self.backbone, self.all_runs, self.options = backbone, runs, options or TrainOptions()
        self.cache, self.processes = cache, self.options.processes
        self.callbacks: list[Callback] = []
        self.loaders = Loaders(backbone, runs, cache, self.options.workers, self.processes)
        self.runs = [run for run in runs if run.regime.readout < 1]
        """Those that have steps; what is solved in closed form has none."""
        self.groups = start_groups(self.runs, self.loaders)
        half = backbone.dtype == torch.float16 or self.options.precision == "float16"
        for run in self.runs:
            run.prepare(backbone.device, LossScale.of(half=half))
        self.checkpoint = self.options.checkpoint
        self.on_validation: Callable[[], None] = lambda: None
        """Called after every batch of validation images."""
        self._started = 0.0  # on the monotonic clock, as if there had been no interruption
        self._saved, self._writing = 0.0, 0.0  # on the same clock, when and how long

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that must be the same for a resume, and in all processes."""
        return run_identity(self.backbone, self.all_runs, self.cache)

    def autocast(self) -> torch.autocast:
        # Not Accelerate's own: that is one setting for the whole life of a process.
        # Tasks compute in the backbone's dtype; a baseline may train the backbone's weights, which stay in float32.
        half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.options.precision)
        low = half is not None and not self.runs[0].regime.composes
        return torch.autocast(self.backbone.device.type, dtype=half, enabled=low)

    def fill_cache(self) -> None:
        """Computes missing features."""
        if self.cache is not None:
            compute_missing(self.loaders.cached, self.cache, "features", self.processes, quiet=self.options.quiet)

    def train(self) -> float:
        """Trains all runs to the end and leaves each task with its best weights by validation score.

        Returns the seconds of training, including those before an interruption.
        """
        with standardised(self.runs):
            return self._train()

    def _train(self) -> float:
        seconds, self._saved = 0.0, time.monotonic()
        found = self.options.resume and self.checkpoint is not None and self.checkpoint.is_file()
        check_agreement(self.processes.all_gather((self.identity, found)), self.checkpoint)
        for run in self.runs:
            run.keep_initial()
        if found:
            assert self.checkpoint is not None
            seconds = load_checkpoint(self.checkpoint, self.groups, self.identity)
            self.options.phases.add("training", seconds)
            self.options.note(where_it_continues(self.checkpoint, self.groups, seconds))
        self._share_tasks()
        self._started = time.monotonic() - seconds
        if not found:
            if self.checkpoint is not None and self.options.written is not None:
                for text in make_way(self.checkpoint):
                    self.options.note(text)
            self.save()
        for callback in self.callbacks:
            callback.on_train_begin(self.groups)
        with deferred_interrupts() as interrupted:
            while going := [group for group in self.groups if not group.finished]:
                taken = [(group, group.next_batches()) for group in going]
                if stepping := [(group, batches) for group, batches in taken if batches]:
                    self.step(stepping)
                for group, batches in taken:
                    if not batches:
                        self.end_epoch(group)
                        if self._is_due() or all(group.finished for group in self.groups):
                            self.save()
                if self.processes.any(interrupted()):
                    self.save()
                    self.processes.all_gather("saved")  # a launcher ends all processes when the first one exits
                    done = ", ".join(f"{group.progress.step} of {group.total_steps}" for group in self.groups)
                    saved_too = "" if self.checkpoint is None else " and saved"
                    raise KeyboardInterrupt(f"stopped{saved_too} after step {done}")
                if self._is_due(self.checkpoint_seconds):
                    self.save()
        for run in self.runs:
            run.restore_best()
            run.task.requires_grad_(False)
        self._share_tasks()
        return time.monotonic() - self._started

    def _share_tasks(self) -> None:
        """Gives every process the main one's tasks: what is not trained decides their answers too."""
        tasks = [run.task for run in self.runs]
        for task, spec in zip(tasks, self.processes.all_gather([task.spec for task in tasks])[0], strict=True):
            task.spec = spec
        self.processes.broadcast([tensor for task in tasks for tensor in task.state_dict().values()])

    def _is_due(self, seconds: float = 0.0) -> bool:
        """Whether the last checkpoint is so many seconds old, and old enough for the time that writing one takes."""
        pause = self._writing * self.checkpoint_pause if self._writing > self.checkpoint_quick else 0.0
        return time.monotonic() - self._saved >= max(seconds, pause)

    def save(self) -> None:
        """Writes a checkpoint, unless every run has diverged: then the last good one is kept."""
        if self.checkpoint is None or self.options.written is None or all(run.diverged for run in self.runs):
            return
        started = time.monotonic()
        try:
            save_checkpoint(self.checkpoint, self.groups, self.identity, started - self._started)
        except TaskFileError as error:
            raise TrainingError(f"{error} Fix the problem, then train again with `resume=True`.") from None
        self._saved = time.monotonic()
        self._writing = self._saved - started

    def step(self, taken: Sequence[tuple[RunGroup, Sequence[AnyBatch]]]) -> None:
        """One optimiser step of every active run over its group's batches. What it reads from the device, losses and
        norms of gradients, it reads at once: each read would wait for all that was started."""
        sums = [_StepSums.over(group, batches, self.processes) for group, batches in taken]
        for batches_now in zip_longest(*(batches for _, batches in taken)):
            here = [
                (group, batch, own)
                for (group, _), batch, own in zip(taken, batches_now, sums, strict=True)
                if batch is not None and len(batch.targets)  # a batch is left, with images for this process
            ]
            shared = [(group, batch, own) for group, batch, own in here if isinstance(group.runs[0].task, Task)]
            for group, batch, own in here:
                if not isinstance(group.runs[0].task, Task):
                    assert isinstance(batch, Batch)  # features are kept only for what composes
                    self._backward_separately(batch, own)
            if not shared:
                continue
            inputs = [inputs_of(batch, self.backbone) for _, batch, _ in shared]
            with self.autocast():
                logits = answer_together([group.forward(self.backbone) for group, _, _ in shared], inputs)
            losses = [
                loss
                for (_, batch, own), outs in zip(shared, logits, strict=True)
                for loss in own.losses_of(batch, outs)
            ]
            # Runs have disjoint parameters, so one backward pass gives each run its own gradient.
            torch.autograd.backward(torch.stack(losses).sum())
        for (group, batches), entry in zip(taken, self._update([group for group, _ in taken], sums), strict=True):
            entry["images_per_second"] = group.count_step(batches)
            if len(self.groups) > 1:
                entry["group"] = group.name
            for callback in self.callbacks:
                callback.on_step_end(group, entry)

    def _backward_separately(self, batch: Batch, own: _StepSums) -> None:
        """One model after the other, so that memory holds the activations of one at a time. Each sees only the
        images that it learns from."""
        for number, run in enumerate(own.runs):
            seen = batch if run.sample_weight is None else batch.select(run.sample_weight[batch.index] > 0)
            if not len(seen.targets):  # all of them are held out
                continue
            with self.autocast():
                out = run.task(inputs_of(seen, self.backbone))
            torch.autograd.backward(own.loss(number, *own.place(seen), out))

    def _update(self, groups: Sequence[RunGroup], sums: Sequence[_StepSums]) -> list[dict[str, Any]]:
        """Each run clips and steps on its own; one without finite numbers stops. Returns what is logged for each group:
        the loss of its best run."""
        gradients, scalars = list[list[Tensor]](), list[Tensor]()
        for own in sums:
            gradients.append(self.processes.all_reduce(_gradients(own.runs)))
            scalars += self.processes.all_reduce(own.totals())
            scalars += [torch.linalg.vector_norm(gradient) for gradient in gradients[-1]]
        numbers = iter(read_numbers(scalars))
        return [
            self._update_group(group, own, mine, numbers)
            for group, own, mine in zip(groups, sums, gradients, strict=True)
        ]

    def _update_group(
        self, group: RunGroup, own: _StepSums, gradients: Sequence[Tensor], numbers: Iterator[float]
    ) -> dict[str, Any]:
        progress, total, rest = group.progress, group.total_steps, iter(gradients)
        losses, correct = (list(islice(numbers, len(own.runs))) for _ in range(2))
        entry: dict[str, Any] = {"step": progress.step + 1, "epoch": progress.epoch + 1, "steps": total}
        for number, run in enumerate(own.runs):
            mine, images = list(islice(rest, len(run.trained))), own.images[number]
            value = losses[number] / max(images, 1.0)
            norms = [norm / run.loss_scale.value for norm in islice(numbers, len(mine))]
            if not math.isfinite(sum(norms)) and math.isfinite(value) and run.loss_scale.shrink():
                run.optimizer.zero_grad()
                continue
            if not math.isfinite(sum(norms)) or not math.isfinite(value):
                run.diverge(f"loss {value:.3g}, gradient {math.hypot(*norms):.3g}", progress.step + 1)
                continue
            scales = [run.recipe.clip_scale(norm) / run.loss_scale.value for norm in norms]
            for parameter, gradient, scale in zip(run.trained.values(), mine, scales, strict=True):
                parameter.grad = gradient * scale
            run.loss_scale.count()
            rate = run.recipe.rate(progress.step, total)
            for settings in run.optimizer.param_groups:
                settings["lr"] = rate * settings["lr_scale"]
            run.optimizer.step()
            run.optimizer.zero_grad()
            sums = progress.sums.setdefault(str(group.runs.index(run)), [0.0, 0.0, 0.0])
            for at, amount in enumerate((losses[number], correct[number], images)):
                sums[at] += amount
            if images and ("loss" not in entry or value < entry["loss"]):
                entry |= {"loss": value, "lr": rate}
                if run.task.head_kind.has_classes:
                    entry["accuracy"] = correct[number] / images
        return entry

    def end_epoch(self, group: RunGroup) -> None:
        """Validates, keeps each run's best weights, stops runs out of patience, and starts the next epoch."""
        progress, entries = group.progress, []
        runs, results = [run for each in self.groups for run in each.runs], self._validate(group)
        for run in group.active:
            found = results.get(id(run))
            if found is not None and not math.isfinite(found["loss"]):
                run.diverge(f"validation loss {found['loss']:.3g}", progress.step)
                continue
            if not all(bool(torch.isfinite(parameter).all()) for parameter in run.trained.values()):
                run.diverge("weights not finite", progress.step)
                continue
            loss, correct, images = progress.sums.get(str(group.runs.index(run)), [0.0, 0.0, 0.0])
            entry: dict[str, Any] = {
                "run": runs.index(run),
                "epoch": progress.epoch + 1,
                "step": progress.step,
                "train_loss": loss / max(images, 1),
            }
            if len(self.groups) > 1:
                entry["group"] = group.name
            if run.task.head_kind.has_classes:
                entry["train_accuracy"] = correct / max(images, 1)
            if found is not None:
                entry |= {f"val_{name}": value for name, value in found.items() if isinstance(value, float)}
            if found is None or run.sample_weight is not None:
                # Nothing to choose by, or a fold, which estimates a run that has nothing to choose by: the last epoch.
                run.keep_best((float(progress.epoch), 0.0), progress.epoch + 1)
            else:
                run.keep_best(score(run.task.kind, found), progress.epoch + 1)
            run.history.append(entry)
            entries.append(entry)
            if run.recipe.patience and progress.epoch + 1 - run.best_epoch >= run.recipe.patience:
                run.stopped = f"no better validation score for {run.recipe.patience} epochs"
        group.next_epoch()
        for callback in self.callbacks:
            callback.on_epoch_end(group, entries)

    def _validate(self, group: RunGroup) -> dict[int, dict[str, Any]]:
        """The validation metrics of each active run, by its id."""
        results = {}
        for loader, runs in group.val_sets:
            forward = build_forward(self.backbone, [run.task for run in runs])
            logits, _ = collect_logits(
                forward,
                self.backbone,
                loader,
                autocast=self.autocast,
                tick=lambda images: self.on_validation(),
                all_gather=self.processes.all_gather,
            )
            for run, out in zip(runs, logits, strict=True):
                assert run.val_targets is not None
                answers = out if run.scale is None else run.scale.undo(out)
                results[id(run)] = measure(run.task.kind, run.task.labels, answers, run.val_targets)
        return results


def read_numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The values of some scalars on one device, as one copy."""
    wide = torch.float64 if any(one.dtype == torch.float64 for one in scalars) else torch.float32
    return list(torch.stack([one.detach().to(wide) for one in scalars]).tolist())


@dataclass
class _StepSums:
    """Sums over the batches of one step, for each active run of a group. They stay on the device."""

    runs: list[Run]
    losses: list[list[Tensor]]
    correct: list[list[Tensor]]
    images: list[float]
    """Images that count: a run may have some held out."""

    @classmethod
    def over(cls, group: RunGroup, batches: Sequence[AnyBatch], processes: Processes) -> _StepSums:
        runs = group.active
        images = [float(sum(batch.total for batch in batches))] * len(runs)
        index = torch.cat([batch.index for batch in batches])
        weighted = {at: run.sample_weight[index].sum() for at, run in enumerate(runs) if run.sample_weight is not None}
        if weighted:
            [counts] = processes.all_reduce([torch.stack(list(weighted.values())).double()])
            for at, count in zip(weighted, counts.numpy(), strict=True):
                images[at] = float(count)
        return cls(runs, [[] for _ in runs], [[] for _ in runs], images)

    def totals(self) -> list[Tensor]:
        """The summed losses of all runs, then their correct answers: zero in a process that had no image."""
        nothing = [next(iter(run.trained.values())).new_zeros(()) for run in self.runs]
        return [
            torch.stack([zero, *(part.to(zero) for part in parts)]).sum()
            for own in (self.losses, self.correct)
            for zero, parts in zip(nothing, own, strict=True)
        ]

    def place(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """The targets of a batch and its samples, on the device: one copy for all runs."""
        device = next(iter(self.runs[0].trained.values())).device
        return batch.targets.to(device, non_blocking=True), batch.index.to(device, non_blocking=True)

    def losses_of(self, batch: AnyBatch, outs: Sequence[Tensor]) -> list[Tensor]:
        targets, index = self.place(batch)
        return [self.loss(number, targets, index, out) for number, out in enumerate(outs)]

    def loss(self, number: int, targets: Tensor, index: Tensor, out: Tensor) -> Tensor:
        """This batch's part of a run's mean loss, for backward; loss and correct answers are added to the sums."""
        run = self.runs[number]
        there = run.there
        targets = targets if there.targets is None else there.targets[index]
        sample_weight = None if there.sample_weight is None else there.sample_weight[index]
        how: dict[str, Any] = {"smoothing": run.recipe.label_smoothing, "weights": there.class_weights}
        aims = targets if run.scale is None else run.scale.apply(targets)
        part = run.task.head_kind.loss_sum(out, aims, sample_weight=sample_weight, **how)
        if run.scale is None:
            self.losses[number].append(part.detach())
        else:  # the loss that is reported is in the user's units, as that of validation
            answers = run.scale.undo(out.detach())
            self.losses[number].append(run.task.head_kind.loss_sum(answers, targets, sample_weight=sample_weight))
        if run.task.head_kind.has_classes:
            correct = (out.detach().argmax(-1) == targets).to(part.dtype)
            self.correct[number].append((correct if sample_weight is None else correct * sample_weight).sum())
        return part * run.loss_scale.value / max(self.images[number], 1.0)


def _gradients(runs: Sequence[Run]) -> list[Tensor]:
    """The gradients of all parameters, in order; zero in a process that had no image of the batch."""
    parameters = [parameter for run in runs for parameter in run.trained.values()]
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
