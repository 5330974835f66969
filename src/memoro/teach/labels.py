"""The table of labels: a CSV file to which every decision is appended before the next one is taken."""

from __future__ import annotations

import csv
import io
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from filelock import FileLock, Timeout

from memoro.data.columns import Annotation, parse
from memoro.errors import DataError, TeachError
from memoro.evaluation.predictions import no_formula
from memoro.heads import HeadKind

State = Literal["label", "keep", "accept", "none", "skip", "clear"]
"""What was decided about an image: it has a label, the label was checked and is right, its guess was accepted, it has
none of the labels, it is left out, or its earlier decision is taken back."""
STATES: tuple[State, ...] = get_args(State)
LEARNED = frozenset({"label", "keep", "accept"})
"""Decisions that make an image a training image."""
COLUMN: Mapping[HeadKind, str] = {"softmax": "label", "multilabel": "labels", "regression": "number"}
MOST_LETTERS = 200
"""Of a class's name."""
BETWEEN = "|"


class Decision(NamedTuple):
    """What is known of an image."""

    state: State
    label: str | tuple[str, ...] | float | None = None
    row: int = 0
    """The number of its row in the table, by which a later change is noticed; 0 for what the data said."""

    @property
    def learned(self) -> bool:
        return self.state in LEARNED


NOTHING = Decision("clear")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    path: str
    decision: Decision


class LabelTable:
    """The last row of an image wins. Rows are on disk when `append` returns; none is ever changed or removed.

    Only one process has the table open. What a killed process left unfinished at its end is skipped.
    """

    def __init__(self, path: Path, kind: HeadKind | None = None, *, read_only: bool = False) -> None:
        """`read_only` opens it beside the process that writes to it."""
        self.path = path
        self._lock = threading.Lock()
        self.writable = not read_only
        self._held: FileLock | None = None
        if self.writable:
            self._hold()
        try:
            self.rows: list[Row] = []
            self.kind: HeadKind = kind or "softmax"
            self.skipped = 0
            """Rows that cannot be read."""
            self._read(kind)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The number of the last row."""
        return len(self.rows)

    def append(self, decisions: Sequence[tuple[str, Decision]]) -> list[Decision]:
        """Writes a row for each (path, decision), all of them or none, and returns them with their numbers."""
        with self._lock:
            first = len(self.rows) + 1
            done = [decision._replace(row=first + at) for at, (_, decision) in enumerate(decisions)]
            self._write([(path, self._cell(decision), decision.state) for path, decision in decisions])
            self.rows += [Row(path, decision) for (path, _), decision in zip(decisions, done, strict=True)]
            return done

    def close(self) -> None:
        if self._held is not None:
            with suppress(OSError):
                Path(self._held.lock_file).unlink()
            self._held.release()

    def _hold(self) -> None:
        held = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            held.acquire()
            self._held = held
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
            with self.path.open(
                "a+b" if self.writable else "rb"
            ) as file:  # fails now where nothing can be written later
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
            raise TeachError(f"{self.path} has a column {header[1]!r}, so its images have {KINDS[self.kind]}.")
        for cells in lines:
            self._take(cells)

    def _take(self, cells: Sequence[str]) -> None:
        try:
            path, label, state = map(_unescape, cells)
            known: State = STATES[STATES.index(state)]
            given = read_label(label, self.kind) if state in LEARNED else None
            decision = Decision(known, given, len(self.rows) + 1)
        except (ValueError, TeachError):
            self.skipped += 1
            path, decision = "", Decision("clear", row=len(self.rows) + 1)
        self.rows.append(Row(path, decision))

    def _cell(self, decision: Decision) -> str:
        return "" if decision.label is None else label_text(decision.label)

    def _write(self, rows: Iterable[Sequence[str]]) -> None:
        """Adds lines in one write, and waits until the disk has them."""
        text = io.StringIO(newline="")
        csv.writer(text).writerows([map(_escape, row) for row in rows])
        try:
            with self.path.open("ab") as file:
                file.write(text.getvalue().encode("utf-8", "surrogateescape"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None


KINDS: Mapping[HeadKind, str] = {"softmax": "one class each", "multilabel": "several labels", "regression": "a number"}


def check_label(name: str, kind: HeadKind = "softmax") -> str:
    """The name of a class as it is kept; raises where it is none."""
    (text,) = parse([name], "softmax", str)
    assert isinstance(text, str)
    if not text or len(text) > MOST_LETTERS or not text.isprintable():
        raise TeachError(f"a class needs a name of 1 to {MOST_LETTERS} letters on one line.")
    if kind == "multilabel" and BETWEEN in text:
        raise TeachError(f"{text!r}: {BETWEEN!r} separates labels in the table, so no label may contain it.")
    return text


def read_label(text: object, kind: HeadKind) -> str | tuple[str, ...] | float:
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


def label_text(label: str | tuple[str, ...] | float) -> str:
    """A label as a cell of the table."""
    if isinstance(label, tuple):
        return BETWEEN.join(label)
    return label if isinstance(label, str) else repr(label)


def as_annotation(label: str | tuple[str, ...] | float) -> Annotation:
    """A label as sets of images have it."""
    return (label,) if isinstance(label, float) else label


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
