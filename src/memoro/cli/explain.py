"""The command that shows where tasks looked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memoro.cli.options import (
    DeviceOption,
    Json,
    PrecisionOption,
    TaskBackboneOption,
    TaskFiles,
    gather_tasks,
    load,
    print_json,
)
from memoro.console import Cell, plain_console

app = typer.Typer()


@app.command()
def explain(
    images: Annotated[list[str], typer.Argument(help="Files, folders or globs.", show_default=False)],
    tasks: TaskFiles,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: .png, .jpg or .webp.")] = Path(
        "overlay.png"
    ),
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    as_json: Json = False,
) -> None:
    """memoro explain photo.jpg -t pets.safetensors -o overlay.png
    memoro explain new/ -t pets.safetensors -t rooms.safetensors -o sheet.png

    Show where tasks looked: each image in grey, coloured by attention.

    Yellow is the most attention, dark blue none. Several images or tasks are drawn as a grid: a row for each image, a
    column for each task. The table shows how much attention went to the image's patches, the task's memory etc.
    """
    from memoro.console import make_table
    from memoro.engine.composition import compose
    from memoro.evaluation.overlays import draw_overlays, picture_format, save_picture
    from memoro.images import find_images

    picture_format(out)  # an error before the work
    members = gather_tasks(tasks)
    model = compose(load(backbone, device, members[0].spec.backbone, precision), members)
    found = draw_overlays(model, list(find_images(images)))
    errors = plain_console(stderr=True, soft_wrap=True)
    for reason in found.skipped.values():
        errors.print(f"skipped {reason}")
    if found.picture is None:
        raise typer.Exit(1)
    save_picture(found.picture, out)
    for name, note in found.notes.items():
        errors.print(f"note: {name}: {note}")
    if as_json:
        print_json({"out": str(out), "images": found.to_json(), "skipped": found.skipped})
        return
    rows: list[list[Cell]] = [
        [image, name, str(looked.answer), [f"{part} {share:.0%}" for part, share in looked.attention.items()]]
        for image, answers in found.answers.items()
        for name, looked in answers.items()
    ]
    plain_console().print(make_table(["image", "task", "answer", "attention to"], rows, left=4))
    plain_console(soft_wrap=True).print(f"written to {out}")
