"""Options that the command line reads from the fields of the library's dataclasses: as flags, or with --set."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from memoro.console import PlainConsole, make_table, plain_console
from memoro.errors import MemoroError
from memoro.options import Option, read_options

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
WORDS_OF = {"True": "true", "False": "false", "None": "none"}


class Fields(NamedTuple):
    """Which fields a verb takes: those of `owners`, the named ones as flags, the others with --set."""

    owners: Callable[[], Sequence[type]]
    flags: tuple[str, ...] = ()
    settings: tuple[str, ...] | None = None
    """None: all that are not flags."""

    def options(self) -> dict[str, Option]:
        return read_options(*self.owners())

    def named(self) -> dict[str, Option]:
        """The settings by name."""
        options = self.options()
        names = self.settings or [name for name in options if name not in self.flags]
        return {name: options[name] for name in names}


def _train() -> Sequence[type]:
    from memoro.data import Augment, DataOptions
    from memoro.training.cached import Cache
    from memoro.training.recipe import Recipe, TrainOptions

    return Recipe, Augment, TrainOptions, Cache, DataOptions


def _data() -> Sequence[type]:
    from memoro.data import DataOptions
    from memoro.engine.answers import AnswerOptions

    return DataOptions, AnswerOptions


def _predict() -> Sequence[type]:
    from memoro.evaluation.parallel import RayOptions

    return *_data(), RayOptions


def _serve() -> Sequence[type]:
    from memoro.serve.options import ServeOptions

    return (ServeOptions,)


_READ = ("image_column", "allow_absolute", "max_unreadable", "batch_size", "workers")
FIELDS: Mapping[str, Fields] = {
    "train": Fields(
        _train, ("kind", "label_column", "image_size", "lr", "epochs", "seed", "precision", "folder", "resume", "track")
    ),
    "eval": Fields(_data, ("label_column",), (*_READ, "class_folder", "cache")),
    "calibrate": Fields(_data, ("label_column",), (*_READ, "class_folder", "cache")),
    "predict": Fields(
        _predict, (), ("image_column", "allow_absolute", *_READ[3:], "ray", "ray_address", "ray_workers")
    ),
    "teach": Fields(_data, (), _READ[:2]),
    "suspects": Fields(_data, (), _READ[:2]),
    "serve": Fields(_serve, ("host", "port", "token", "read_token", "allow_host", "max_batch", "max_delay_ms")),
}
"""By verb."""


def _show(context: typer.Context, words: list[str] | None) -> list[str] | None:
    """Prints all settings for `--set help`."""
    if "help" in (words or ()):
        rows = [
            (one.name, one.help, one.shown or _written(one.default))
            for one in FIELDS[context.info_name or ""].named().values()
        ]
        plain_console().print(make_table(["setting", "meaning", "default"], rows, left=3))
        raise typer.Exit
    return words


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change a setting, or those in @file.json; repeat for more. --set help lists all.",
        callback=_show,
        is_eager=True,
    ),
]


def read_settings(verb: str, words: Sequence[str] | None) -> dict[type, dict[str, Any]]:
    """The values of `--set`, by dataclass and field."""
    known = FIELDS[verb].named()
    values: dict[str, Any] = {}
    for word in words or ():
        if word.startswith("@"):
            values |= _read_file(Path(word[1:]))
        else:
            name, equals, value = word.partition("=")
            if not equals:
                raise MemoroError(f"--set {word}: write NAME=VALUE, or @file.json; --set help lists the settings.")
            values[name.replace("-", "_")] = value
    found: dict[type, dict[str, Any]] = {owner: {} for owner in FIELDS[verb].owners()}
    for name, value in values.items():
        if name in FIELDS[verb].flags:
            raise MemoroError(f"{name} is an option of its own: use {flag_of(name)}, not --set.")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise MemoroError(f"there is no setting {name!r}.{hint} --set help lists them.")
        found[known[name].owner][known[name].field] = _convert(known[name], value)
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MemoroError(f"--set @{path}: not a readable JSON file ({error}).") from None
    if not isinstance(values, dict):
        raise MemoroError(f'--set @{path}: the file must have one JSON object, such as {{"momentum": 0.8}}.')
    return values


def _convert(option: Option, value: Any) -> Any:
    """The value as the field's type."""
    kinds = get_args(option.type) if NoneType in get_args(option.type) else (option.type,)
    text = _written(value)
    for kind in kinds:
        try:
            return _parse(kind, text)
        except (KeyError, ValueError):
            continue
    raise MemoroError(f"{option.name}={text}: choose {' or '.join(map(_describe, kinds))}.")


def _parse(kind: Any, text: str) -> Any:
    """Raises KeyError or ValueError if the text is not of this type."""
    if kind is NoneType:
        return {"none": None}[text.lower()]
    if kind is bool:
        return WORDS[text.lower()]
    if kind is int and not text.lstrip("-").isdigit():
        return {True: int(float(text))}[float(text).is_integer()]  # 64e6
    if get_origin(kind) is Literal:
        return {choice: choice for choice in get_args(kind)}[text]
    if get_origin(kind) is tuple:
        return tuple(_parse(part, word) for part, word in zip(get_args(kind), text.split(","), strict=True))
    return kind(text)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers separated by a comma"
    names = {NoneType: "none", bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(kind, "a text")


def _written(value: Any) -> str:
    """A value as --set takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------- flags


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


Command = Callable[..., None]


def add_flags(verb: str, **more: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Adds the flags of a verb to its function, which takes their values as keyword arguments.

    Typer reads them from the signature. `more` are arguments for `typer.Option` by flag; `type` replaces the field's.
    """
    options = FIELDS[verb].options()

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        parameters += [_flag(options[name], dict(more.get(name, {}))) for name in FIELDS[verb].flags]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _flag(option: Option, more: dict[str, Any]) -> inspect.Parameter:
    kind = more.pop("type", option.type)
    text = more.pop("help", option.help)
    shown = more.pop("show_default", option.shown or option.default is not None)
    default = more.pop("default", option.default)
    info = typer.Option(flag_of(option.name), help=text, show_default=shown, **more)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


# ---------------------------------------------------------------------------------------------------------- messages


def flags_of(command: Any) -> dict[str, str]:
    """The flags of a command by the names of the arguments that they give."""
    flags: dict[str, str] = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            flag = max(parameter.opts, key=len)
            flags |= {parameter.name: flag, flag.lstrip("-").replace("-", "_"): flag}
    return flags


def name_options(text: str, verb: str, command: Any) -> str:
    """A message of the library for the shell: `from_layer` in backticks becomes --from-layer, `views=4` --set views=4.

    Only arguments that the command can be given are replaced.
    """
    if "`" not in text:
        return text
    flags, settings = flags_of(command), FIELDS[verb].named() if verb in FIELDS else {}

    def replace(found: re.Match[str]) -> str:
        name, value = found[1], (found[2] or "").strip("'\"")
        if name in flags:
            return " ".join(filter(None, [flags[name], "" if value == "True" else value]))
        for setting in settings.values():
            if name in {setting.name, f"{setting.owner.__name__}.{setting.field}"}:
                return f"--set {setting.name}{value and '=' + WORDS_OF.get(value, value)}"
        return found[0]

    return re.sub(r"`([A-Za-z_.]+)(?:=([^`\n]*))?`", replace, text)


def shell_log(console: PlainConsole, context: typer.Context) -> Callable[[str], None]:
    """Prints notes of the library as `name_options` writes them."""
    return lambda text: console.print(name_options(text, context.info_name or "", context.command))
