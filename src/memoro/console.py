"""Consoles, tables and progress bars that show names from users and files without interpreting them."""

from __future__ import annotations

import logging
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
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
    def render(self, task: Task) -> Text:
        return Text(printable(super().render(task).plain))


def plain_column(field: str) -> TextColumn:
    """A column of a progress bar that shows a field as `PlainConsole` would."""
    return PlainColumn(f"{{task.{field}}}", markup=False)


Cell = str | list[str]
"""Of a table: a text, or its lines."""


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], title: str | None = None, left: int = 1
) -> Table:
    """A table of `printable` cells. The first `left` columns are aligned left, the others right."""
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        lines = ([cell] if isinstance(cell, str) else cell for cell in row)
        table.add_row(*(Text("\n".join(map(printable, some))) for some in lines))
    return table


@contextmanager
def bar(title: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function that advances the bar, by one or by the given number. The bar disappears at the end."""
    with Progress(
        plain_column("description"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=plain_console(stderr=True),
        transient=True,
        disable=quiet,
    ) as progress:
        job = progress.add_task(title, total=total)
        yield lambda count=1: progress.advance(job, count)


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


def format_bytes(size: float) -> str:
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1000:,.1f} kB"


def format_count(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
