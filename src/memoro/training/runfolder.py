"""What a training shows and leaves behind: progress bar, run folder, plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from memoro.console import plain_column, plain_console
from memoro.errors import TrainingError
from memoro.evaluation.metrics import MAIN_FIGURE, confusion
from memoro.files import write_whole
from memoro.plots import draw_confusion, drawable, save_figure
from memoro.training.fit import FitResult
from memoro.training.group import RunGroup
from memoro.training.loop import Trainer
from memoro.training.recipe import CHECKPOINT, METRICS

if TYPE_CHECKING:
    from memoro.training.sweep import SweepRow


class ProgressBar:
    """A bar over optimiser steps with loss, accuracy, images per second and time left, on stderr.

    With several runs, each figure is the best of all runs, and the bar says so.
    """

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self.bar = Progress(
            plain_column("description"),
            BarColumn(),
            MofNCompleteColumn(),
            plain_column("fields[figures]"),
            TimeRemainingColumn(),
            console=plain_console(stderr=True),
            disable=quiet,
        )
        self._job = self.bar.add_task(title, total=total, figures="")
        self._step = self._val = ""

    def __enter__(self) -> ProgressBar:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None:
        runs = sum(len(group.runs) for group in groups)
        if runs > 1:
            self.bar.update(self._job, description=f"best of {runs} runs")
        self.bar.update(self._job, completed=sum(group.progress.step for group in groups))

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None:
        formats = {"loss": "loss {:.3f}", "accuracy": "acc {:.3f}", "images_per_second": "img/s {:.0f}"}
        shown = [form.format(entry[name]) for name, form in formats.items() if name in entry]
        self._step = " ".join([f"epoch {entry['epoch']}", *shown])
        self._show(advance=1)

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        names = [f"val_{figure}" for figure in MAIN_FIGURE.values()]
        scores = [entry[name] for entry in entries for name in names if name in entry]
        if scores:
            self._val = f"val {max(scores):.3f}"
            self._show()

    def _show(self, advance: int = 0) -> None:
        self.bar.update(self._job, advance=advance, figures=f"{self._step} {self._val}".strip())


class RunFolder:
    """Writes `metrics.jsonl` and `config.json` during a training; TensorBoard events on request."""

    def __init__(self, path: Path, trainer: Trainer, *, tensorboard: bool = False) -> None:
        self.path, self.metrics = path, path / METRICS
        names = list(dict.fromkeys(spec.splits.name for spec in trainer.specs))
        facts = {"backbone": trainer.backbone.name, "fingerprint": trainer.backbone.fingerprint.digest}
        self._config = {**trainer.identity, **facts, "set": names[0] if len(names) == 1 else names}
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise TrainingError("TensorBoard is not installed: pip install 'memoro[tensorboard]'.") from None
            self._board = SummaryWriter(str(path / "tensorboard"))

    def on_train_begin(self, groups: Sequence[RunGroup]) -> None:
        """Drops lines from after the checkpoint: a killed run wrote them, and they are computed again."""
        kept, progress = [], {group.name: group.progress for group in groups}
        with _disk_errors(self.path):
            for name in (CHECKPOINT, METRICS):
                for rest in self.path.glob(f".{name}.*.part"):  # left by a kill while the file was written
                    rest.unlink()
            for line in self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []:
                try:
                    entry = json.loads(line)
                    at = progress[entry.get("group", groups[0].name)]
                    done = entry["epoch"] <= at.epoch if "train_loss" in entry else entry["step"] <= at.step
                except (ValueError, LookupError, TypeError, AttributeError):
                    continue  # cut off by the kill, damaged, or of another training in the same folder
                if done:
                    kept.append(line + b"\n")
        write_whole(self.metrics, b"".join(kept))
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path / "config.json", text.encode())

    def on_step_end(self, group: RunGroup, entry: dict[str, Any]) -> None:
        self.write(entry)

    def on_epoch_end(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self.write(entry)

    def write(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        with _disk_errors(self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, entry["step"])
            self._board.flush()


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Keeps other trainings out of a run folder. The lock belongs to this process and ends with it, however it ends."""
    file = path.absolute() / ".lock"
    lock = FileLock(file, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise TrainingError(
            f"another training is running in {path}: wait for it, or choose another run folder."
        ) from None
    except OSError as error:
        raise TrainingError(f"cannot write to {path} ({error.strerror}): choose another run folder.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # on Windows it cannot be removed while it is held
            file.unlink()
        lock.release()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {path} ({error.strerror}). The last checkpoint is untouched: fix the problem, then run "
            "the same command with --resume."
        ) from None


def draw_run(folder: Path, suffix: str, result: FitResult) -> None:
    """The training curve, and the confusion matrix where there is one; `suffix` tells the files of tasks apart."""
    task = result.task
    with _disk_errors(folder):
        if result.history:
            draw_curve(folder / f"curve{suffix}.png", task.name, result.history)
        if task.kind == "softmax" and result.logits is not None and result.targets is not None:
            matrix = confusion(result.logits, result.targets)
            draw_confusion(folder / f"confusion{suffix}.png", task.name, matrix, task.labels)


def draw_curve(path: Path, title: str, history: list[dict[str, Any]]) -> Path:
    """Loss, and accuracy where there is one, over epochs; training and validation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [name for name in ("loss", "accuracy") if any(f"train_{name}" in entry for entry in history)]
    figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    for place, name in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for split, label, style in (("train", "train", "o--"), ("val", "validation", "o-")):
            points = [(e["epoch"], e[f"{split}_{name}"]) for e in history if f"{split}_{name}" in e]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=3, label=label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(drawable(title), parse_math=False)
    return save_figure(figure, path)


def draw_sweep(path: Path, title: str, rows: Sequence[SweepRow], figure_name: str) -> Path:
    """Validation score over learning rate: a line for each cell count, rank and fork, its seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple[int, int, int], list[SweepRow]] = {}
    for row in sorted(rows, key=lambda row: row.lr):
        if row.val:
            lines.setdefault((row.cells, row.rank, row.from_layer), []).append(row)
    for (cells, rank, layer), line in lines.items():
        own = ", ".join([*([f"rank {rank}"] if rank else []), *([f"{cells} cells"] if cells or not rank else [])])
        rates, label = [row.lr for row in line], f"{own}, from layer {layer}"
        (drawn,) = axes.plot(rates, [sum(row.val) / len(row.val) for row in line], "o-", label=label)
        lowest, highest = [min(row.val) for row in line], [max(row.val) for row in line]
        axes.fill_between(rates, lowest, highest, alpha=0.15, color=drawn.get_color())
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {figure_name.replace('_', ' ')}")
    axes.set_title(drawable(title), parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return save_figure(figure, path)
