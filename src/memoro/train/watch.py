"""What a person sees while a training runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memoro.train.course import Course


class ProgressBar:
    """A bar over optimiser steps with loss, accuracy, images per second and time left, on stderr."""

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._job = self._bar.add_task(title, total=total, figures="")
        self._val = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, courses: Sequence[Course]) -> None:
        self._bar.update(self._job, completed=sum(course.progress.step for course in courses))

    def step(self, course: Course, entry: dict[str, Any]) -> None:
        figures = [f"epoch {entry['epoch']}"]
        for name, form in (("loss", "{:.3f}"), ("accuracy", "{:.3f}"), ("images_per_second", "{:.0f}")):
            if name in entry:
                label = {"accuracy": "acc", "images_per_second": "img/s"}.get(name, name)
                figures.append(f"{label} {form.format(entry[name])}")
        self._bar.update(self._job, advance=1, figures=" ".join([*figures, self._val]))

    def epoch(self, course: Course, entries: list[dict[str, Any]]) -> None:
        scores = [
            entry[name]
            for entry in entries
            for name in ("val_accuracy", "val_mean_average_precision", "val_r2")
            if name in entry
        ]
        if scores:
            self._val = f"val {max(scores):.3f}"
