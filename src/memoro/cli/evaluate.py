"""Commands that need labelled images: eval, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import (
    DeviceOption,
    Json,
    OthersOption,
    PrecisionOption,
    TaskBackboneOption,
    TaskFiles,
    keep_old,
    load,
    load_models,
    print_json,
    read_data,
)
from memoro.cli.settings import Settings, add_flags, read_settings, shell_log
from memoro.console import plain_console
from memoro.data import DataOptions
from memoro.engine.answers import AnswerOptions
from memoro.errors import DataError

app = typer.Typer()


@app.command("eval")
@add_flags("eval")
def evaluate_tasks(
    context: typer.Context,
    data: Annotated[list[str], typer.Argument(help="One dataset for all tasks, or NAME=DATA for each.")],
    tasks: TaskFiles,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    others: Annotated[
        list[str] | None,
        typer.Option("--others", help="Other images, which the task should flag as unfamiliar; repeat for more."),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(min=0, max=1, help="With --others: share of a task's own images that may count as unfamiliar."),
    ] = 0.01,
    together: Annotated[
        bool, typer.Option("--together", help="Also measure accuracy composed with all tasks, and routed by score.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Also write an HTML report: confusion matrix, each class, worst mistakes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write the report.", show_default="report.html")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """memoro eval photos/pets -t pets.safetensors
    memoro eval photos/pets -t pets.safetensors --report     # writes report.html
    memoro eval pets=photos/pets rooms=rooms.zip -t pets.safetensors -t rooms.safetensors
    memoro eval photos/pets -t pets.safetensors --others rooms.zip

    Evaluate tasks on the test split of their data, or on all of it if there is none.

    Images of classes that a task does not know are left out and listed.
    """
    from memoro.evaluation.evaluate import evaluate, evaluation_tables

    changes = read_settings("eval", settings)
    reading = {**flags, **changes[DataOptions], "batch_size": AnswerOptions(**changes[AnswerOptions]).batch_size}
    frozen, loaded = load_models(tasks, backbone, device, precision)
    errors = plain_console(stderr=True, soft_wrap=True)
    log = shell_log(errors, context)
    page = out or (Path("report.html") if report else None)
    if page is not None and page.suffix.lower() not in {".html", ".htm"}:
        raise DataError(f"--out {page} is for the HTML report: name it .html. For metrics as JSON, use --json.")
    results = evaluate(
        frozen, loaded, read_data(data), report=page, together=together, others=others or (), false_alarms=false_alarms,
        quiet=False, log=log, **reading,
    )  # fmt: skip
    if page is not None:
        errors.print(f"report: {page}")
    if as_json:
        print_json(results)
        return
    for table in evaluation_tables(results):
        plain_console().print(table)


@app.command("calibrate")
@add_flags("calibrate")
def calibrate_task(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A task file.")],
    data: Annotated[
        str,
        typer.Argument(
            help="Labelled images that the task was not trained on; of a set with splits, the test split.",
        ),
    ],
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    extends: Annotated[
        list[str] | None,
        typer.Option("--extends", help="Task file or hub id that the task extends; repeat for more."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write.", show_default="the task file itself")
    ] = None,
    others: OthersOption = None,
    settings: Settings = None,
    **flags: Any,
) -> None:
    """memoro calibrate pets.safetensors photos/new-pets

    Recalibrate a task's probabilities and familiarity on your own images.

    The weights and the content hash stay the same. Calibration and familiarity are added if the task has none.
    """
    from memoro.evaluation.calibrate import calibrate
    from memoro.tasks.taskfile import find_task_file, load_task, load_tasks, save_task

    changes = read_settings("calibrate", settings)
    reading = {**flags, **changes[DataOptions], "batch_size": AnswerOptions(**changes[AnswerOptions]).batch_size}
    file = find_task_file(file)  # of a folder, the file in it
    task = load_task(file)
    parents = [parent for path in extends or [] for parent in load_tasks(path)]
    console = plain_console(soft_wrap=True)
    frozen, before = load(backbone, device, task.spec.backbone, precision), task.spec
    calibrate(frozen, task, data, parents=parents, others=others, log=shell_log(console, context), **reading)
    if task.spec is before:
        raise typer.Exit(1)
    keep_old(out or file)
    save_task(task, out or file)
    console.print(f"written to {out or file}")
