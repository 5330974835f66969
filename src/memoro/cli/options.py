"""What commands share: options, loading, printing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Number = TypeVar("Number", int, float)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
BackboneOption = Annotated[
    str | None,
    typer.Option("--backbone", "-b", help="Hub id or folder of a Vision Transformer.", show_default="memoro-tiny"),
]
Files = Annotated[list[Path], typer.Argument(help="Task files or bundles.", show_default=False)]


def load(backbone: str | None, *, hint: bool = False, device: Any = None) -> Any:
    """The backbone; without a name the one that memoro ships, with a hint to better ones for those who train."""
    from memoro.backbones import load_backbone
    from memoro.backbones.load import TINY
    from memoro.progress import quiet_libraries

    quiet_libraries()
    if backbone is None and hint:
        typer.echo(f"backbone: {TINY}, small and built in. Larger ones do better: -b facebook/dinov2-small", err=True)
    return load_backbone(backbone or TINY, device=device)


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
