"""Commands about datasets: train, sweep, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import (
    AllowAbsolute,
    BackboneOption,
    DeviceOption,
    ImageColumn,
    Json,
    LabelColumn,
    MaxUnreadable,
    TaskBackboneOption,
    TaskFiles,
    gather_tasks,
    load_models,
    name_backbone,
    numbers,
    print_json,
    read_data,
    reading_options,
)
from memoro.cli.trainoptions import SWEEP, TRAIN, add_options
from memoro.console import plain_console
from memoro.errors import DataError
from memoro.phases import Phases

app = typer.Typer()

Data = Annotated[
    list[str],
    typer.Argument(
        help="Folder of class folders, zip, table (.csv, .jsonl, .parquet), hub id or known dataset; NAME=DATA for "
        "each of several tasks.",
        show_default=False,
    ),
]


@app.command()
@add_options(TRAIN)
def train(
    data: Data, backbone: BackboneOption = None, device: DeviceOption = None, as_json: Json = False, **settings: Any
) -> None:
    """Train a task on a folder of images and write its file; or several tasks in one pass.

    By default (regime joint), a read-out is solved in closed form, a token is
    trained with one learning rate, and the task joins both. --regime readout
    takes seconds. Other regimes than joint and side try three learning rates
    without --lr, and the best by validation score is kept. If there is no
    validation split, small sets use folds; of larger ones, a part is held out.
    Ctrl-C saves a checkpoint; --resume continues from it.

    With the default recipe, images are not augmented. --views 4 adds random
    crops and horizontal flips. If left and right matter or images show text,
    flips hurt: use --flip 0. For numbers, images are augmented only if --crop
    or --flip is given.

    memoro train photos/pets -b facebook/dinov2-small

    memoro train houses.csv --label-column price --kind number

    memoro train photos/pets --start-from pets.safetensors   (more images, more classes)

    memoro train pets=photos/pets rooms=rooms.zip --out tasks/

    Regimes that train a task, which can be composed with others:
    joint (weighted mean of side and readout; default), readout (a linear layer
    on statistics of the upper layers, solved in seconds), side (class token,
    low-rank weights for the task's token, head), memory (class token, memory,
    head; the paper's) and head (linear).
    """
    _train(data, backbone, device, as_json, settings)


@app.command()
@add_options(SWEEP)
def sweep(
    data: Data, backbone: BackboneOption = None, device: DeviceOption = None, as_json: Json = False, **settings: Any
) -> None:
    """Train every combination of settings in one pass and keep the best by validation score.

    memoro sweep photos/pets --rank 4,8,16 --from-layer 4,8 --seeds 3

    Regimes are those of memoro train. Runs of joint, side, memory and head
    share one pass.
    """
    regime = settings["regime"] or ("memory" if settings["recipe"] == "paper" else "joint")
    sizes = any(settings[name] for name in ("rank", "cells", "from_layer"))
    varied = sizes or "," in (settings["lr"] or "") or settings["seeds"] > 1
    if settings["start_from"] is not None:
        regime = None  # the task keeps its sizes
    if regime == "memory" and settings["cells"] is None:
        settings["cells"] = "0,5"
    elif regime in {"side", "joint"} and not varied:
        settings["rank"] = "4,16"
    for name, kind in (("cells", int), ("rank", int), ("from_layer", int), ("lr", float)):
        if settings[name] is not None:
            settings[name] = numbers(settings[name], kind)
    _train(data, backbone, device, as_json, settings)


def _train(data: list[str], backbone: str | None, device: str | None, as_json: bool, settings: dict[str, Any]) -> None:
    """Calls `memoro.train` with the options of the command line, and prints."""
    phases = Phases()  # before the imports, which are part of the user's wait
    from memoro.backbones.load import own_device
    from memoro.data import Augment
    from memoro.training import Cache
    from memoro.training.distributed import find_processes
    from memoro.training.train import train

    augment = {"crop": settings.pop("crop"), "scale": (settings.pop("crop_scale"), 1.0), "flip": settings.pop("flip")}
    cache, folder = settings.pop("cache"), settings.pop("cache_folder")
    place = {"folder": folder} if folder is not None else {}
    kept = Cache(budget=settings.pop("cache_budget"), dtype=settings.pop("cache_dtype"), required=bool(cache), **place)
    settings |= {
        "augment": Augment(**augment),
        "cache": False if cache is False else kept,
        "extends": gather_tasks(settings["extends"] or [], "--extends"),
        "folder": settings["folder"] or "runs/{task}",
        "out": settings["out"] or Path(),
    }
    for name in ("optimizer", "weight_decay", "views"):
        if settings[name] is None:
            del settings[name]  # the recipe's
    if settings.get("views") == 0:
        settings["views"] = None
    here = find_processes(own_device(device))
    errors = plain_console(stderr=True, soft_wrap=True, quiet=not here.main)
    name = name_backbone(backbone, hint=here.main)
    try:
        how = {"log": errors.print, "quiet": not here.main, "phases": phases}
        results = train(read_data(data), backbone=name, device=device, **how, **settings)
    except KeyboardInterrupt as stop:
        errors.print(f"{stop or 'stopped'}. Run the same command with --resume to continue from the last checkpoint.")
        raise typer.Exit(130) from None
    found = list(results.values()) if isinstance(results, dict) else [results]
    if as_json and here.main:
        records = [result.to_json() for result in found]
        print_json(records[0] if len(records) == 1 else {"tasks": records, "folder": str(found[0].folder)})
    for table in [table for result in found for table in result.tables()] if here.main and not as_json else []:
        plain_console().print(table, soft_wrap=isinstance(table, str))
    if not all(result.metrics for result in found):
        raise typer.Exit(1)


@app.command("eval")
def evaluate_tasks(
    data: Annotated[
        list[str], typer.Argument(help="One dataset for all tasks, or NAME=DATA for each.", show_default=False)
    ],
    tasks: TaskFiles,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    label_column: LabelColumn = None,
    image_column: ImageColumn = None,
    allow_absolute: AllowAbsolute = False,
    max_unreadable: MaxUnreadable = 0.05,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images.", show_default="one per core")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--others", help="Other images, which the task should flag as unfamiliar; repeat for more."),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(min=0, max=1, help="With --others: share of own images that may be called unfamiliar."),
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
    as_json: Json = False,
) -> None:
    """Evaluate tasks on the test split of their data, or on all of it if there is none.

    Images of classes that a task does not know are left out and listed.

    memoro eval photos/pets -t pets.safetensors

    memoro eval photos/pets -t pets.safetensors --report     (writes report.html)

    memoro eval pets=photos/pets rooms=rooms.zip -t pets.safetensors -t rooms.safetensors

    memoro eval photos/pets -t pets.safetensors --others rooms.zip
    """
    from memoro.evaluation.evaluate import evaluate, evaluate_others, name_sets, others_tables, together_table
    from memoro.evaluation.metrics import metrics_tables

    frozen, loaded = load_models(tasks, backbone, device)
    errors = plain_console(stderr=True, soft_wrap=True)
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "quiet": False, "log": errors.print}
    page = out or (Path("report.html") if report else None)
    if page is not None and page.suffix.lower() not in {".html", ".htm"}:
        raise DataError(f"--out {page} is for the HTML report: name it .html. For metrics as JSON, use --json.")
    reading = reading_options(label_column, image_column, allow_absolute, max_unreadable)
    relied: dict[str, dict[str, Any]] = {}
    if others:  # first: they may be mistyped
        judging: dict[str, Any] = {name: how[name] for name in ("batch_size", "workers", "log")}
        judging["false_alarms"] = false_alarms
        relied = evaluate_others(frozen, loaded, read_data(data), name_sets(others), **judging, **reading)
    results = evaluate(frozen, loaded, read_data(data), report=page, together=together, **how, **reading)
    if page is not None:
        errors.print(f"report: {page}")
    tables = [*metrics_tables(results), *(others_tables(relied) if relied else [])]
    tables += [together_table(results)] if together else []
    shown = {name: {**found, **({"trust": relied[name]} if name in relied else {})} for name, found in results.items()}
    if as_json:
        print_json(shown)
    else:
        for table in tables:
            plain_console().print(table)
