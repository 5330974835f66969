"""A run's folder: figures line by line, the settings, and pictures of how it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from memoro.train.checkpoint import Progress


class RunFolder:
    """Writes `metrics.jsonl` and `config.json` as a training goes; TensorBoard events on request."""

    def __init__(self, path: Path, config: dict[str, Any], *, resume: bool = False, tensorboard: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.metrics = path / "metrics.jsonl"
        if not resume:
            self.metrics.unlink(missing_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                from memoro.errors import TrainingError

                raise TrainingError("TensorBoard is not installed: pip install tensorboard.") from None
            self._board = SummaryWriter(str(path / "tensorboard"))

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def forget_after(self, step: int) -> None:
        """Drops lines beyond a step: what a killed run wrote after its last checkpoint is computed again."""
        if not self.metrics.is_file():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # the line that the kill cut off
        self.metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def step(self, progress: Progress, entry: dict[str, Any]) -> None:
        self._write(entry)

    def epoch(self, progress: Progress, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, entry["step"])
            self._board.flush()

    def draw(self, title: str, history: list[dict[str, Any]], matrix: Tensor | None, labels: list[str]) -> list[Path]:
        """The training curve, and the confusion matrix where there is one."""
        from memoro.train.plots import draw_confusion, draw_curve

        pictures = [draw_curve(self.path / "curve.png", title, history)] if history else []
        if matrix is not None:
            pictures.append(draw_confusion(self.path / "confusion.png", title, matrix, labels))
        return pictures
