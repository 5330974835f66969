"""What commands share: options, loading, printing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from memoro.errors import CompositionError

if TYPE_CHECKING:
    from memoro.backbones import Backbone
    from memoro.regimes import Baseline
    from memoro.tasks.task import Task

Number = TypeVar("Number", int, float)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
BackboneOption = Annotated[
    str | None,
    typer.Option("--backbone", "-b", help="Hub id or folder of a Vision Transformer.", show_default="memoro-tiny"),
]
Files = Annotated[list[Path], typer.Argument(help="Task files or bundles.", show_default=False)]
TaskFiles = Annotated[
    list[Path],
    typer.Option("--tasks", "-t", help="Task file or bundle; repeat for more.", show_default=False),
]


def load(backbone: str | None, *, hint: bool = False, device: Any = None) -> Any:
    """The backbone; without a name the one that memoro ships, with a hint to better ones for those who train."""
    from memoro.backbones import load_backbone
    from memoro.backbones.load import TINY
    from memoro.console import quiet_libraries

    quiet_libraries()
    if backbone is None and hint:
        typer.echo(f"backbone: {TINY}, small and built in. Larger ones do better: -b facebook/dinov2-small", err=True)
    return load_backbone(backbone or TINY, device=device)


def gather_tasks(files: Iterable[Path], option: str = "-t") -> list[Task]:
    """The tasks of some files. Those that do not go together are told in words for the shell.

    `option` is what stands before a file there, nothing for an argument.
    """
    from memoro.regimes.baselinefile import is_baseline, read_baseline
    from memoro.tasks.taskfile import load_tasks

    found: list[tuple[Path, Task]] = []
    for file in files:
        if is_baseline(file):
            spec, _, _ = read_baseline(file)
            raise CompositionError(
                f"{file} holds a baseline: those cannot be composed or verified. {spec.not_composable}"
            )
        found += [(file, task) for task in load_tasks(file)]
    _check_names(found, option)
    return [task for _, task in found]


def gather_models(files: Iterable[Path], backbone: Backbone) -> list[Task | Baseline]:
    """The same where baselines are welcome, each over the backbone."""
    from memoro.regimes.baselinefile import load_models

    found = [(file, model) for file in files for model in load_models([file], backbone)]
    _check_names(found, "-t")
    return [model for _, model in found]


def _check_names(found: Sequence[tuple[Path, Any]], option: str) -> None:
    """Raises where a name stands for two tasks, or a task builds on one that is not there."""
    places: dict[str, Path] = {}
    for file, model in found:
        if model.name in places:
            where = f"in {places[model.name]} and in {file}"
            advice = "train one of them again with --task OTHER"
            if file == places[model.name]:
                where, advice = f"as {file} is given twice", "give it once"
            raise CompositionError(
                f"two tasks are called {model.name!r}, {where}, but a name stands for one answer: {advice}."
            )
        places[model.name] = file
    for _, model in found:
        for parent in getattr(model, "extends", ()):
            if parent.name not in places:
                more = f"{option} {parent.name}.safetensors".strip()
                raise CompositionError(
                    f"{model.name!r} extends {parent.name!r}, which is not here: attach {parent.name!r} too; "
                    f"add {more} (or where that file is)."
                )


def numbers(text: str, kind: type[Number] = int) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,10,100") from None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))
