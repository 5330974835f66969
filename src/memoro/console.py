"""Consoles that print names without markup, progress bars on stderr, and sizes as text."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints text unchanged: `[bold]` in a file name is not markup and `:cat:` is not an emoji."""
    return Console(stderr=stderr, **{"markup": False, "emoji": False, "highlight": False, **options})


def plain_column(field: str) -> TextColumn:
    """A column of a progress bar that shows a field without markup."""
    return TextColumn(f"{{task.{field}}}", markup=False)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, left: int = 1) -> Table:
    """A table whose cells are shown without markup. The first `left` columns are aligned left, the others right."""
    table = Table(title=None if title is None else Text(title), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
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
    """Silences the bars of transformers, the hub's words on each retry (memoro's own error says what to do), and
    Pillow's warnings about EXIF blocks and about sizes below memoro's own limit.

    For the command line, never at import.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"PIL\.")
    for name in ("huggingface_hub", "httpx", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def format_bytes(size: float) -> str:
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1000:,.1f} kB"


def format_count(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
