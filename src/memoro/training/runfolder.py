"""Pictures of a training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from memoro.console import plain_column, plain_console
from memoro.errors import TrainingError
from memoro.files import write_whole
from memoro.training.fit import FitResult
from memoro.training.group import RunGroup

if TYPE_CHECKING:
    from memoro.training.sweep import SweepRow


def draw_curve(path: Path, title: str, history: list[dict[str, Any]]) -> Path:
    """Loss, and accuracy where there is one, over epochs; training and validation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [name for name in ("loss", "accuracy") if any(f"train_{name}" in entry for entry in history)]
    figure = Figure(figsize=(5.2 * len(panels), 3.6), layout="constrained")
    for place, name in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for split, style in (("train", "o--"), ("val", "o-")):
            points = [(e["epoch"], e[f"{split}_{name}"]) for e in history if f"{split}_{name}" in e]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, markersize=3, label={"val": "validation"}.get(split, split)
                )
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, parse_math=False)
    return _write(figure, path)


def draw_sweep(path: Path, title: str, rows: Sequence[SweepRow], figure_name: str) -> Path:
    """Validation score over learning rate: a line for each cell count and fork, its seeds as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple[int, int], list[SweepRow]] = {}
    for row in rows:
        if row.val:
            lines.setdefault((row.cells, row.from_layer), []).append(row)
    for (cells, layer), some in lines.items():
        some = sorted(some, key=lambda row: row.lr)
        rates = [row.lr for row in some]
        (line,) = axes.plot(
            rates, [sum(row.val) / len(row.val) for row in some], "o-", label=f"{cells} cells, from layer {layer}"
        )
        axes.fill_between(
            rates, [min(row.val) for row in some], [max(row.val) for row in some], alpha=0.15, color=line.get_color()
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {figure_name.replace('_', ' ')}")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return path


def draw_confusion(path: Path, title: str, matrix: Tensor, labels: list[str]) -> Path:
    """Which class was taken for which: each row's shares, with counts where they can be read."""
    from matplotlib.figure import Figure

    count = len(labels)
    shares = (matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    side = min(14.0, max(4.5, 0.45 * count + 2.5))
    figure = Figure(figsize=(side, side * 0.9), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if count <= 60:
        size = 9 if count <= 25 else 6
        names = [label if len(label) <= 18 else f"{label[:17]}…" for label in labels]
        axes.set_xticks(range(count), names, fontsize=size, parse_math=False)
        axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        for name in axes.get_xticklabels():
            name.set(rotation=60, ha="right", rotation_mode="anchor")
    if count <= 25:
        for row in range(count):
            for column in range(count):
                if value := int(matrix[row, column]):
                    shade = "white" if shares[row, column] > 0.5 else "black"
                    axes.text(column, row, str(value), ha="center", va="center", fontsize=8, color=shade)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    return _write(figure, path)


def _write(figure: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that the font lacks: boxes, but a picture
        figure.savefig(path, dpi=120)
    return path


class ProgressBar:
    """A bar over optimiser steps with loss, accuracy, images per second and time left, on stderr.

    Of several runs the figures are the best, each for itself, and the bar says so.
    """

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self._bar = Progress(
            plain_column("description"),
            BarColumn(),
            MofNCompleteColumn(),
            plain_column("fields[figures]"),
            TimeRemainingColumn(),
            console=plain_console(stderr=True),
            disable=quiet,
        )
        self._job = self._bar.add_task(title, total=total, figures="")
        self._last = self._val = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, groups: Sequence[RunGroup]) -> None:
        runs = sum(len(group.runs) for group in groups)
        if runs > 1:
            self._bar.update(self._job, description=f"best of {runs} runs")
        self._bar.update(self._job, completed=sum(group.progress.step for group in groups))

    def step(self, group: RunGroup, entry: dict[str, Any]) -> None:
        figures = [f"epoch {entry['epoch']}"]
        for name, form in (("loss", "{:.3f}"), ("accuracy", "{:.3f}"), ("images_per_second", "{:.0f}")):
            if name in entry:
                label = {"accuracy": "acc", "images_per_second": "img/s"}.get(name, name)
                figures.append(f"{label} {form.format(entry[name])}")
        self._last = " ".join(figures)
        self._show(advance=1)

    def epoch(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        scores = [
            entry[name]
            for entry in entries
            for name in ("val_accuracy", "val_mean_average_precision", "val_r2")
            if name in entry
        ]
        if scores:
            self._val = f"val {max(scores):.3f}"
            self._show()

    def _show(self, advance: int = 0) -> None:
        figures = " ".join(part for part in (self._last, self._val) if part)
        self._bar.update(self._job, advance=advance, figures=figures)


CHECKPOINT = "checkpoint.safetensors"


class RunFolder:
    """Writes `metrics.jsonl` and `config.json` as a training goes; TensorBoard events on request."""

    def __init__(self, path: Path, config: dict[str, Any], *, tensorboard: bool = False) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self._config = config
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise TrainingError("TensorBoard is not installed: pip install 'memoro[tensorboard]'.") from None
            self._board = SummaryWriter(str(path / "tensorboard"))

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def begin(self, groups: Sequence[RunGroup]) -> None:
        """Drops lines beyond this point: what a killed run wrote after its last checkpoint is computed again."""
        kept, places = [], {group.name: group.progress for group in groups}
        with _disk(self.path):
            for file in (self.checkpoint, self.metrics):
                for rest in self.path.glob(f".{file.name}.*.part"):  # left by a kill in the middle of writing
                    rest.unlink()
            for line in self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the line that the kill cut off
                place = places.get(entry.get("group", groups[0].name))
                if place is None:
                    continue  # of another training in the same folder
                if entry["epoch"] <= place.epoch if "train_loss" in entry else entry["step"] <= place.step:
                    kept.append(line + b"\n")
        write_whole(self.metrics, b"".join(kept))
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path / "config.json", text.encode())

    def step(self, group: RunGroup, entry: dict[str, Any]) -> None:
        self._write(entry)

    def epoch(self, group: RunGroup, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        with _disk(self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, entry["step"])
            self._board.flush()


def draw_run(folder: Path, mark: str, task: Any, result: FitResult) -> list[Path]:
    """The training curve, and the confusion matrix where there is one; `mark` tells several tasks' files apart."""
    from memoro.evaluation.metrics import confusion
    from memoro.training.runfolder import draw_confusion, draw_curve

    with _disk(folder):
        pictures = [draw_curve(folder / f"curve{mark}.png", task.name, result.history)] if result.history else []
        if task.kind == "softmax" and result.logits is not None and result.targets is not None:
            matrix = confusion(result.logits, result.targets)
            pictures.append(draw_confusion(folder / f"confusion{mark}.png", task.name, matrix, task.labels))
    return pictures


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {path} ({error.strerror}); the last checkpoint is untouched. Once that is mended, the "
            "same command with --resume goes on."
        ) from None
