"""The commands that label: a page that learns meanwhile, and labels that are likely to be wrong."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import (
    BackboneOption,
    DeviceOption,
    Json,
    LabelColumn,
    PrecisionOption,
    allow_tf32,
    share_cores,
    tell_precision,
)
from memoro.cli.settings import Settings, read_settings
from memoro.console import format_count, make_table, plain_console, quiet_libraries, to_json

app = typer.Typer()


@app.command()
def teach(
    photos: Annotated[
        str, typer.Argument(help="Folder, .zip or table of images, labelled or not.", show_default=False)
    ],
    task: Annotated[
        str | None, typer.Option(help="Name of the task.", show_default="the name of the photographs")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Classes to begin with, separated by commas.")] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="What a label is: class, labels (several per image) or number.", show_default="class"),
    ] = None,
    backbone: BackboneOption = None,
    tasks: Annotated[Path, typer.Option(help="Folder of task files: all of them answer on the page.")] = Path("tasks"),
    labels_file: Annotated[
        Path | None,
        typer.Option(help="Table of decisions, which are appended to it.", show_default="labels.csv in the folder"),
    ] = None,
    start_from: Annotated[str | None, typer.Option(help="Earlier task to go on with: a file or hub id.")] = None,
    image_size: Annotated[int | None, typer.Option(min=16, help="Pixels of an image's edge.")] = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    label_column: LabelColumn = None,
    settings: Settings = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Train the task on the labels so far, without a page.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Task file that --finish writes.", show_default="TASK.safetensors in --tasks")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Run folder of --finish, for metrics and report.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="MEMORO_TOKEN", help="Bearer token; needed unless the server is on loopback.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """memoro teach photos/ --task pets --labels cat,dog

    Label photographs on a page that learns from every label.

    The page shows what to label next, guesses of all other images, and how
    good these are. Every decision is appended to labels.csv at once. At the
    end it trains the whole task and serves it. See docs/teaching.md.
    """
    share_cores()
    quiet_libraries()
    from memoro.errors import need

    if not finish:
        need("fastapi", "uvicorn", "python_multipart", "prometheus_client", extra="serve")
    from memoro.data import DataOptions
    from memoro.teach.session import teach as open_session

    names = [name for name in (labels or "").split(",") if name.strip()]
    reading: dict[str, Any] = {"label_column": label_column, **read_settings("teach", settings)[DataOptions]}
    session = open_session(
        photos, task=task, labels=names, kind=kind, backbone=backbone, device=device, precision=precision,
        image_size=image_size, labels_file=labels_file, start_from=start_from, read_only=finish, **reading,
    )  # fmt: skip
    console = plain_console(stderr=True, soft_wrap=True)
    allow_tf32(session.backbone.device, precision)
    tell_precision(session.backbone, precision, console)
    with session:
        if finish:
            file = out or tasks / f"{session.name}.safetensors"
            result = session.fit(file, folder=folder)
            if as_json:
                typer.echo(to_json(result.to_json(), indent=2))
                return
            for table in result.tables():
                plain_console().print(table)
            return
        from memoro.serve.options import ServeOptions
        from memoro.teach.routes import run_teaching

        given = {
            "--task": session.name, "--labels": labels, "--kind": kind, "--backbone": backbone, "--device": device,
            "--precision": None if precision == "auto" else precision,
            "--labels-file": session.table.path, "--start-from": start_from, "--image-size": image_size,
            "--label-column": label_column,
        }  # fmt: skip
        chosen = [*given.items(), *(("--set", setting) for setting in settings or ())]
        command = ["teach", str(session.photos.place), "--finish"]
        command += [word for name, value in chosen if value is not None for word in (name, str(value))]
        counted = format_count(len(session.photos), "image")
        console.print(f"{session.name}: {counted}, {len(session.training()):,} labelled; labels: {session.table.path}")
        if session.missing:
            rows = format_count(session.missing, "row")
            console.print(f"left out {rows} of the table, which cannot be read or whose image is not there")

        def started(url: str) -> None:
            console.print(f"listening on {url} (open it in a browser); Ctrl-C stops")
            if browse:
                webbrowser.open(url)

        run_teaching(session, tasks, command, ServeOptions(host=host, port=port, token=token), started)
    console.print("stopped")


@app.command()
def suspects(
    data: Annotated[str, typer.Argument(help="Labelled images: folder, .zip or table.", show_default=False)],
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Task file or hub id, whose backbone and labels are used.")
    ] = None,
    backbone: BackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    label_column: LabelColumn = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="CSV file to write.")] = None,
    as_json: Json = False,
) -> None:
    """memoro suspects photos/pets -t pets.safetensors -o suspects.csv

    Find labels that are likely to be wrong.

    Each image is answered by a solution without it and its near-duplicates;
    labels that this answer contradicts are listed, least probable first.
    """
    share_cores()
    quiet_libraries()

    from memoro.data import DataOptions
    from memoro.files import write_whole
    from memoro.teach.suspects import suspects as find
    from memoro.teach.suspects import suspects_csv

    reading: dict[str, Any] = {"label_column": label_column, **read_settings("suspects", settings)[DataOptions]}
    found = find(data, task=task, backbone=backbone, device=device, precision=precision, **reading)
    if out is not None:
        write_whole(out, suspects_csv(found).encode("utf-8", "surrogateescape"))
    if as_json:
        typer.echo(to_json([one._asdict() for one in found], indent=2))
    elif out is None:
        rows = [
            (one.path, one.label, one.answer, "" if one.probability is None else f"{one.probability:.3f}", one.reason)
            for one in found
        ]
        plain_console().print(make_table(["image", "label", "answer", "probability", "reason"], rows))
    else:
        plain_console(stderr=True).print(f"{format_count(len(found), 'suspect')}: {out}")
