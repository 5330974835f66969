"""What commands share: options, loading, printing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Number = TypeVar("Number", int, float)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
BackboneOption = Annotated[str, typer.Option("--backbone", "-b", help="Hub id or folder of a Vision Transformer.")]
Files = Annotated[list[Path], typer.Argument(help="Task files or bundles.", show_default=False)]


def load(backbone: str) -> Any:
    from memoro.backbones import load_backbone
    from memoro.progress import quiet_libraries

    quiet_libraries()
    return load_backbone(backbone)


def numbers(text: str, kind: type[Number] = int) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,10,100") from None


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
