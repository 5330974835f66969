"""The command line. It reads arguments, calls the library and prints; nothing else."""

from __future__ import annotations

import inspect
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from memoro.cli import explain, predict, serving, tasks, teach, training
from memoro.console import plain_console
from memoro.errors import MemoroError

OVERVIEW = """\
[bold]memoro[/] teaches one frozen Vision Transformer many tasks. A task is a small file; one pass answers them all,
and the backbone's own output stays bitwise the same.

  memoro demo                                            see it work, without a download
  memoro train photos/ --task pets                       a folder of class folders becomes pets.safetensors
  memoro train pets=photos/ rooms=rooms.zip --out tasks/ several tasks in one pass
  memoro sweep photos/ --rank 4,8,16 --from-layer 4,8    many settings in one pass; the best is kept
  memoro eval photos/ --tasks pets.safetensors           metrics on the test split
  memoro predict new/*.jpg --tasks pets.safetensors --tasks flowers.safetensors
                                                         predict with all tasks in one pass
  memoro explain photo.jpg -t pets.safetensors           where a task looked, as a picture
  memoro serve --tasks tasks/                            serve over HTTP; attach and detach tasks without a restart
  memoro teach photos/ --task pets                       label images on a page that learns meanwhile, then serve it
  memoro suspects photos/                                labels that are likely to be wrong
  memoro inspect pets.safetensors                        what a task file contains
  memoro compose pets.safetensors flowers.safetensors -o both.safetensors
                                                         put tasks into one file
  memoro verify --tasks both.safetensors photo.jpg       check that the backbone's output is unchanged
  memoro calibrate pets.safetensors photos/new           fit probabilities and familiarity on your own images
  memoro export --tasks both.safetensors -o model.onnx   backbone and tasks as one ONNX file
  memoro card pets.safetensors                           a folder for the Hugging Face hub, with a model card
  memoro import model.pt --backbone FOLDER -o tasks.safetensors
                                                         tasks of the paper's public reproduction
  memoro cache                                           show the size of the feature cache; --clear empties it
  memoro lab                                             study the method: baselines, the paper's tables, speed

Training takes [bold]--backbone[/], a hub id or a folder; the default is the small one that ships with memoro. A task
file names its backbone, and a hub id (me/pets) can be given instead of a file. Run [bold]memoro COMMAND --help[/] for
details; most commands take [bold]--json[/]."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(training.app)
app.add_typer(predict.app)
app.add_typer(explain.app)
app.add_typer(tasks.app)
app.add_typer(serving.app)
app.add_typer(teach.app)


def main() -> None:
    """Runs the command line; a MemoroError becomes one line and exit code 1."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # no retry messages: memoro's own error says what to do
    command = typer.main.get_command(app)
    unwrap_help(command)
    try:
        command()
    except MemoroError as error:
        plain_console(stderr=True, soft_wrap=True).print(Text("error:", "bold red"), name_options(str(error)))
        sys.exit(1)


def unwrap_help(command: Any) -> None:
    """Joins the lines of each paragraph of the help, so that they are as wide as the terminal."""
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    for one in getattr(command, "commands", {}).values():
        unwrap_help(one)


def name_options(text: str) -> str:
    """A message with the options' names in the place of those of arguments: `--label-column` for `label_column`."""
    commands = typer.main.get_group(app).commands.values()
    names = {param.name for command in commands for param in command.params if param.name and "_" in param.name}

    def replace(word: re.Match[str]) -> str:
        return f"--{word[0].replace('_', '-')}" if word[0] in names else word[0]

    # Not in quotes, paths and calls, and not where a message names both.
    return re.sub(r"(?<![\w'\"/.-])(?<!in Python, )[a-z]+(_[a-z]+)+(?![\w'\"/=(])", replace, text)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Teach one frozen Vision Transformer many tasks."""
    if version:
        from memoro import __version__

        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        plain_console(soft_wrap=True).print(OVERVIEW, markup=True)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def lab(context: typer.Context) -> None:
    """Study the method: train baselines, reproduce the paper's tables, measure speed.

    memoro lab --help
    """
    import_module("memoro.lab.cli").run(context.args)  # by name: the product does not depend on the laboratory


def _removed(name: str) -> None:
    def command(context: typer.Context) -> None:
        raise MemoroError(f"memoro {name} is now memoro lab {name}: run the same command with lab before {name}.")

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, hidden=True, context_settings=settings)(command)


for _name in ("bench", "reproduce"):
    _removed(_name)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for images, task files and the report.")] = Path(
        "memoro-demo"
    ),
) -> None:
    """Train five tasks on drawn letters and handwritten digits, compose them, and check that the backbone's output is
    unchanged.

    Takes a few minutes on two cores and downloads nothing. Writes task files and an HTML report.
    """
    from memoro.console import quiet_libraries
    from memoro.demo import run_demo

    quiet_libraries()
    run_demo(plain_console(markup=True), out)
