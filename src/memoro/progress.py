"""Progress bars on stderr, so that stdout stays clean for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar that moves by one, or by the number given, at each call of what is yielded. It vanishes when done."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        job = progress.add_task(title, total=total)
        yield lambda count=1: progress.advance(job, count)


def quiet_libraries() -> None:
    """Silences the progress bars that transformers draws of its own. For the command line, never at import."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
