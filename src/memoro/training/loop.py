"""The training loop: any number of runs, over any number of sets of images, with one base pass per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, zip_longest
from typing import Any, NoReturn, Protocol

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
from memoro.training.cached import Cache, fill_caches
from memoro.training.checkpoint import (
    check_agreement,
    load_checkpoint,
    make_way,
    run_identity,
    save_checkpoint,
    where_it_continues,
)
from memoro.training.recipe import TrainOptions
from memoro.training.run import Loaders, Run, RunGroup, build_forward, standardised


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
        self.loaders = Loaders(backbone, runs, cache, self.options)
        self.runs = [run for run in runs if run.regime.readout < 1]
        """Those that have steps; what is solved in closed form has none."""
        half = backbone.dtype == torch.float16 or self.options.precision == "float16"
        together: dict[Any, list[Run]] = {}
        for run in self.runs:
            together.setdefault(run.group_key, []).append(run)
        self.groups: list[RunGroup] = []
        for number, members in enumerate(together.values(), start=1):
            loader = self.loaders.train(members[0])
            for run in members:
                run.start(members[0], self.loaders, backbone.device, half=half)
            self.groups.append(RunGroup(members, loader, f"{number}: {members[0].splits.name}"))
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
            fill_caches(self.loaders.cached, self.cache, processes=self.processes, quiet=self.options.quiet)

    def train(self) -> None:
        """Trains all runs to the end and leaves each task with its best weights by validation score."""
        with standardised(self.runs):
            self._start()
            with deferred_interrupts() as interrupted:
                while going := [group for group in self.groups if not group.finished]:
                    taken = [(group, group.next_batches()) for group in going]
                    if stepping := [(group, batches) for group, batches in taken if batches]:
                        self.step(stepping)
                    for group in [group for group, batches in taken if not batches]:
                        self.end_epoch(group)
                        if self._is_due() or all(group.finished for group in self.groups):
                            self.save()
                    if self.processes.any(interrupted()):
                        self._stop()
                    if self._is_due(self.checkpoint_seconds):
                        self.save()
            for run in self.runs:
                run.restore_best()
                run.task.requires_grad_(False)
            self._share_tasks()

    def _start(self) -> None:
        """Gets ready for the first step, or for the one after the checkpoint."""
        found = self.options.resume and self.checkpoint is not None and self.checkpoint.is_file()
        check_agreement(self.processes.all_gather((self.identity, found)), self.checkpoint)
        for run in self.runs:
            if isinstance(run.task, Task):  # another model may be as large as the backbone
                run.best = run.copy_trained()
        self._started = self._saved = time.monotonic()
        if found:
            assert self.checkpoint is not None
            seconds = load_checkpoint(self.checkpoint, self.groups, self.identity)
            self._started -= seconds
            self.options.phases.add("training", seconds)
            self.options.note(where_it_continues(self.checkpoint, self.groups, seconds))
        self._share_tasks()
        if not found:
            if self.checkpoint is not None and self.processes.main and (text := make_way(self.checkpoint)):
                self.options.note(text)
            self.save()
        for callback in self.callbacks:
            callback.on_train_begin(self.groups)

    def _stop(self) -> NoReturn:
        """Ends the training because of Ctrl-C, with a checkpoint."""
        self.save()
        self.processes.all_gather("saved")  # a launcher ends all processes when the first one exits
        done = ", ".join(f"{group.step} of {group.total_steps}" for group in self.groups)
        saved_too = "" if self.checkpoint is None else " and saved"
        raise KeyboardInterrupt(f"stopped{saved_too} after step {done}")

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
        sums = [count_images(group, batches, self.processes) for group, batches in taken]
        for batches_now in zip_longest(*(batches for _, batches in taken)):
            shared: list[tuple[RunGroup, AnyBatch, list[StepSums]]] = []
            for (group, _), batch, own in zip(taken, batches_now, sums, strict=True):
                if batch is None or not len(batch.targets):  # no batch is left, or none of its images is this process's
                    continue
                if isinstance(group.runs[0].task, Task):
                    shared.append((group, batch, own))
                else:
                    assert isinstance(batch, Batch)  # features are kept only for what composes
                    self._backward_separately(batch, own)
            if not shared:
                continue
            inputs = [inputs_of(batch, self.backbone) for _, batch, _ in shared]
            with self.autocast():
                logits = answer_together([group.forward(self.backbone) for group, _, _ in shared], inputs)
            losses = []
            for (_, batch, own), outs in zip(shared, logits, strict=True):
                targets, index = self._place(batch)
                losses += [one.loss(targets, index, out) for one, out in zip(own, outs, strict=True)]
            # Runs have disjoint parameters, so one backward pass gives each run its own gradient.
            torch.autograd.backward(torch.stack(losses).sum())
        reduce_sums(sums, self.processes)
        for (group, batches), own in zip(taken, sums, strict=True):
            entry = self._update(group, own)
            entry["images_per_second"] = group.count_step(batches)
            if len(self.groups) > 1:
                entry["group"] = group.name
            for callback in self.callbacks:
                callback.on_step_end(group, entry)

    def _place(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """The targets of a batch and its samples, on the device: one copy for all runs."""
        device = self.backbone.device
        return batch.targets.to(device, non_blocking=True), batch.index.to(device, non_blocking=True)

    def _backward_separately(self, batch: Batch, sums: Sequence[StepSums]) -> None:
        """One model after the other, so that memory holds the activations of one at a time. Each sees only the
        images that it learns from."""
        for own in sums:
            run = own.run
            seen = batch if run.learns is None else batch.select(run.learns[batch.index] > 0)
            if not len(seen.targets):  # all of them are held out
                continue
            with self.autocast():
                out = run.task(inputs_of(seen, self.backbone))
            torch.autograd.backward(own.loss(*self._place(seen), out))

    def _update(self, group: RunGroup, sums: Sequence[StepSums]) -> dict[str, Any]:
        """Each run clips and steps on its own. Returns what is logged: the loss of the best run."""
        total = group.total_steps
        entry: dict[str, Any] = {"step": group.step + 1, "epoch": group.epoch + 1, "steps": total}
        for own in sums:
            run = own.run
            loss, correct, *norms = own.numbers
            mean = loss / max(own.images, 1.0)
            if not run.step(own.gradients, norms, mean, group.step, total):
                continue
            epoch = group.sums.setdefault(str(group.runs.index(run)), [0.0, 0.0, 0.0])
            for at, amount in enumerate((loss, correct, own.images)):
                epoch[at] += amount
            if own.images and mean < entry.get("loss", math.inf):
                entry |= {"loss": mean, "lr": run.recipe.rate(group.step, total)}
                if run.task.head_kind.has_classes:
                    entry["accuracy"] = correct / own.images
        return entry

    def end_epoch(self, group: RunGroup) -> None:
        """Validates, keeps each run's best weights, stops runs out of patience, and starts the next epoch."""
        entries = []
        runs, results = [run for each in self.groups for run in each.runs], self._validate(group)
        for run in group.active:
            found = results.get(id(run))
            if found is not None and not math.isfinite(found["loss"]):
                run.diverge(f"validation loss {found['loss']:.3g}", group.step)
                continue
            if not all(bool(torch.isfinite(parameter).all()) for parameter in run.trained.values()):
                run.diverge("weights not finite", group.step)
                continue
            loss, correct, images = group.sums.get(str(group.runs.index(run)), [0.0, 0.0, 0.0])
            entry: dict[str, Any] = {
                "run": runs.index(run),
                "epoch": group.epoch + 1,
                "step": group.step,
                "train_loss": loss / max(images, 1),
            }
            if len(self.groups) > 1:
                entry["group"] = group.name
            if run.task.head_kind.has_classes:
                entry["train_accuracy"] = correct / max(images, 1)
            if found is not None:
                entry |= {f"val_{name}": value for name, value in found.items() if isinstance(value, float)}
            if found is None or run.held_out is not None:
                # Nothing to choose by, or a fold, which estimates a run that has nothing to choose by: the last epoch.
                run.keep_best((float(group.epoch), 0.0), group.epoch + 1)
            else:
                run.keep_best(score(run.task.kind, found), group.epoch + 1)
            run.history.append(entry)
            entries.append(entry)
            if run.recipe.patience and group.epoch + 1 - run.best_epoch >= run.recipe.patience:
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
                assert run.val is not None
                answers = out if run.scale is None else run.scale.undo(out)
                results[id(run)] = measure(run.task.kind, run.task.labels, answers, run.val.targets)
        return results


@dataclass
class StepSums:
    """Sums of one run over the batches of one step. They stay on the device."""

    run: Run
    images: float
    """Images that count: a run may have some held out."""
    losses: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """Those of all parameters, in order, over all processes."""
    numbers: list[float] = field(default_factory=list)
    """The summed loss and the correct answers over all processes, then the norm of each gradient."""

    def loss(self, targets: Tensor, index: Tensor, out: Tensor) -> Tensor:
        """This batch's part of the run's mean loss, for backward; loss and correct answers are added to the sums."""
        run, head = self.run, self.run.task.head_kind
        targets = targets if run.targets is None else run.targets[index]
        sample_weight = None if run.sample_weight is None else run.sample_weight[index]
        part = head.loss_sum(
            out,
            targets if run.scale is None else run.scale.apply(targets),
            smoothing=run.recipe.label_smoothing,
            weights=run.class_weights,
            sample_weight=sample_weight,
        )
        if run.scale is None:
            self.losses.append(part.detach())
        else:  # the loss that is reported is in the user's units, as that of validation
            self.losses.append(head.loss_sum(run.scale.undo(out.detach()), targets, sample_weight=sample_weight))
        if head.has_classes:
            correct = (out.detach().argmax(-1) == targets).to(part.dtype)
            self.correct.append((correct if sample_weight is None else correct * sample_weight).sum())
        return part * run.loss_scale.value / max(self.images, 1.0)

    @property
    def totals(self) -> list[Tensor]:
        """The summed loss, and the correct answers; zero in a process that had no image of the batches."""
        zero = next(iter(self.run.trained.values())).new_zeros(())
        return [torch.stack([zero, *(part.to(zero) for part in parts)]).sum() for parts in (self.losses, self.correct)]

    @property
    def own_gradients(self) -> list[Tensor]:
        """Those of this process, zero if it had no image of the batches."""
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in self.run.trained.values()]


def count_images(group: RunGroup, batches: Sequence[AnyBatch], processes: Processes) -> list[StepSums]:
    """Sums for each active run of a group, with the number of images over all processes that it learns from."""
    sums = [StepSums(run, float(sum(batch.total for batch in batches))) for run in group.active]
    index = torch.cat([batch.index for batch in batches])
    weighted = {at: one.run.learns[index].sum() for at, one in enumerate(sums) if one.run.learns is not None}
    if weighted:
        [counts] = processes.all_reduce([torch.stack(list(weighted.values())).double()])
        for at, count in zip(weighted, counts.numpy(), strict=True):
            sums[at].images = float(count)
    return sums


def reduce_sums(sums: Sequence[Sequence[StepSums]], processes: Processes) -> None:
    """Adds up gradients, losses and correct answers over all processes, and reads all numbers as one copy."""
    scalars: list[Tensor] = []
    for group in sums:
        gradients = iter(processes.all_reduce([gradient for own in group for gradient in own.own_gradients]))
        totals = iter(processes.all_reduce([total for own in group for total in own.totals]))
        for own in group:
            own.gradients = list(islice(gradients, len(own.run.trained)))
            scalars += [*islice(totals, 2), *map(torch.linalg.vector_norm, own.gradients)]
    wide = torch.float64 if any(one.dtype == torch.float64 for one in scalars) else torch.float32
    numbers = iter(torch.stack([one.detach().to(wide) for one in scalars]).tolist())
    for own in chain.from_iterable(sums):
        own.numbers = list(islice(numbers, 2 + len(own.gradients)))
