"""What commands share: options, loading, printing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from memoro.console import PlainConsole, plain_console, quoted, to_json
from memoro.errors import CompositionError, DataError

if TYPE_CHECKING:
    import torch

    from memoro.backbones import Backbone, BackboneRecord
    from memoro.backbones.precision import Precision
    from memoro.tasks.task import Task

Number = TypeVar("Number", int, float)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
BackboneOption = Annotated[
    str | None,
    typer.Option(
        "--backbone", "-b", help="Hub id, folder or timm:NAME of a Vision Transformer.", show_default="memoro-tiny"
    ),
]
TaskBackboneOption = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        "-b",
        help="Hub id, folder or timm:NAME of the tasks' backbone.",
        show_default="the one that the files name",
    ),
]
OthersOption = Annotated[
    str | None,
    typer.Option(
        "--others",
        help="50 or more photographs of anything else, to learn what is unfamiliar from: folder or .zip.",
        show_default="those known for the backbone",
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1 or mps.", show_default="a GPU if there is one")
]
PrecisionOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--precision",
        metavar="NAME",
        help="float32, bfloat16, float16 or auto: bfloat16 if the device is faster in it, else float32.",
    ),
]
Files = Annotated[list[str], typer.Argument(help="Task files, bundles or hub ids.")]
TaskFiles = Annotated[
    list[str],
    typer.Option(
        "--tasks", "-t",
        help="Task file, bundle, folder of them or hub id (owner/name@revision); NAME=FILE renames; repeat for more.",
    ),
]  # fmt: skip
LabelColumn = Annotated[str | None, typer.Option(help="Column of a table with the labels.")]


def share_cores() -> None:
    """Lets torch's threads sleep while they wait for each other, unless the user chose otherwise.

    By default they spin, which takes the cores from decoders and from the server's event loop. OpenMP reads this once,
    when torch is imported: call it before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load(
    backbone: str | None,
    device: str | None = None,
    made_for: BackboneRecord | None = None,
    precision: Precision | None = None,
) -> Backbone:
    """The backbone of a command, on this device or on the GPU if there is one.

    Without a name, the one that a task was made for, or the shipped one. Without a precision, in the checkpoint's
    dtype.
    """
    from memoro.backbones import load_backbone
    from memoro.backbones.load import TINY, own_device

    name, place = name_backbone(backbone), own_device(device)
    console = plain_console(stderr=True, soft_wrap=True)
    allow_tf32(place, precision)
    if backbone is not None or made_for is None:
        found = load_backbone(name, device=place, precision=precision)
    else:
        if made_for.name != TINY:
            console.print(f"backbone: {made_for.name}")
        found = load_backbone(made_for, device=place, precision=precision)
    tell_precision(found, precision, console)
    return found


def tell_precision(backbone: Backbone, precision: Precision | None, console: PlainConsole) -> None:
    """Says what `auto` chose, if it is not float32."""
    import torch

    from memoro.backbones.precision import CHOSEN

    if precision == "auto" and backbone.checkpoint is not None and backbone.dtype == torch.bfloat16:
        console.print(CHOSEN.replace("`precision=float32`", "--precision float32"))


def allow_tf32(device: torch.device, precision: str | None) -> None:
    """Lets a GPU round what stays in float32 to TF32 before products, unless float32 was asked for."""
    import torch

    if device.type == "cuda" and precision != "float32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


def name_backbone(backbone: str | None, *, hint: bool = False) -> str:
    """The backbone's name; without one, that of the shipped one, with a hint to better ones."""
    from memoro.backbones.load import TINY
    from memoro.console import quiet_libraries

    quiet_libraries()
    if backbone is None and hint:
        typer.echo(
            f"backbone: {TINY} (small, built in). Larger ones are usually better: -b facebook/dinov2-small", err=True
        )
    return backbone or TINY


def read_data(arguments: Sequence[str]) -> str | dict[str, str]:
    """One set, or `NAME=DATA` for each task as a dict."""
    if len(arguments) == 1 and ("=" not in arguments[0] or Path(arguments[0]).exists()):
        return arguments[0]
    sets = {name: data for name, _, data in (argument.partition("=") for argument in arguments)}
    if len(sets) < len(arguments) or not all(sets.values()):
        raise DataError("to use several sets, give NAME=DATA for each, with different names.")
    return sets


def gather_tasks(files: Iterable[str], option: str = "-t") -> list[Task]:
    """The tasks of some files or hub ids; an error if two have one name, or a task extends one that is missing.

    `option` is what precedes a file in the shell, nothing for an argument.
    """
    from memoro.tasks.taskfile import expand_task_arguments, load_named

    found = [(file, task) for file, path, name in expand_task_arguments(files) for task in load_named(path, name)]
    places: dict[str, str] = {}
    counts = Counter(file for file, _ in found)
    for file, task in found:
        if task.name in places:
            where, advice = f"in {places[task.name]} and in {file}", "leave one of these files out"
            if alone := [one for one in (file, places[task.name]) if counts[one] == 1]:
                advice = f"give one of them another name: {quoted(*filter(None, [option]), f'OTHER={alone[0]}')}"
            if file == places[task.name]:
                where, advice = f"as {file} is given twice", "give it once"
            raise CompositionError(f"two tasks are called {task.name!r}, {where}, but names must be unique: {advice}.")
        places[task.name] = file
    for _, task in found:
        for parent in task.extends:
            if parent.name not in places:
                more = quoted(*filter(None, [option]), f"{parent.name}.safetensors")
                raise CompositionError(
                    f"{task.name!r} extends {parent.name!r}, which was not given. Add {more}, or the path of its file."
                )
    return [task for _, task in found]


def load_models(
    files: Iterable[str], backbone: str | None, device: str | None, precision: Precision
) -> tuple[Backbone, list[Task]]:
    """The backbone of some files or hub ids, and their tasks."""
    tasks = gather_tasks(files)
    return load(backbone, device, tasks[0].spec.backbone, precision), tasks


def numbers(text: str, kind: type[Number] = int) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a comma-separated list of numbers such as 1,10,100") from None


def print_json(value: Any) -> None:
    # Lone surrogates, as in undecodable file names, cannot be printed: they become JSON escapes.
    typer.echo(to_json(value, indent=2).encode(errors="backslashreplace").decode())


def keep_old(file: Path) -> None:
    """Keeps a file that is about to be replaced under another name, and says so."""
    from memoro.files import keep_copy

    if file.is_file():
        text = f"{file} was there already: the old file is kept as {keep_copy(file)}."
        plain_console(stderr=True, soft_wrap=True).print(text)
