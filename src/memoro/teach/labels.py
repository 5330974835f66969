"""The table of labels: a CSV file to which every decision is appended before the next one is taken."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from filelock import FileLock, Timeout

from memoro.data.columns import Annotation, parse
from memoro.errors import DataError, TeachError
from memoro.evaluation.predictions import no_formula
from memoro.files import sync_folder
from memoro.heads import HeadKind

State = Literal["label", "keep", "accept", "none", "skip", "clear"]
"""What was decided about an image: it has a label, the label was checked and is right, its guess was accepted, it has
none of the labels, it is left out, or its earlier decision is taken back."""
STATES: tuple[State, ...] = get_args(State)
LEARNED = frozenset({"label", "keep", "accept"})
"""Decisions that make an image a training image."""
COLUMN: Mapping[HeadKind, str] = {"softmax": "label", "multilabel": "labels", "regression": "number"}
MOST_LETTERS = 200
"""Letters that a class's name may have."""
BETWEEN = "|"

Label = str | tuple[str, ...] | float


class Decision(NamedTuple):
    """What is known of an image."""

    state: State
    label: Label | None = None
    row: int = 0
    """The number of its row in the table, by which a later change is noticed; 0 for what the data said."""

    @property
    def learned(self) -> bool:
        return self.state in LEARNED


NOTHING = Decision("clear")


class LabelTable:
    """The last row of an image wins. Rows are on disk when `append` returns; none is ever changed or removed.

    Only one process has the table open. What a killed process left unfinished at its end is skipped.
    """

    def __init__(self, path: Path, kind: HeadKind | None = None, *, read_only: bool = False) -> None:
        """`read_only` opens it beside the process that writes to it."""
        self.path, self.writable = path, not read_only
        self.kind: HeadKind = kind or "softmax"
        self.rows: list[tuple[str, Decision]] = []
        """The path of an image, and what was decided; no path for rows that cannot be read."""
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        if self.writable:
            self._hold()
        try:
            self._read(kind)
        except BaseException:
            self.close()
            raise

    def append(self, decisions: Sequence[tuple[str, Decision]]) -> list[Decision]:
        """Writes a row for each (path, decision), all of them or none, and returns them with their numbers. One thread
        calls it at a time."""
        first = len(self.rows) + 1
        done = [decision._replace(row=first + at) for at, (_, decision) in enumerate(decisions)]
        self._write([(path, label_text(decision.label), decision.state) for path, decision in decisions])
        self.rows += [(path, decision) for (path, _), decision in zip(decisions, done, strict=True)]
        return done

    def close(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                Path(self._lock.lock_file).unlink()
            self._lock.release()

    def _hold(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise TeachError(
                f"{self.path} is open in another memoro teach: use the page of that one, or stop it first."
            ) from None
        except NotImplementedError:
            raise TeachError(
                f"{self.path.parent} is on a file system without locks, so two programs could overwrite each other's "
                "labels: keep them elsewhere with `labels_file`."
            ) from None
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def _read(self, asked: HeadKind | None) -> None:
        try:
            with self.path.open("a+b" if self.writable else "rb") as file:  # fails now if it cannot be written later
                file.seek(0)
                data = file.read()
                if data and not data.endswith(b"\n") and self.writable:
                    file.write(b"\n")
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        if not data:
            if self.writable:
                self._write([("path", COLUMN[self.kind], "decision")])
                sync_folder(self.path.parent)
            return
        lines = csv.reader(io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline=""))
        header = next(lines, [])
        kinds = {column: kind for kind, column in COLUMN.items()}
        if len(header) != 3 or header[::2] != ["path", "decision"] or header[1] not in kinds:
            raise TeachError(
                f"{self.path} is no table of memoro teach (columns: {', '.join(map(repr, header)) or 'none'}):"
                " rename it, or keep the labels elsewhere with `labels_file`."
            )
        self.kind = kinds[header[1]]
        if asked not in {None, self.kind}:
            what = {"softmax": "one class each", "multilabel": "several labels", "regression": "a number"}[self.kind]
            raise TeachError(f"{self.path} has a column {header[1]!r}, so its images have {what}.")
        self.rows = [self._parse(cells, number) for number, cells in enumerate(lines, start=1)]

    def _parse(self, cells: Sequence[str], number: int) -> tuple[str, Decision]:
        try:
            path, label, state = map(_unescape, cells)
            known: State = STATES[STATES.index(state)]
            return path, Decision(known, read_label(label, self.kind) if state in LEARNED else None, number)
        except (ValueError, TeachError):
            return "", NOTHING._replace(row=number)

    def _write(self, rows: Iterable[Sequence[str]]) -> None:
        """Adds lines in one write, and waits until the disk has them."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([map(_escape, row) for row in rows])
        data = text.getvalue().encode("utf-8", "surrogateescape")
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(end)  # half a row would spoil the next one
                    raise
        except OSError as error:
            raise _cannot_write(self.path, error) from None


def check_label(name: str, kind: HeadKind = "softmax") -> str:
    """The name of a class as it is kept; raises if it cannot be one."""
    (text,) = parse([name], "softmax", str)
    assert isinstance(text, str)
    if not text or len(text) > MOST_LETTERS or not text.isprintable():
        raise TeachError(f"a class needs a name of 1 to {MOST_LETTERS} letters on one line.")
    if kind == "multilabel" and BETWEEN in text:
        raise TeachError(f"{text!r}: {BETWEEN!r} separates labels in the table, so no label may contain it.")
    return text


def read_label(text: object, kind: HeadKind) -> Label:
    """A label from a cell or a request: a class, several labels, or a number."""
    if kind == "regression":
        try:
            (values,) = parse([text], kind, str)
        except DataError:
            raise TeachError(f"{text!r} is not a number.") from None
        if len(values) != 1 or isinstance(values[0], str):
            raise TeachError(f"{text!r} is not one number.")
        return values[0]
    if kind == "multilabel":
        names = text.split(BETWEEN) if isinstance(text, str) else text
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TeachError("the labels of an image are a list of names.")
        return tuple(dict.fromkeys(check_label(name, kind) for name in names if name.strip()))
    if not isinstance(text, str):
        raise TeachError("a label is text.")
    return check_label(text)


def label_text(label: Label | None) -> str:
    """A label as a cell of the table."""
    if isinstance(label, tuple):
        return BETWEEN.join(label)
    return repr(label) if isinstance(label, float) else label or ""


def as_annotation(label: Label | None) -> Annotation:
    """A label as sets of images have it."""
    return (label,) if isinstance(label, float) else label or ()


def _escape(cell: str) -> str:
    """The cell with an apostrophe before what a spreadsheet may run, and before apostrophes in front of such text, so
    that all of it can be read back."""
    bare = cell.lstrip("'")
    return cell if no_formula(bare) == bare else f"'{cell}"


def _unescape(cell: str) -> str:
    bare = cell.lstrip("'")
    return cell[1:] if cell.startswith("'") and no_formula(bare) != bare else cell


def _cannot_write(path: Path, error: OSError) -> TeachError:
    return TeachError(f"cannot write {path} ({error.strerror or error}): keep the labels elsewhere with `labels_file`.")
