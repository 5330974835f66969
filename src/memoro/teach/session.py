"""A session: photographs, the decisions about them, and what is learned from these in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.errors import TeachError
from memoro.heads import HEADS, HeadKind, find_kind
from memoro.tasks.spec import check_name
from memoro.tasks.task import Task
from memoro.teach.gallery import Gallery
from memoro.teach.labels import NOTHING, Decision, LabelTable, State, check_label, read_label
from memoro.teach.learning import Learned, Lesson, advise, find_groups, solve
from memoro.teach.photos import Photos, open_photos
from memoro.teach.suggestions import Scene, Suggestion, suggest
from memoro.teach.suspects import Doubt, Suspect, doubts, overlaps
from memoro.training import TrainOptions, train
from memoro.training.warmstart import read_start

SURE = 0.95
"""Probability from which a guess may be accepted without a closer look."""
CURVE = (6, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2000)
"""Numbers of labels at which the curve has points."""
TABLE = "labels.csv"
IDLE = 0.5
"""Seconds after which the background looks for work by itself."""


class Change(NamedTuple):
    """A decision to be written: the image, what is decided, and the row that it replaces, if it must be that one."""

    image: int
    state: State
    label: Any = None
    row: int | None = None


class Session:
    """What `memoro.teach` returns. Decisions are on disk when a method returns; guesses follow in the background.

    Use it in a `with` statement, or call `close`: until then its table of labels is locked.
    """

    def __init__(
        self,
        photos: Photos,
        table: LabelTable,
        backbone: Backbone,
        *,
        name: str,
        labels: Sequence[str] = (),
        start: Task | None = None,
        image_size: int | None = None,
        options: TrainOptions | None = None,
    ) -> None:
        self.photos, self.table, self.backbone, self.name = photos, table, backbone, check_name(name)
        self.start, self.options = start, options or TrainOptions(quiet=True)
        steps = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
        if start is not None:
            start.spec.check_backbone(backbone)
            steps = start.spec.preprocessing or steps
        self.gallery = Gallery(photos, backbone, steps, self.options)
        self.kind: HeadKind = table.kind
        self.missing = 0
        """Rows of the table whose images are no longer there."""
        self.decisions: dict[int, Decision] = {}
        if photos.kind == self.kind:  # in an order that says nothing, so that the curve has all classes early
            order = sorted(photos.given, key=lambda at: photos.keys[at])
            self.decisions = {at: photos.given[at] for at in order}
        self._classes = dict.fromkeys([*labels, *(start.labels if start is not None else ()), *table.classes])
        self._restore()
        for decision in self.decisions.values():
            self._know(decision.label)
        self.learned: Learned | None = None
        self.solved = -1
        """The version of the labels that the guesses are made from."""
        self.answers: Tensor | None = None
        """(n, labels) probabilities or numbers; NaN for images without statistics so far."""
        self.labels: tuple[str, ...] = ()
        """Of the columns of `answers`."""
        self.doubts: list[Doubt] = []
        self.curve: dict[int, dict[str, float]] = {}
        self._lock, self._changed = threading.RLock(), threading.Condition()
        self._version = self._answered = 0
        self._stopped = False
        self.failure: str | None = None
        """What went wrong in the background, if anything did."""
        self._threads = [
            threading.Thread(target=self._work, args=(work,), daemon=True) for work in (self._look, self._learn)
        ]
        for thread in self._threads if table.writable else ():
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stops the background work and lets others open the table."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads if self.table.writable else ():
            thread.join()
        self.table.close()

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes, in the order in which they became known; for numbers, what they are called."""
        return ("number",) if self.kind == "regression" else tuple(self._classes)

    @property
    def version(self) -> int:
        """Grows with every decision."""
        return self._version

    def label(self, images: int | str | Iterable[int | str], label: Any) -> None:
        """Gives one or several images a label: a class, a list of labels, or a number. None: none of the labels.

        Images are their paths as in `photos.paths`, or their positions there.
        """
        chosen = [images] if isinstance(images, (int, str)) else list(images)
        state: State = "none" if label is None else "label"
        self.decide([Change(self._find(image), state, label) for image in chosen])

    def decide(self, changes: Sequence[Change]) -> list[tuple[int, Decision, Decision]]:
        """Writes decisions; returns for each image that changed what was decided before, and now.

        An image whose row is not the expected one was changed by someone else meanwhile: it stays as it is.
        """
        with self._lock:
            wanted = []
            for change in changes:
                before = self.decisions.get(change.image, NOTHING)
                if change.row is None or change.row == before.row:
                    wanted.append((change.image, before, self._decision(change)))
            if not wanted:
                return []
            paths = [(self.photos.paths[at], decision) for at, _, decision in wanted]
            done = self.table.append(paths)
            for (at, _, _), decision in zip(wanted, done, strict=True):
                self._know(decision.label)
                self._apply(at, decision)
            self._version += 1
        self.gallery.want(at for at, _, decision in wanted if decision.learned)
        with self._changed:
            self._changed.notify_all()
        return [(at, before, now) for (at, before, _), now in zip(wanted, done, strict=True)]

    def add_class(self, name: str) -> str:
        """Adds a class without images, and returns its name as it is kept."""
        if self.kind == "regression":
            raise TeachError("images have numbers here: there are no classes.")
        with self._lock:
            found = self.table.add_class(name)
            self._know(found)
            self._version += 1
        return found

    def suggest(self, count: int = 20, by: str = "auto") -> list[Suggestion]:
        """Undecided images to look at next, the most useful one first, and why. `by` is one of `WAYS`."""
        ready = np.flatnonzero(self.gallery.ready)
        place = np.full(len(self.photos), -1)
        place[ready] = np.arange(len(ready))
        decided = self._decided()
        candidates = [at for at in ready.tolist() if at not in decided]
        labelled = [at for at in decided if place[at] >= 0]
        answers = None if self.answers is None else self.answers[candidates]
        if answers is not None and bool(torch.isnan(answers).any()):
            candidates = [at for at, row in zip(candidates, answers, strict=True) if not bool(torch.isnan(row).any())]
            answers = self.answers[candidates] if self.answers is not None else None
        scene = Scene(
            self.kind,
            self.labels or self.classes,
            self.gallery.token(ready),
            torch.from_numpy(place[labelled]).long(),
            torch.from_numpy(place[candidates]).long(),
            answers,
        )
        return [Suggestion(int(ready[one.image]), one.reason) for one in suggest(scene, count, by)]

    def guesses(self) -> dict[str, dict[str, float]]:
        """For each image that has statistics, the probabilities of the labels, or the number."""
        answers, labels = self.answers, self.labels
        if answers is None:
            return {}
        return {
            path: dict(zip(labels, row.tolist(), strict=True))
            for path, row in zip(self.photos.paths, answers, strict=False)
            if not bool(torch.isnan(row).any())
        }

    def guess(self, at: int) -> tuple[str | list[str] | float, float | None] | None:
        """The answer to an image and its probability, that of the least certain label where there are several; None
        where there is none yet."""
        answers, labels = self.answers, self.labels
        if answers is None or at >= len(answers) or bool(answers[at].isnan().any()):
            return None
        row = answers[at]
        if self.kind == "regression":
            return float(row[0]), None
        if self.kind == "multilabel":
            chosen = [label for label, share in zip(labels, row.tolist(), strict=True) if share > 0.5]
            return chosen, float(torch.maximum(row, 1 - row).min())
        best = int(row.argmax())
        return labels[best], float(row[best])

    def accuracy(self) -> dict[str, float] | None:
        """How good answers are to labelled images that are left out one by one: the mean and an interval of 95 %."""
        return None if self.learned is None else self.learned.figure()

    def suspects(self) -> list[Suspect]:
        """Labels that are likely to be wrong, most likely first."""
        found, learned = self.doubts, self.learned
        if learned is None:
            return []
        rows = [(int(learned.lesson.index[doubt.at]), doubt) for doubt in found]
        return [
            Suspect(self.photos.paths[at], str(self.decisions[at].label), doubt.answer, doubt.probability, doubt.reason)
            for at, doubt in rows
            if at in self.decisions and self.decisions[at].state != "keep"
        ]

    def sure(self, label: str | None = None) -> list[int]:
        """Undecided images whose guess is certain, the most certain first."""
        answers = self.answers
        if answers is None or self.kind != "softmax":
            return []
        best, chosen = answers.max(dim=1)
        decided = self._decided()
        order = [at for at in best.argsort(descending=True).tolist() if best[at] >= SURE and at not in decided]
        return [at for at in order if label is None or self.labels[int(chosen[at])] == label]

    def advice(self) -> dict[str, Any] | None:
        """The class of which further labels would help most."""
        learned = self.learned
        return None if self.kind == "regression" else advise(learned.by_class() if learned else [], self.classes)

    def overlaps(self) -> list[tuple[str, str, int]]:
        """Pairs of classes that are often confused."""
        return [] if self.learned is None else overlaps(self.learned)

    def wait(self, timeout: float | None = None) -> Self:
        """Returns once all images have statistics, and guesses for the labels so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.failure is not None or self._settled(), timeout)
        self.raise_failure()
        return self

    def raise_failure(self) -> None:
        """Raises if something went wrong in the background."""
        if self.failure is not None:
            raise TeachError(self.failure)

    def training(self) -> dict[int, Decision]:
        """The decisions that make images training images, in the order in which they were made."""
        return {at: one for at, one in list(self.decisions.items()) if one.learned}

    def add(self, data: bytes, label: Any) -> int:
        """Adds an encoded image and its label, as one that was answered wrongly elsewhere; returns its position."""
        at = self.gallery.add(data)
        self.decide([Change(at, "label", label)])
        return at

    def fit(self, out: str | Path | None = None, **settings: Any) -> Any:
        """Trains the task on the labels so far: what `memoro.train` returns. `settings` are its arguments."""
        learned = self.training()
        used = Lesson.of(learned, self.kind, self.classes)
        if used is None:
            raise TeachError("label images of at least two classes first.")
        splits = self.photos.labelled_set(learned, self.kind, used.labels)
        size = {} if "options" in settings else {"options": self.options}
        if self.start is not None:
            settings = {"start_from": self.start, **settings}
        return train(splits, backbone=self.backbone, task=self.name, out=out, **size, **settings)

    def _restore(self) -> None:
        for row in self.table.rows:
            at = self.photos.by_path.get(row.path)
            if at is not None:
                self._apply(at, row.decision)
            elif row.path:
                self.missing += 1

    def _apply(self, at: int, decision: Decision) -> None:
        self.decisions.pop(at, None)  # the order is that of the last decisions
        self.decisions[at] = decision

    def _decided(self) -> dict[int, Decision]:
        return {at: one for at, one in list(self.decisions.items()) if one.state != "clear"}

    def _know(self, label: Any) -> None:
        if self.kind != "regression":
            for name in [label] if isinstance(label, str) else label or ():
                self._classes.setdefault(name)

    def _decision(self, change: Change) -> Decision:
        if change.state not in {"label", "keep", "accept"}:
            empty = change.state == "none" and self.kind == "multilabel"  # an image without any of the labels
            return Decision("label", ()) if empty else Decision(change.state)
        return Decision(change.state, read_label(change.label, self.kind))

    def _find(self, image: int | str) -> int:
        at = self.photos.by_path.get(image) if isinstance(image, str) else image
        if at is None or not 0 <= at < len(self.photos):
            raise TeachError(f"there is no image {image!r} in {self.photos.name}.")
        return at

    def _settled(self) -> bool:
        done = self.gallery.done == len(self.photos)
        return done and self.solved == self._version and self._answered == self.gallery.done

    def _work(self, work: Callable[[], bool]) -> None:
        """Calls `work` until the session is closed; waits where it returns that there was nothing to do."""
        while not self._stopped:
            try:
                busy = work()
            except Exception as error:  # the page says so; labels go on
                self.failure, busy = f"{type(error).__name__}: {error}", False
            with self._changed:
                self._changed.notify_all()
                if not busy and not self._stopped:
                    self._changed.wait(IDLE)

    def _look(self) -> bool:
        return bool(self.gallery.step())

    def _learn(self) -> bool:
        """Solves the labels so far if they are new, answers images that have become ready, then judges."""
        version, done = self._version, self.gallery.done
        ready = np.flatnonzero(self.gallery.ready)
        if version == self.solved and done == self._answered:
            return self._draw_curve()
        decisions = {at: one for at, one in list(self.decisions.items()) if self.gallery.ready[at]}
        lesson = Lesson.of(decisions, self.kind, self.classes)
        same = self.learned is not None and lesson is not None and _same(self.learned.lesson, lesson)
        if not same:
            if self.learned is None or lesson is None or not _continues(self.learned.lesson, lesson):
                self.curve = {}
            self.learned = None if lesson is None else self._solve(lesson)
            self.answers = None
        fresh = self._answer(ready)
        known = self.learned.lesson.labels if self.learned else self.start.labels if self.start else ()
        self.labels = tuple(known)
        self.answers, self.solved, self._answered = fresh, version, done
        if not same:
            self.doubts = [] if self.learned is None else doubts(self.learned)
        return True

    def _solve(self, lesson: Lesson) -> Learned:
        groups = find_groups(self.gallery.images(lesson.index.tolist()))
        return solve(lesson, self.gallery.read, self.gallery.reads, groups)

    def _answer(self, ready: np.ndarray[Any, Any]) -> Tensor | None:
        """The answers to all images; only those are computed that have none from the same solution."""
        known = self.answers
        answer: Callable[[Any, Tensor], Tensor]
        if self.learned is not None:
            labels, answer = len(self.learned.lesson.labels), self.learned.answer
        elif self.start is not None and self.start.readout is not None and self.start.spec.readout is not None:
            start, share = self.start.readout, self.start.spec.readout.share
            labels = len(self.start.labels)

            def answer(read: Any, index: Tensor) -> Tensor:
                return HEADS[self.kind].probabilities((start(read(index).float()) / share).detach())

        else:
            return None
        found = torch.full((len(self.gallery.ready), labels), torch.nan) if known is None else known.clone()
        new = torch.from_numpy(ready).long()
        new = new[found[new, 0].isnan()]
        if len(new):
            found[new] = answer(self.gallery.read, new)
        return found

    def _draw_curve(self) -> bool:
        """Adds a point to the curve; whether there was one to add."""
        learned = self.learned
        if learned is None:
            return False
        lesson, ends = learned.lesson, learned.figure()
        if ends is not None:
            self.curve[len(lesson.index)] = ends
        for count in reversed([count for count in CURVE if count < len(lesson.index) and count not in self.curve]):
            part = lesson.first(count)
            solved = (
                None if part is None else solve(part, self.gallery.read, self.gallery.reads, learned.groups[:count])
            )
            figure = None if solved is None else solved.figure()
            self.curve[count] = figure or {}
            return True
        return False


def _continues(first: Lesson, second: Lesson) -> bool:
    """Whether the second lesson has the same images with the same labels, and perhaps more after them."""
    count = len(first.index)
    names = [
        [one.labels[at] for at in one.targets[:count].tolist()] for one in (first, second) if one.kind == "softmax"
    ]
    return torch.equal(first.index, second.index[:count]) and (len(names) < 2 or names[0] == names[1])


def _same(first: Lesson, second: Lesson) -> bool:
    return (
        first.labels == second.labels
        and torch.equal(first.index, second.index)
        and torch.equal(first.targets, second.targets)
        and torch.equal(first.judged, second.judged)
    )


def teach(
    photos: Any,
    *,
    task: str | None = None,
    labels: Sequence[str] = (),
    kind: str | None = None,
    backbone: Any = None,
    device: str | None = None,
    image_size: int | None = None,
    labels_file: str | Path | None = None,
    start_from: Task | str | Path | None = None,
    read_only: bool = False,
    options: TrainOptions | None = None,
    **reading: Any,
) -> Session:
    """Opens photographs to label them, and learns from every label: `session = memoro.teach("photos/")`.

    `photos` is a folder, a zip or a table, labelled, half labelled or not at all. Decisions are appended to
    `labels_file`, which is `labels.csv` beside the photographs unless another is given. `kind` says what labels are:
    `class`, `labels` (several for an image) or `number`. `start_from` is an earlier task, or its file, to go on with.
    `read_only` reads labels beside a process that writes them. `reading` are options of `load_data`.
    """
    start = None if start_from is None else read_start(start_from, task)
    asked = find_kind(kind) if kind is not None else None if start is None else start.kind
    names = tuple(dict.fromkeys(map(check_label, labels)))
    found = open_photos(photos, names, asked, **reading)
    beside = None if found.folder is None else found.folder / TABLE
    place = beside if labels_file is None else Path(labels_file).expanduser()
    if place is None:
        raise TeachError(f"labels cannot be kept beside {photos}: name a file for them with --labels-file.")
    table = LabelTable(place.absolute(), asked or (None if place.exists() else found.kind), read_only=read_only)
    try:
        source = start.spec.backbone if backbone is None and start is not None else backbone
        if not isinstance(source, Backbone):
            source = load_backbone(TINY if source is None else source, device=own_device(device))
        chosen = task or (start.name if start is not None else found.name.replace("/", "-").replace("\\", "-"))
        return Session(
            found, table, source, name=chosen, labels=names, start=start, image_size=image_size, options=options
        )
    except BaseException:
        table.close()
        raise
