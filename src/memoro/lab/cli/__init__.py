"""The command line of the laboratory: `memoro lab`."""

from __future__ import annotations

import typer

from memoro.lab.cli.baselines import baselines
from memoro.lab.cli.bench import bench
from memoro.lab.cli.reproduce import reproduce

app = typer.Typer(
    help="Study the method: baselines, the paper's tables, speed.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command()(reproduce)
app.add_typer(bench, name="bench")
app.add_typer(baselines)
