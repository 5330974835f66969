"""What a training shows and leaves behind: progress bar, run folder."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import Timeout

from memoro.console import Bar
from memoro.errors import TrainingError
from memoro.evaluation.metrics import COLUMNS
from memoro.evaluation.predictions import no_formula
from memoro.files import hold_folder, left_behind, write_whole
from memoro.heads import HEADS
from memoro.training.loop import Trainer
from memoro.training.recipe import CHECKPOINT, METRICS, REPORT, SKIPPED
from memoro.training.run import RunGroup


class ProgressBar(Bar):
    """Shows optimiser steps with the training loss, images per second and the best validation score so far.

    With several runs, each figure is the best of all runs. The score has the name and the value that the table of
    settings shows; with folds, which are scored all together at the end, it is the mean of all runs that have one.
    """

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        super().__init__(f"training {title}", total, quiet=quiet, transient=False)
        self._step, self._best = "", dict[str, float]()

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None:
        runs = [run for group in groups for run in group.runs]
        if len(runs) > 1:
            self.update(description=f"training, best of {len(runs)} runs")
        self.update(completed=sum(group.step for group in groups))
        for group in groups:
            self._keep_best(group, [entry for run in group.runs for entry in run.history])

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None:
        formats = {"loss": "train loss {:.3g}", "images_per_second": "{:.0f} images/s"}
        shown = [form.format(entry[name]) for name, form in formats.items() if name in entry]
        self._step = ", ".join([f"epoch {entry['epoch']}", *shown])
        self._show(advance=1)

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        self._keep_best(group, entries)
        self._show()

    def _keep_best(self, group: RunGroup, entries: Sequence[dict[str, Any]]) -> None:
        folds = any(run.held_out is not None for run in group.runs)
        for figure in [head.main_metric for head in HEADS.values()]:
            scores = [entry[f"val_{figure}"] for entry in entries if f"val_{figure}" in entry]
            if folds and scores:  # the best of few images would be luck
                self._best[f"mean fold {COLUMNS[figure]}"] = sum(scores) / len(scores)
            elif scores:
                name = f"validation {COLUMNS[figure]}"
                self._best[name] = max(self._best.get(name, -math.inf), *scores)

    def _show(self, advance: int = 0) -> None:
        scores = [f"{name} {value:.3f}" for name, value in self._best.items()]
        shown = [self._step, *scores]
        if self.narrow:  # there is room for one of them beside the bar
            shown = scores or [self._step.partition(",")[0]]
        self.update(advance, figures=", ".join(filter(None, shown)))


CONFIG = "config.json"
FILES = (METRICS, SKIPPED, REPORT)
"""What a run folder may have besides."""


class RunFolder:
    """Writes `metrics.jsonl`, `config.json` and `skipped.csv` (images left out), and logs to a tracker."""

    def __init__(self, path: Path, trainer: Trainer, *, track: str | None = None) -> None:
        self.path, self.metrics = path, path / METRICS
        names = list(dict.fromkeys(run.splits.name for run in trainer.all_runs))
        facts = {"backbone": trainer.backbone.name, "fingerprint": trainer.backbone.fingerprint.digest}
        self._config = {**trainer.identity, **facts, "set": names[0] if len(names) == 1 else names}
        self._skipped = list(dict.fromkeys(one for run in trainer.all_runs for one in run.splits.skipped))
        self._tracker = None if track is None else start_tracker(track, path)

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None:
        """Drops lines from after the checkpoint: a killed run wrote them, and they are computed again."""
        kept, by_name = [], {group.name: group for group in groups}
        with _disk_errors(self.path):
            for rest in (*left_behind(self.path / CHECKPOINT), *left_behind(self.metrics)):
                rest.unlink()
            for line in self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []:
                try:
                    entry = json.loads(line)
                    at = by_name[entry.get("group", groups[0].name)]
                    done = entry["epoch"] <= at.epoch if "train_loss" in entry else entry["step"] <= at.step
                except (ValueError, LookupError, TypeError, AttributeError):
                    continue  # cut off by the kill, damaged, or of another training in the same folder
                if done:
                    kept.append(line + b"\n")
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path / CONFIG, text.encode(errors="backslashreplace"))
        write_whole(self.metrics, b"".join(kept))
        for other in FILES[1:]:  # of another training
            (self.path / other).unlink(missing_ok=True)
        if self._skipped:
            lines = io.StringIO()
            rows = [("image", "reason"), *(map(no_formula, row) for row in self._skipped)]
            csv.writer(lines, lineterminator="\n").writerows(rows)
            write_whole(self.path / SKIPPED, lines.getvalue().encode(errors="backslashreplace"))

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None:
        self.write(entry)

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        with _disk_errors(self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._tracker is not None:
            run = "-".join(str(entry[key]) for key in ("group", "run") if key in entry)
            values = {name: value for name, value in entry.items() if isinstance(value, float)}
            self._tracker.log({f"{name}/{run}" if run else name: values[name] for name in values}, step=entry["step"])


def start_tracker(name: str, folder: Path) -> Any:
    """One of Accelerate's trackers, which shows the curves of all runs of a training."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise TrainingError(f"unknown tracker {name!r}: choose one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}.")
    if name not in map(str, get_available_trackers()):
        raise TrainingError(f"{name} is not installed: pip install {name}.")
    kind = LOGGER_TYPE_TO_CLASS[name]
    tracker = kind(name, folder) if kind.requires_logging_directory else kind(folder.name)
    tracker.start()
    return tracker


def _check_own(path: Path) -> None:
    """Raises if the folder has files that a training would replace and that no training wrote."""
    try:
        if "fingerprint" in json.loads((path / CONFIG).read_bytes()):
            return
    except (OSError, ValueError, TypeError):
        pass
    there = next((path / name for name in (CONFIG, *FILES) if (path / name).exists()), None)
    if there is not None and not (path / CHECKPOINT).is_file():
        raise TrainingError(f"{path} has a {there.name} that is not from a training: choose another `folder`.")


class InUseError(TrainingError):
    """Another process holds the lock of a run folder."""


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Keeps other trainings out of a run folder. The lock belongs to this process and ends with it, however it ends."""
    _check_own(path)
    with ExitStack() as held:
        try:
            held.enter_context(hold_folder(path))
        except Timeout:
            text = f"another training is running in {path}: wait for it, or choose another run folder."
            raise InUseError(text) from None
        except OSError as error:
            raise TrainingError(f"cannot write to {path} ({error.strerror}): choose another run folder.") from None
        yield


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {path} ({error.strerror}). The last checkpoint is untouched: fix the problem, then train "
            "again with `resume=True`."
        ) from None
