"""What is known from the labels so far: guesses for all images, doubts, and a curve over the number of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from memoro.heads import HEADS, HeadKind
from memoro.tasks.task import Task
from memoro.teach.gallery import Gallery
from memoro.teach.labels import Decision
from memoro.teach.learning import Learned, Lesson, find_groups, solve
from memoro.teach.suspects import Doubt, doubts

CURVE = (6, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000)
"""Numbers of labels at which the curve has points."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known at one moment. Readers take it once, and never see half of a change."""

    version: int = -1
    """Of the labels."""
    done: int = 0
    """Images whose statistics were there, or that cannot be read."""
    learned: Learned | None = None
    labels: tuple[str, ...] = ()
    """Of the columns of `answers`."""
    answers: Tensor | None = None
    """(n, labels) probabilities or numbers; NaN for images without statistics."""
    doubts: tuple[Doubt, ...] = ()

    def answered(self, at: int) -> Tensor | None:
        """(labels) the answer to an image, if there is one."""
        row = None if self.answers is None else self.answers[at]
        return None if row is None or bool(row.isnan().any()) else row

    def guess(self, at: int, kind: HeadKind) -> tuple[str | list[str] | float, float | None] | None:
        """The answer to an image and its probability, that of the least certain label where there are several."""
        row = self.answered(at)
        if row is None:
            return None
        if kind == "regression":
            return float(row[0]), None
        if kind == "multilabel":
            chosen = [label for label, share in zip(self.labels, row.tolist(), strict=True) if share > 0.5]
            return chosen, float(torch.maximum(row, 1 - row).min())
        return self.labels[int(row.argmax())], float(row.max())


class Learner:
    """Learns in steps from a gallery's statistics. `now` is replaced as a whole; one thread calls `step`."""

    def __init__(self, gallery: Gallery, kind: HeadKind, start: Task | None) -> None:
        self._gallery, self._kind, self._start = gallery, kind, start
        self.now = Knowledge()
        self.curve: dict[int, dict[str, float]] = {}

    def step(self, decisions: Mapping[int, Decision], classes: Sequence[str], version: int) -> bool:
        """Solves the labels so far if they are new, answers images that have become ready, then judges. Whether there
        was something to do."""
        gallery, before = self._gallery, self.now
        done, ready = gallery.done, np.flatnonzero(gallery.ready)
        if (version, done) == (before.version, before.done):
            return self._draw_curve()
        lesson = Lesson.of({at: one for at, one in decisions.items() if gallery.ready[at]}, self._kind, classes)
        old = None if before.learned is None else before.learned.lesson
        if lesson is not None and old is not None and lesson.same(old):
            self.now = replace(before, version=version, done=done, answers=self._answer(before, ready))
            return True
        if lesson is None or old is None or not lesson.continues(old):
            self.curve = {}
        learned = None
        if lesson is not None:
            learned = solve(lesson, gallery.read, gallery.reads, find_groups(gallery.images(lesson.index.tolist())))
        labels = lesson.labels if lesson is not None else () if self._start is None else self._start.labels
        new = Knowledge(version, done, learned, tuple(labels))
        answers = self._answer(new, ready)
        if learned is not None and answers is not None:
            answers[learned.lesson.index] = learned.left_out  # what is known of an image without its own label
        self.now = replace(new, answers=answers)
        if learned is not None:
            self.now = replace(self.now, doubts=tuple(doubts(learned)))
        return True

    def _answer(self, known: Knowledge, ready: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor | None:
        """The answers to all images; only those are computed that are not known."""
        index = torch.from_numpy(ready).long()
        if known.answers is not None:
            index = index[known.answers[index, 0].isnan()]
        if known.learned is not None:
            rows = known.learned.answer(self._gallery.read, index)
        elif self._start is not None and self._start.readout is not None and self._start.spec.readout is not None:
            with torch.no_grad():  # the read-out is a part of the answers, and the only one that needs no pass
                logits = self._start.readout(self._gallery.read(index).float()) / self._start.spec.readout.share
            rows = HEADS[self._kind].probabilities(logits)
        else:
            return None
        empty = torch.full((len(self._gallery.ready), rows.shape[1]), torch.nan)
        found = empty if known.answers is None else known.answers.clone()
        found[index] = rows
        return found

    def _draw_curve(self) -> bool:
        """Adds a point to the curve; whether there was one to add."""
        learned, gallery = self.now.learned, self._gallery
        if learned is None:
            return False
        total = len(learned.lesson.index)
        if (figure := learned.figure()) is not None:
            self.curve[total] = figure
        count = max((count for count in CURVE if count < total and count not in self.curve), default=None)
        if count is None:
            return False
        part = learned.lesson.first(count)
        solved = None if part is None else solve(part, gallery.read, gallery.reads, learned.groups[:count])
        self.curve[count] = (solved.figure() if solved is not None else None) or {}
        return True
