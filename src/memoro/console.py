"""What is shown: consoles, tables and progress bars that do not interpret names from users and files, and JSON."""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    """The text with control characters escaped, so that a name can neither move the cursor nor forge a line.

    That includes line breaks, terminal sequences and bidirectional overrides. Joiners stay: some scripts need them.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and char not in "\u200c\u200d"
        else char
        for char in text
    )


class PlainConsole(Console):
    """Prints strings without markup, emoji codes and control characters; with `markup=True`, memoro's own text."""

    def print(self, *objects: Any, markup: bool | None = None, **options: Any) -> None:
        own = self._markup if markup is None else markup
        shown = (printable(one) if isinstance(one, str) and not own else one for one in objects)
        super().print(*shown, markup=markup, **options)


def plain_console(*, stderr: bool = False, **options: Any) -> PlainConsole:
    return PlainConsole(stderr=stderr, **{"markup": False, "emoji": False, "highlight": False, **options})


class PlainColumn(TextColumn):
    """A column of a progress bar that shows a field as `PlainConsole` would."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{{task.{field}}}", markup=False)

    def render(self, task: Task) -> Text:
        return Text(printable(super().render(task).plain))


LONG_WORD = 16
Cell = str | list[str]
"""A cell of a table: a text, or its lines."""


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], title: str | None = None, left: int = 1
) -> Table:
    """A table of `printable` cells, wrapped between words. The first `left` columns are aligned left, the others right.

    Only words longer than `LONG_WORD` are cut.
    """
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left")
    lines = [[[cell] if isinstance(cell, str) else cell for cell in row] for row in rows]
    texts = [["\n".join(map(printable, some)) for some in row] for row in lines]
    for number, column in enumerate(columns):
        words = (len(word) for text in (column, *(row[number] for row in texts)) for word in text.split())
        table.add_column(
            Text(printable(column)),
            justify="left" if number < left else "right",
            overflow="fold",
            min_width=min(max(words, default=0), LONG_WORD),
        )
    for row in texts:
        table.add_row(*map(Text, row))
    return table


def fits(table: Table, width: int) -> bool:
    """Whether the whole table fits into a terminal of this many columns."""
    lines = Segment.split_lines(plain_console(width=width).render(table))
    return max(map(Segment.get_line_length, lines)) <= width


NARROW = 110
"""A terminal with fewer columns gets a short bar."""
LINE_SECONDS = 10.0
"""Seconds between lines of progress if stderr is not a terminal."""


class Bar:
    """Progress on stderr: a bar in a terminal, elsewhere plain lines, at the start, every ten seconds and at the end.

    A `transient` bar disappears at its end.
    """

    def __init__(self, title: str, total: int | None, *, quiet: bool = False, transient: bool = True) -> None:
        self._console = plain_console(stderr=True, soft_wrap=True)
        self._lines = not quiet and not (self._console.is_terminal or self._console.is_jupyter)
        self.narrow = self._console.is_terminal and self._console.width < NARROW
        self.progress = Progress(
            PlainColumn("description"),
            BarColumn(10 if self.narrow else 40),
            MofNCompleteColumn(),
            PlainColumn("fields[figures]"),
            TimeRemainingColumn(),
            console=plain_console(stderr=True),
            transient=transient,
            disable=quiet or self._lines,
        )
        self._job = self.progress.add_task(title, total=total, figures="")
        self._began = self._told = time.monotonic()
        self._line = ""

    def __enter__(self) -> Self:
        self.progress.start()
        self._began = time.monotonic()
        self._tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if kind is None:
            self._tell()

    def update(self, advance: int = 0, **changes: Any) -> None:
        """Advances the bar; `changes` are its new `description`, `total`, `completed` or `figures`."""
        self.progress.update(self._job, advance=advance, **changes)
        if time.monotonic() - self._told >= LINE_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._lines:
            [job] = self.progress.tasks
            whole = "" if job.total is None else f" of {job.total:,.0f}"
            parts = [f"{job.description}: {job.completed:,.0f}{whole}", job.fields["figures"]]
            seconds = round(self._told - self._began)
            line = ", ".join([*filter(None, parts), *([f"{seconds} s"] if job.completed else [])])
            if line != self._line:  # the last one may have been printed already
                self._console.print(line)
            self._line = line


@contextmanager
def bar(title: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function that advances a `Bar`, by one or by the given number."""
    with Bar(title, total, quiet=quiet) as shown:
        yield lambda count=1: shown.update(count)


def quiet_libraries() -> None:
    """Silences the bars of transformers, the hub's retry messages (memoro's own error says what to do), ONNX notes, and
    Pillow's warnings about EXIF blocks and about sizes below memoro's own limit.

    For the command line, never at import.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"PIL\.")
    for name in ("huggingface_hub", "httpx", "urllib3", "torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def to_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON, which has no numbers that are not finite: they become null."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, indent=indent)


def finite(value: Any) -> Any:
    """The value with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_bytes(size: float) -> str:
    """`403.4 kB`. The server's page computes the same (`size` in parts.js), half a digit rounded up."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return f"{math.floor(size / (unit / 10) + 0.5) / 10:,.1f} {name}"


def format_count(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_time(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`, `10 days`."""
    for unit, length, digits in (("days", 86_400.0, 0), ("h", 3_600.0, 1), ("min", 60.0, 0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def quoted(*words: object) -> str:
    """Words of a command as they can be pasted into a shell."""
    return shlex.join(str(word) for word in words)
