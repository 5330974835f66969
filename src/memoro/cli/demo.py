"""The command that shows memoro at work: demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memoro.console import plain_console, quiet_libraries

app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for images, task files and the report.")] = Path(
        "memoro-demo"
    ),
) -> None:
    """memoro demo

    Train five tasks on drawn letters and handwritten digits, compose them, and check that the backbone's output is
    unchanged.

    Takes a few minutes on two cores and downloads nothing. Writes task files and an HTML report.
    """
    from memoro.demo import run_demo

    quiet_libraries()
    run_demo(plain_console(markup=True), out)
