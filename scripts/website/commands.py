"""The reference of the command line, from its own definitions: every command, option and setting."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer.main

from memoro.cli import VERBS, app
from memoro.cli.settings import FIELDS, _written
from memoro.options import Option


def commands() -> Iterator[tuple[str, Any]]:
    """All commands by the words that call them."""
    group: Any = typer.main.get_group(app)
    waiting = [(f"memoro {verb}", group.get_command(None, verb)) for verb in VERBS]
    while waiting:
        words, command = waiting.pop(0)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        else:
            waiting = [(f"{words} {name}", one) for name, one in inner.items()] + waiting


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def kind_of(kind: Any) -> str:
    """What is written after an option."""
    if get_origin(kind) is Literal:
        return " \\| ".join(map(str, get_args(kind)))
    choices = [one for one in get_args(kind) if one is not NoneType]
    if choices and get_origin(kind) is not tuple:
        return kind_of(choices[0])
    names = {bool: "", int: "N", float: "X"}
    return names.get(kind, "TEXT")


def usage(words: str, command: Any) -> str:
    own = [one for one in command.params if one.param_type_name == "argument"]
    names = [f"{one.name.upper()}{'...' if one.nargs == -1 else ''}" for one in own]
    return " ".join(
        [words, *(name if one.required else f"[{name}]" for name, one in zip(names, own, strict=True)), "[OPTIONS]"]
    )


def default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return cell(parameter.show_default)
    value = parameter.default
    if value is None or value is False or value == [] or parameter.show_default is False or callable(value):
        return ""
    return f"`{_written(value)}`"


def option_row(parameter: Any) -> str:
    kind = parameter.metavar or kind_of(parameter.type_descriptor.annotation)
    if parameter.param_type_name == "argument":
        name = f"`{parameter.name.upper()}`"
    else:
        flags = sorted([*parameter.opts, *parameter.secondary_opts], key=len, reverse=True)
        name = ", ".join(f"`{flag}`" for flag in flags) + (f" {kind}" if kind else "")
    text = cell(parameter.help or "")
    if parameter.param_type_name == "option" and parameter.envvar:
        text += f" Environment variable: `{parameter.envvar}`."
    return f"| {name} | {text} | {default_of(parameter)} |"


def setting_row(option: Option) -> str:
    default = cell(option.shown) if option.shown else f"`{_written(option.default)}`"
    return f"| `{option.name}` | {cell(option.help)} | {default} |"


def section(words: str, command: Any) -> str:
    paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
    examples = [text for text in paragraphs if text.startswith(("memoro ", "curl "))]
    # "For example:" goes with its example.
    texts = [
        text
        for text, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True)
        if text not in examples and not (text.endswith(":") and after in examples)
    ]
    parts = [f"## {words} {{ #{words.removeprefix('memoro ').replace(' ', '-')} }}", "", *_join(texts)]
    parts += ["```sh", usage(words, command), "```", ""]
    if examples:
        parts += ["Examples:", "", "```sh", *"\n".join(examples).split("\n"), "```", ""]
    shown = [one for one in command.params if not one.hidden and one.name != "help"]
    if shown:
        parts += ["| option | meaning | default |", "|---|---|---|", *map(option_row, shown), ""]
    verb = words.removeprefix("memoro ")
    if verb in FIELDS:
        rows = [setting_row(one) for one in FIELDS[verb].named().values()]
        parts += [f"Settings of `{words}`, given as `--set NAME=VALUE`:", ""]
        parts += ["| setting | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _join(texts: list[str]) -> list[str]:
    """Paragraphs, with options as code."""
    lines = (re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", " ".join(text.split("\n"))) for text in texts)
    return [line for text in lines for line in (text.replace("<", "&lt;"), "")]


def command_pages() -> dict[str, str]:
    """The pages of the product's commands and of the laboratory's."""
    product = [section(words, command) for words, command in commands() if not words.startswith("memoro lab")]
    lab = [section(words, command) for words, command in commands() if words.startswith("memoro lab")]
    rows = [f"| [`memoro {verb}`](#{verb}) | {about.summary} |" for verb, about in VERBS.items() if verb != "lab"]
    start = [
        "# Commands",
        "",
        "`memoro COMMAND --help` shows the same in a terminal. Options that many commands share mean the same in all.",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "| [`memoro lab`](lab.md) | study the method and its speed |",
        "",
    ]
    about = ["# Laboratory", "", "Commands that study the method: baselines, the paper's tables, speed.", ""]
    return {"commands.md": "\n".join([*start, *product]), "lab.md": "\n".join([*about, *lab])}
