"""A run's folder: figures line by line, the settings, and pictures of how it went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memoro.errors import TrainingError
from memoro.taskfile import write_whole
from memoro.train.course import Course
from memoro.train.results import FitResult

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

    def begin(self, courses: Sequence[Course]) -> None:
        """Drops lines beyond this point: what a killed run wrote after its last checkpoint is computed again."""
        kept, places = [], {course.name: course.progress for course in courses}
        with _disk(self.path):
            for file in (self.checkpoint, self.metrics):
                for rest in self.path.glob(f".{file.name}.*.part"):  # left by a kill in the middle of writing
                    rest.unlink()
            for line in self.metrics.read_bytes().splitlines() if self.metrics.is_file() else []:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the line that the kill cut off
                place = places.get(entry.get("course", courses[0].name))
                if place is None:
                    continue  # of another training in the same folder
                if entry["epoch"] <= place.epoch if "train_loss" in entry else entry["step"] <= place.step:
                    kept.append(line + b"\n")
        write_whole(self.metrics, b"".join(kept))
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path / "config.json", text.encode())

    def step(self, course: Course, entry: dict[str, Any]) -> None:
        self._write(entry)

    def epoch(self, course: Course, entries: list[dict[str, Any]]) -> None:
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
    from memoro.train.metrics import confusion
    from memoro.train.plots import draw_confusion, draw_curve

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
