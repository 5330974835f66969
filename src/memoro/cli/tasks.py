"""Commands about task files: inspect, compose, verify, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memoro.cli.options import BackboneOption, Files, Json, load, print_json

app = typer.Typer()


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A task file or bundle.", show_default=False)],
    backbone: Annotated[str | None, typer.Option("--backbone", "-b", help="Also say whether it fits this one.")] = None,
    as_json: Json = False,
) -> None:
    """What is in a task file: labels, memory, parents, backbone, how it was trained and how good it is."""
    from memoro.regimes.baselinefile import is_baseline, read_baseline
    from memoro.report import inspect_baseline, inspect_table, inspect_tasks
    from memoro.taskfile import load_tasks

    frozen = None if backbone is None else load(backbone)
    if is_baseline(file):
        record = inspect_baseline(file, *read_baseline(file), frozen)
    else:
        record = inspect_tasks(file, load_tasks(file), frozen)
    if as_json:
        print_json(record)
    else:
        Console().print(inspect_table(record))


@app.command("compose")
def compose_files(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write.", show_default=False)],
) -> None:
    """Put tasks into one file, side by side or on top of each other. Parents must be among them."""
    from memoro.composition import check_together
    from memoro.taskfile import load_tasks, save_tasks

    tasks = [task for file in files for task in load_tasks(file)]
    check_together(tasks)
    save_tasks(tasks, out)
    Console().print(f"{out}: {', '.join(task.name for task in tasks)} ({out.stat().st_size / 1000:,.1f} kB)")


@app.command()
def verify(
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    backbone: BackboneOption = None,
    images: Annotated[list[Path] | None, typer.Argument(help="Images to run on; random pixels without.")] = None,
    as_json: Json = False,
) -> None:
    """Run the original model beside the composition: base equal to the bit, tasks equal alone and composed.

    Exits with 1 where the base differs.
    """
    from memoro.composition import compose
    from memoro.receipt import sample_pixels
    from memoro.taskfile import load_tasks

    loaded = load(backbone)
    model = compose(loaded, [task for file in tasks for task in load_tasks(file)])
    receipt = model.verify(sample_pixels(loaded, images or []))
    if as_json:
        print_json(receipt.to_json())
    else:
        typer.echo(str(receipt))
    raise typer.Exit(0 if receipt.base_equal else 1)


@app.command("import")
def import_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A state dict (.pt) of the public reproduction.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The task file to write.", show_default=False)],
    backbone: BackboneOption = None,
    names: Annotated[str | None, typer.Option(help="Names for its tasks, separated by commas.")] = None,
) -> None:
    """Read tasks out of a checkpoint of the paper's public reproduction."""
    from memoro.reproduction import import_tasks
    from memoro.taskfile import save_tasks

    tasks = import_tasks(load(backbone), checkpoint, names=None if names is None else names.split(","))
    save_tasks(tasks, out)
    for task in tasks:
        over = ", ".join(parent.name for parent in task.extends)
        Console().print(f"{task.name}: {len(task.labels)} classes, {task.cells} cells{over and f', extends {over}'}")
    Console().print(f"written to {out}")


@app.command("cache")
def cache_command(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of features.", show_default="~/.cache/memoro/features")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
) -> None:
    """How much room the kept features take; --clear removes them."""
    from memoro.featurestore import clear as clear_all
    from memoro.featurestore import default_folder, total_bytes

    place = folder or default_folder()
    if clear:
        typer.echo(f"{place}: {clear_all(place) / 1e9:.2f} GB removed")
    else:
        typer.echo(f"{place}: {total_bytes(place) / 1e9:.2f} GB")
