"""Commands about task files: inspect, compose, verify, export, card, import, cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from memoro.cli.options import (
    BackboneOption,
    DeviceOption,
    Files,
    Json,
    PrecisionOption,
    TaskBackboneOption,
    TaskFiles,
    gather_tasks,
    keep_old,
    load,
    print_json,
)
from memoro.console import plain_console

app = typer.Typer()


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="A task file, bundle, folder of them or hub id.")],
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="Also check whether the task fits this backbone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """memoro inspect pets.safetensors

    Show what is in a task file: labels, memory, parents, backbone, training and metrics.
    """
    from memoro.evaluation.inspect import inspect_tables, inspect_tasks
    from memoro.tasks.taskfile import find_task_file, find_task_files, load_tasks

    against = None if backbone is None else load(backbone, "cpu")
    files = {name: find_task_file(name) for name in find_task_files(file)}
    records = [{**inspect_tasks(path, load_tasks(path), against), "file": name} for name, path in files.items()]
    if as_json:
        print_json(records if len(records) > 1 else records[0])
    else:
        for table in (table for record in records for table in inspect_tables(record)):
            plain_console().print(table)


@app.command("compose")
def compose_files(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write.")],
) -> None:
    """memoro compose pets.safetensors rooms.safetensors -o both.safetensors

    Bundle tasks into one file. Every parent of a task must be included.
    """
    from memoro.console import format_bytes
    from memoro.engine.plan import check_together
    from memoro.tasks.taskfile import save_tasks

    tasks = gather_tasks(files, option="")
    check_together(tasks)
    keep_old(out)
    save_tasks(tasks, out)
    names = ", ".join(task.name for task in tasks)
    plain_console(soft_wrap=True).print(f"{out}: {names} ({format_bytes(out.stat().st_size)})")


@app.command()
def verify(
    tasks: TaskFiles,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Images to run on; without any, random pixels are used."),
    ] = None,
    as_json: Json = False,
) -> None:
    """memoro verify -t pets.safetensors -t rooms.safetensors photo.jpg

    Compare the composition with the original model, and each task alone with the same task composed.

    The backbone's own output must be bitwise equal. A task's logits may differ by rounding, because sums are taken in a
    different order. The largest difference is shown with its bound.

    Exits with 1 if the backbone's output differs, or a task's by more than its bound. To compare accuracy, use
    memoro eval --together.
    """
    from memoro.engine.composition import compose
    from memoro.engine.verify import sample_pixels
    from memoro.images.finding import find_images

    members = gather_tasks(tasks)
    loaded = load(backbone, device, members[0].spec.backbone, precision)
    model = compose(loaded, members)
    receipt = model.verify(sample_pixels(loaded, list(find_images(images)) if images else [], members))
    if as_json:
        print_json(receipt.to_json())
    else:
        for line in str(receipt).splitlines():
            plain_console(soft_wrap=True).print(line)
    raise typer.Exit(0 if receipt.base_equal and receipt.tasks_equal else 1)


@app.command()
def export(
    tasks: TaskFiles,
    out: Annotated[Path, typer.Option("--out", "-o", help="The ONNX file to write.")],
    backbone: TaskBackboneOption = None,
    images: Annotated[
        bool, typer.Option("--images", help="Take resized images as uint8 (NHWC) and normalise them in the graph.")
    ] = False,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(metavar="NAME", help="float32, bfloat16 or float16.", show_default="the checkpoint's"),
    ] = None,
) -> None:
    """memoro export -t pets.safetensors -t rooms.safetensors -o model.onnx

    Write backbone and tasks as one ONNX file, with one input and named outputs for any number of images.

    Outputs: base, and for each task NAME (logits), NAME.probabilities (not for
    regression) and NAME.familiarity (if the task has it).
    Labels with their thresholds, the spread of numbers, preprocessing and
    the backbone's fingerprint are in the file's metadata, as JSON under the
    key memoro.
    """
    from memoro.console import format_bytes, format_count
    from memoro.engine.composition import compose

    if out.suffix.lower() != ".onnx":
        raise typer.BadParameter(f"--out {out}: the file is an ONNX file, so name it .onnx")
    members = gather_tasks(tasks)
    loaded = load(backbone, "cpu", members[0].spec.backbone, precision)
    errors = plain_console(stderr=True, soft_wrap=True)
    errors.print(f"exporting {format_count(len(members), 'task')}; this may take a minute")
    compose(loaded, members).export(out, images=images)
    names = ", ".join(task.name for task in members)
    plain_console(soft_wrap=True).print(f"{out}: {names} ({format_bytes(out.stat().st_size)})")


@app.command()
def card(
    file: Annotated[str, typer.Argument(help="A task file, a bundle, or a folder with a card.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write.", show_default="the file's name")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Hub id for the example in the card.", show_default="the folder's name")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence, as the hub names it, such as apache-2.0.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the backbone.", show_default="its name, if that is one")
    ] = None,
) -> None:
    """memoro card pets.safetensors --repo me/pets --license apache-2.0

    Write a folder for the hub: the task file, a model card, and a picture of the confusion matrix. To upload it: hf
    upload me/pets pets.
    """
    from memoro.errors import TaskFileError
    from memoro.tasks.hub import save_pretrained
    from memoro.tasks.taskfile import FILE, load_tasks

    folder, tasks = out or (Path(file) if Path(file).is_dir() else Path(Path(file).stem)), load_tasks(file)
    if out is None and folder.is_dir() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise TaskFileError(
            f"{folder} is a folder with other files, such as your images: name another folder (or this one) with --out."
        )
    there = folder / FILE
    if there.is_file() and {task.content_hash() for task in load_tasks(there)} != {
        task.content_hash() for task in tasks
    }:
        keep_old(there)
    before, console = set(folder.glob("README.md.*")), plain_console(soft_wrap=True)
    save_pretrained(tasks, folder, repo_id=repo, license=license, base_model=base_model)
    for kept in set(folder.glob("README.md.*")) - before:
        console.print(f"The card that was there, which you may have edited, is kept as {kept.name}.")
    console.print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


@app.command("import")
def import_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A state dict (.pt) of the public reproduction.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The task file to write.")],
    backbone: BackboneOption = None,
    names: Annotated[str | None, typer.Option(help="Names for the tasks, separated by commas.")] = None,
) -> None:
    """memoro import model.pt -b FOLDER -o tasks.safetensors --names cifar,places

    Import tasks from a checkpoint of the paper's public reproduction.
    """
    from memoro.tasks.importing import import_tasks
    from memoro.tasks.taskfile import save_tasks

    tasks = import_tasks(load(backbone, "cpu"), checkpoint, names=None if names is None else names.split(","))
    keep_old(out)
    save_tasks(tasks, out)
    console = plain_console(soft_wrap=True)
    for task in tasks:
        over = ", ".join(parent.name for parent in task.extends)
        console.print(f"{task.name}: {len(task.labels)} classes, {task.cells} cells{over and f', extends {over}'}")
    console.print(f"written to {out}")


@app.command("cache")
def cache_command(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder of the cache.", show_default="~/.cache/memoro/features")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all features.")] = False,
) -> None:
    """memoro cache --clear

    Show the size of the feature cache, or empty it with --clear.
    """
    from memoro.console import format_bytes
    from memoro.engine.featurestore import clear as clear_all
    from memoro.engine.featurestore import default_folder, total_bytes

    place = folder or default_folder()
    size = f"{format_bytes(clear_all(place))} removed" if clear else format_bytes(total_bytes(place))
    plain_console(soft_wrap=True).print(f"{place}: {size}")
