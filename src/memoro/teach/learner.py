"""What is known from the labels so far: guesses for all images, suspects, and a curve over the number of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memoro.heads import HEADS, HeadKind
from memoro.tasks.task import Task
from memoro.teach.gallery import Gallery
from memoro.teach.labels import Decision, label_text
from memoro.teach.learning import LabelledImages, Learned, find_groups, solve
from memoro.teach.suspects import Suspect, find_suspects

CURVE = (6, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000)
"""Numbers of labels at which the curve has points."""


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known at one moment. Readers take it once, and never see half of a change."""

    version: int = -1
    """That of the session's decisions."""
    done: int = 0
    """Images whose statistics were there, or that cannot be read."""
    decisions: tuple[tuple[int, Decision], ...] = ()
    """What was learned from."""
    learned: Learned | None = None
    labels: tuple[str, ...] = ()
    """What the columns of `answers` stand for."""
    answers: Tensor | None = None
    """(n, labels) probabilities or numbers; NaN for images without statistics."""
    suspects: tuple[Suspect, ...] = ()

    def answered(self, at: int) -> Tensor | None:
        """(labels) the answer to an image, if there is one."""
        row = None if self.answers is None else self.answers[at]
        return None if row is None or bool(row.isnan().any()) else row

    def guess(self, at: int, kind: HeadKind) -> tuple[str | list[str] | float, float | None] | None:
        """The answer to an image and its probability, or that of the least certain of several labels."""
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
        self._gallery, self._kind = gallery, kind
        self._start = None if start is None or start.readout is None else start
        self._nothing = Knowledge(labels=() if self._start is None else tuple(self._start.labels))
        self.now = self._nothing
        self.curve: dict[int, dict[str, float]] = {}

    def step(self, training: Mapping[int, Decision], classes: Sequence[str], version: int) -> bool:
        """Solves the labels so far if they are new, and answers images that have become ready. Whether there was
        something to do."""
        gallery, before = self._gallery, self.now
        done, ready = gallery.done, gallery.ready.copy()
        if (version, done) == (before.version, before.done):
            return self._draw_curve()
        decisions = tuple((at, one) for at, one in training.items() if ready[at])
        if decisions[: len(before.decisions)] != before.decisions:
            self.curve = {}
        known = before if decisions == before.decisions else self._learn(decisions, classes)
        self.now = replace(
            known, version=version, done=done, decisions=decisions, answers=self._answer(known, torch.from_numpy(ready))
        )
        return True

    def _learn(self, decisions: Sequence[tuple[int, Decision]], classes: Sequence[str]) -> Knowledge:
        """What these decisions teach, with left-out answers to their images only."""
        gallery, images = self._gallery, LabelledImages.of(decisions, self._kind, classes)
        if images is None:
            return self._nothing
        learned = solve(images, gallery.read, gallery.reads, find_groups(gallery.images(images.index.tolist())))
        answers = torch.full((len(gallery.ready), len(images.labels)), torch.nan)
        answers[images.index] = learned.left_out
        paths = [gallery.photos.paths[at] for at, _ in decisions]
        suspects = find_suspects(learned, paths, [label_text(one.label) for _, one in decisions])
        return Knowledge(learned=learned, labels=images.labels, answers=answers, suspects=tuple(suspects))

    def _answer(self, known: Knowledge, ready: Tensor) -> Tensor | None:
        """The answers to all images that are ready (n); only those are computed that are not known."""
        if known.learned is None and self._start is None:
            return None
        answers = torch.full((len(ready), len(known.labels)), torch.nan)
        if known.answers is not None:
            answers = known.answers.clone()
        index = (ready & answers[:, 0].isnan()).nonzero().flatten()
        if known.learned is not None:
            answers[index] = known.learned.answer(self._gallery.read, index)
        elif self._start is not None and self._start.readout is not None and self._start.spec.readout is not None:
            with torch.no_grad():  # the read-out is a part of the answers, and the only one that needs no pass
                logits = (
                    self._start.readout(self._gallery.read(index).float().flatten(1)) / self._start.spec.readout.share
                )
            answers[index] = HEADS[self._kind].probabilities(logits)
        return answers

    def _draw_curve(self) -> bool:
        """Adds a point to the curve; whether there was one to add."""
        now, gallery = self.now, self._gallery
        if now.learned is None:
            return False
        total = len(now.decisions)
        if (figure := now.learned.figure()) is not None:
            self.curve[total] = figure
        count = max((count for count in CURVE if count < total and count not in self.curve), default=None)
        if count is None:
            return False
        part = LabelledImages.of(now.decisions[:count], self._kind, now.labels)
        solved = None if part is None else solve(part, gallery.read, gallery.reads, now.learned.groups[:count])
        self.curve[count] = (solved.figure() if solved is not None else None) or {}
        return True
