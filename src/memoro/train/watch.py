"""What a person sees while a training runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from memoro.progress import plain_column, plain_console
from memoro.train.course import Course


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

    def begin(self, courses: Sequence[Course]) -> None:
        runs = sum(len(course.runs) for course in courses)
        if runs > 1:
            self._bar.update(self._job, description=f"best of {runs} runs")
        self._bar.update(self._job, completed=sum(course.progress.step for course in courses))

    def step(self, course: Course, entry: dict[str, Any]) -> None:
        figures = [f"epoch {entry['epoch']}"]
        for name, form in (("loss", "{:.3f}"), ("accuracy", "{:.3f}"), ("images_per_second", "{:.0f}")):
            if name in entry:
                label = {"accuracy": "acc", "images_per_second": "img/s"}.get(name, name)
                figures.append(f"{label} {form.format(entry[name])}")
        self._last = " ".join(figures)
        self._show(advance=1)

    def epoch(self, course: Course, entries: list[dict[str, Any]]) -> None:
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
