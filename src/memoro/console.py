"""Consoles that show names as they are, and progress bars on stderr, so that stdout stays clean for results."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def plain_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console that prints every text as it is: `[bold]` is no markup in a file's name, nor `:cat:` a picture."""
    return Console(stderr=stderr, **{"markup": False, "emoji": False, "highlight": False, **options})


def plain_column(field: str) -> TextColumn:
    """A column of a progress bar that shows a field as it is."""
    return TextColumn(f"{{task.{field}}}", markup=False)


@contextmanager
def bar(title: str, total: int, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar that moves by one, or by the number given, at each call of what is yielded. It vanishes when done."""
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


def say_bytes(size: float) -> str:
    """A size for people."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1000:,.1f} kB"


def say_images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"
