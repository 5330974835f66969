"""The command line. It reads arguments, calls the library and prints; nothing else."""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text
from typer.core import TyperGroup

from memoro.cli.removed import refuse_removed
from memoro.cli.settings import name_options
from memoro.clock import Phases
from memoro.console import plain_console
from memoro.errors import MemoroError


class Verb(NamedTuple):
    """What the first page says about a command, and the module of the command, which is imported when it is used."""

    module: str
    example: str
    summary: str


VERBS = {
    "demo": Verb("memoro.cli.start", "memoro demo", "see it work, without a download"),
    "train": Verb("memoro.cli.train", "memoro train photos/ --task pets", "learn from folders of classes"),
    "eval": Verb("memoro.cli.evaluate", "memoro eval photos/ -t pets.safetensors", "metrics on the test split"),
    "predict": Verb(
        "memoro.cli.predict", "memoro predict new/*.jpg -t pets.safetensors", "all tasks answer in one pass"
    ),
    "explain": Verb("memoro.cli.predict", "memoro explain 1.jpg -t pets.safetensors", "where the task looked"),
    "serve": Verb("memoro.cli.serve", "memoro serve -t tasks/", "answer over HTTP; with a page"),
    "teach": Verb("memoro.cli.teach", "memoro teach photos/ --task pets", "label on a page that learns"),
    "suspects": Verb("memoro.cli.teach", "memoro suspects photos/", "labels that may be wrong"),
    "similar": Verb("memoro.cli.similar", "memoro similar photo.jpg photos/", "images that look alike"),
    "inspect": Verb("memoro.cli.tasks", "memoro inspect pets.safetensors", "what a task file contains"),
    "compose": Verb("memoro.cli.tasks", "memoro compose A B -o both.safetensors", "several tasks in one file"),
    "verify": Verb("memoro.cli.tasks", "memoro verify -t both.safetensors 1.jpg", "is the backbone unchanged?"),
    "calibrate": Verb("memoro.cli.evaluate", "memoro calibrate pets.safetensors new/", "fit to your own images"),
    "export": Verb("memoro.cli.tasks", "memoro export -t A -o model.onnx", "backbone and tasks as ONNX"),
    "card": Verb("memoro.cli.tasks", "memoro card pets.safetensors", "a model card for the hub"),
    "import": Verb("memoro.cli.tasks", "memoro import model.pt -o tasks.safetensors", "the paper's reproduction"),
    "backbones": Verb("memoro.cli.start", "memoro backbones", "names, sizes, licences"),
    "cache": Verb("memoro.cli.tasks", "memoro cache --clear", "show or empty the feature cache"),
    "lab": Verb("memoro.lab.cli", "memoro lab --help", "study the method and its speed"),
}


class Verbs(TyperGroup):
    """The commands of `VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in VERBS:
            group = typer.main.get_group(import_module(VERBS[cmd_name].module).app)
            command = group.commands.get(cmd_name, group)  # all of the laboratory is one verb
            arrange_help(command)
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_removed(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = Phases()  # before the imports, which are part of the user's wait
        try:
            return super().invoke(ctx)
        except MemoroError as error:
            if command := self.commands.get(ctx.invoked_subcommand):
                error.args = (name_options(str(error), ctx.invoked_subcommand, command), *error.args[1:])
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_overview()


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """Runs the command line; a MemoroError becomes one line and exit code 1."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")  # no retry messages: memoro's own error says what to do
    try:
        app()
    except MemoroError as error:
        plain_console(stderr=True, soft_wrap=True).print(Text("error:", "bold red"), str(error))
        sys.exit(1)


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
        print_overview()


def print_overview() -> None:
    """The first page: every command with an example."""
    width = max(len(verb.example) for verb in VERBS.values())
    examples = "\n".join(f"  {verb.example:{width}}  {verb.summary}" for verb in VERBS.values())
    plain_console(soft_wrap=True).print(
        f"""\
[bold]memoro[/] teaches one frozen Vision Transformer many tasks. A task is a small file;
one pass answers them all, and the backbone's own output stays bitwise the same.

{examples}

The default backbone is the small one that ships with memoro; --backbone takes
a hub id, a folder or timm:NAME. A hub id (me/pets) can be given instead of a
task file.
[bold]memoro COMMAND --help[/] has the details, memoro --version the version.""",
        markup=True,
    )


def arrange_help(command: Any) -> None:
    """Joins the lines of each paragraph of the help, so that they are as wide as the terminal; examples stay as they
    are."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    joined = [text if text.startswith("memoro ") else " ".join(text.split("\n")) for text in paragraphs]
    command.help = "\n\n".join("\b\n" + text if text.startswith("memoro ") else text for text in joined)
    for inner in getattr(command, "commands", {}).values():
        arrange_help(inner)
