"""A session: photographs, the decisions about them, and what is learned from these in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import TINY, own_device
from memoro.backbones.precision import Precision
from memoro.data.columns import labels_in
from memoro.errors import TeachError
from memoro.heads import HeadKind, find_kind
from memoro.regimes.start import read_start
from memoro.tasks.spec import check_name
from memoro.tasks.task import Task
from memoro.teach.gallery import Gallery
from memoro.teach.labels import NOTHING, Decision, LabelTable, State, as_annotation, check_label, read_label
from memoro.teach.learner import Learner
from memoro.teach.learning import LabelledImages
from memoro.teach.photos import Photos, open_photos
from memoro.teach.suggestions import SURE, Scene, Suggestion, suggest
from memoro.teach.suspects import Suspect
from memoro.training import TrainOptions, train

TABLE = "labels.csv"


class Change(NamedTuple):
    """A decision to be written: the image, what is decided, and the row that it replaces, if it must be that one."""

    image: int
    state: State
    label: Any = None
    row: int | None = None


class Session(AbstractContextManager["Session"]):
    """What `memoro.teach` returns. Decisions are on disk when a method returns; guesses follow in the background.

    Use it in a `with` statement, or call `close`: until then its table of labels is locked.
    """

    def __init__(
        self,
        photos: Photos,
        table: LabelTable,
        backbone: Backbone,
        name: str,
        labels: Sequence[str] = (),
        start: Task | None = None,
        image_size: int | None = None,
    ) -> None:
        self.photos, self.table, self.backbone, self.name = photos, table, backbone, check_name(name)
        self.start, self.options, self.kind = start, TrainOptions(image_size=image_size), table.kind
        steps = backbone.preprocessing if image_size is None else backbone.preprocessing.at(image_size)
        if start is not None:
            start.spec.check_backbone(backbone)
            steps = start.spec.preprocessing or steps
        self.gallery = Gallery(photos, backbone, steps, self.options)
        self.learner = Learner(self.gallery, self.kind, start)
        self.decisions: dict[int, Decision] = {}
        self._named = (*labels, *(start.labels if start is not None else ()))
        self._classes = dict.fromkeys(self._named)
        if photos.kind == self.kind:  # in an order that says nothing, so that the curve has all classes early
            for at in sorted(photos.given, key=photos.keys.__getitem__):
                self._apply(at, photos.given[at])
        self.missing = 0
        """Rows of the table that cannot be read, or whose images are no longer there."""
        for path, decision in table.rows:
            if path in photos.by_path:
                self._apply(photos.by_path[path], decision)
            else:
                self.missing += 1
        self.version = 0
        """Grows with every decision."""
        self.failure: str | None = None
        """What went wrong in the background, if anything did."""
        self._lock, self._changed, self._stopped, self._events = threading.Lock(), threading.Condition(), False, 0
        works = (self.gallery.step, self._learn) if table.writable else ()
        self._threads = [threading.Thread(target=self._work, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the background work and lets others open the table."""
        self._stopped = True
        self._notify()
        for thread in self._threads:
            thread.join()
        self.table.close()

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that were named or that images have, in the order in which they became known; for numbers, what
        they are called."""
        if self.kind == "regression":
            return ("number",)
        used = labels_in(as_annotation(one.label) for one in self.training().values()) | {*self._named}
        return tuple(name for name in self._classes if name in used)

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
            wanted = [(one.image, self.decision(one.image), one) for one in changes]
            wanted = [(at, before, one) for at, before, one in wanted if one.row in {None, before.row}]
            new = [(self.photos.paths[at], self._decision(one)) for at, _, one in wanted]
            done = self.table.append(new) if new else []
            for (at, _, _), decision in zip(wanted, done, strict=True):
                self._apply(at, decision)
            self.version += 1
        self.gallery.want(at for at, _, _ in wanted)
        self._notify()
        return [(at, before, now) for (at, before, _), now in zip(wanted, done, strict=True)]

    def add(self, data: bytes, label: Any) -> int:
        """Adds an encoded image and its label, as one that was answered wrongly elsewhere; returns its position."""
        at = self.gallery.add(data)
        self.decide([Change(at, "label", label)])
        return at

    def suggest(self, count: int = 20, by: str = "auto") -> list[Suggestion]:
        """Undecided images to look at next, the most useful one first, and why. `by` is one of `WAYS`."""
        known, decided = self.learner.now, self.decided()
        ready = torch.from_numpy(self.gallery.ready)
        rest = ready.clone() if known.answers is None else ready & ~known.answers[:, 0].isnan()
        rest[list(decided)] = False
        scene = Scene(
            self.kind,
            known.labels or self.classes,
            self.gallery.tokens(),
            torch.tensor([at for at in decided if ready[at]], dtype=torch.long, device="cpu"),
            rest.nonzero().flatten(),
            None if known.answers is None else known.answers[rest],
        )
        return suggest(scene, count, by)

    def unread(self, count: int) -> list[int]:
        """Undecided images without statistics yet."""
        decided = self.decided()
        return [at for at in self.gallery.waiting() if at not in decided][:count]

    def guesses(self) -> dict[str, dict[str, float]]:
        """For each image that has statistics, the probabilities of the labels, or the number."""
        known = self.learner.now
        rows = {path: known.answered(at) for at, path in enumerate(self.photos.paths)}
        return {
            path: dict(zip(known.labels, row.tolist(), strict=True)) for path, row in rows.items() if row is not None
        }

    def accuracy(self) -> dict[str, float] | None:
        """How good answers are to labelled images that are left out one by one: the mean and an interval of 95 %."""
        learned = self.learner.now.learned
        return None if learned is None else learned.figure()

    def suspects(self) -> list[Suspect]:
        """Labels that are likely to be wrong, least probable first, without those that were checked."""
        suspects, places = self.learner.now.suspects, self.photos.by_path
        return [one for one in suspects if self.decision(places[one.path]).state in {"label", "accept"}]

    def sure(self) -> list[int]:
        """Undecided images whose guess is certain, the most certain first."""
        answers, decided = self.learner.now.answers, self.decided()
        if answers is None or self.kind != "softmax":
            return []
        best = answers.max(dim=1).values
        index = (best >= SURE).nonzero().flatten()
        return [at for at in index[best[index].argsort(descending=True)].tolist() if at not in decided]

    def wait(self, timeout: float | None = None) -> Self:
        """Returns once all images have statistics, and guesses for the labels so far."""

        def settled() -> bool:
            now, done = self.learner.now, len(self.photos)
            return (now.version, now.done, self.gallery.done) == (self.version, done, done)

        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.failure is not None or settled(), timeout)
        self.raise_failure()
        return self

    def raise_failure(self) -> None:
        """Raises if something went wrong in the background."""
        if self.failure is not None:
            raise TeachError(self.failure)

    def decision(self, image: int) -> Decision:
        """What was decided about an image last."""
        return self.decisions.get(image, NOTHING)

    def decided(self) -> dict[int, Decision]:
        """All decisions that were not taken back, in the order in which they were made."""
        return {at: one for at, one in list(self.decisions.items()) if one.state != "clear"}

    def training(self) -> dict[int, Decision]:
        """The decisions that make images training images."""
        return {at: one for at, one in self.decided().items() if one.learned}

    def fit(self, out: str | Path | None = None, **settings: Any) -> Any:
        """Trains the task on the labels so far: what `memoro.train` returns. `settings` are its arguments."""
        learned = self.training()
        images = LabelledImages.of(learned.items(), self.kind, self.classes)
        if images is None:
            raise TeachError("label images of at least two classes first.")
        splits = self.photos.labelled_set(learned, self.kind, images.labels)
        given = {"task": self.name, "start_from": self.start, "options": self.options, **settings}
        return train(splits, backbone=self.backbone, out=out, **given)

    def _apply(self, at: int, decision: Decision) -> None:
        self.decisions.pop(at, None)  # the order is that of the last decisions
        self.decisions[at] = decision
        label = decision.label
        if not isinstance(label, float):
            self._classes.update(dict.fromkeys([label] if isinstance(label, str) else label or ()))

    def _decision(self, change: Change) -> Decision:
        if change.state in {"label", "keep", "accept"}:
            return Decision(change.state, read_label(change.label, self.kind))
        empty = change.state == "none" and self.kind == "multilabel"  # an image without any of the labels
        return Decision("label", ()) if empty else Decision(change.state)

    def _find(self, image: int | str) -> int:
        at = self.photos.by_path.get(image) if isinstance(image, str) else image
        if at is None or not 0 <= at < len(self.photos):
            raise TeachError(f"there is no image {image!r} in {self.photos.name}.")
        return at

    def _learn(self) -> bool:
        with self._lock:
            decisions, version = self.training(), self.version
        return self.learner.step(decisions, self.classes, version)

    def _work(self, work: Callable[[], bool]) -> None:
        """Calls `work` until the session is closed or it fails; waits while there is nothing to do."""
        while not self._stopped:
            seen = self._events
            try:
                busy = work()
            except Exception as error:  # the page says so; labels go on
                self.failure = f"{type(error).__name__}: {error}"
                self._notify()
                return
            if busy:
                self._notify()
                continue
            with self._changed:
                while self._events == seen and not self._stopped:
                    self._changed.wait()

    def _notify(self) -> None:
        with self._changed:
            self._events += 1
            self._changed.notify_all()


def teach(
    photos: str | os.PathLike[str],
    *,
    task: str | None = None,
    labels: Sequence[str] = (),
    kind: str | None = None,
    backbone: Any = None,
    device: str | None = None,
    precision: Precision = "auto",
    image_size: int | None = None,
    labels_file: str | Path | None = None,
    start_from: Task | str | Path | None = None,
    read_only: bool = False,
    **reading: Any,
) -> Session:
    """Opens photographs to label them, and learns from every label: `session = memoro.teach("photos/")`.

    `photos` is a folder, a zip or a table, labelled, half labelled or not at all. Decisions are appended to
    `labels_file`, which is `labels.csv` beside the photographs unless another is given. `kind` says what labels are:
    `class`, `labels` (several for an image) or `number`. `start_from` is an earlier task, or its file, to go on with.
    `precision` is as in `load_backbone`. `read_only` reads labels beside a process that writes them. `reading` are
    options of `load_data`.
    """
    start = None if start_from is None else read_start(start_from, task)
    asked: HeadKind | None = find_kind(kind) if kind is not None else None if start is None else start.kind
    names = tuple(dict.fromkeys(map(check_label, labels)))
    opened = open_photos(photos, names, asked, **reading)
    if labels_file is None:
        if opened.folder is None:
            raise TeachError(f"labels cannot be kept beside {photos}: name a file for them with `labels_file`.")
        labels_file = opened.folder / TABLE
    file = Path(labels_file).expanduser().absolute()
    table = LabelTable(file, asked or (None if file.exists() else opened.kind), read_only=read_only)
    try:
        source = start.spec.backbone if backbone is None and start is not None else backbone
        if not isinstance(source, Backbone):
            source = load_backbone(TINY if source is None else source, device=own_device(device), precision=precision)
        name = task or (start.name if start is not None else opened.name)
        return Session(opened, table, source, name, names, start, image_size)
    except BaseException:
        table.close()
        raise
