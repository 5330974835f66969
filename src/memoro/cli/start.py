"""Commands to start with: demo, backbones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from memoro.cli.options import DeviceOption, Json, print_json, share_cores
from memoro.console import make_table, plain_console, quiet_libraries

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


@app.command()
def backbones(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="List only backbones whose names contain one of these."),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Measure images per second on this machine.")] = False,
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """memoro backbones
    memoro backbones dinov2 --speed

    List backbones that --backbone takes, small ones first.

    Other models of these families, and folders, work as well. Speed is measured with random weights of the same
    size, so nothing is downloaded. See docs/backbones.md.
    """
    share_cores()
    from memoro.backbones.known import KNOWN, measure_speed
    from memoro.backbones.load import own_device

    quiet_libraries()
    chosen = [one for one in KNOWN if not words or any(word.lower() in one.name.lower() for word in words)]
    if not chosen:
        raise typer.BadParameter(f"no listed backbone has {' or '.join(words or ())} in its name.")
    rates = measure_speed(chosen, str(own_device(device))) if speed else {}
    if as_json:
        measured = {name: {"images_per_second": rate} for name, rate in rates.items()}
        print_json([{**asdict(one), "parameters": one.parameters, **measured.get(one.name, {})} for one in chosen])
        return
    columns = ["backbone", "licence", "size", "px", *(["images/s"] if speed else [])]
    cells = [
        [one.name, one.licence, f"{one.parameters / 1e6:.0f} M", str(one.pixels),
         *([f"{rates[one.name]:.0f}"] if speed else [])]
        for one in chosen
    ]  # fmt: skip
    table = make_table(columns, cells, left=2)
    table.columns[0].no_wrap = True  # so that a name can be copied
    plain_console().print(table)
