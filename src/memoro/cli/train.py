"""The command that trains tasks: train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from memoro.backbones.load import own_device
from memoro.backbones.precision import PRECISION_HELP
from memoro.cli.options import (
    BackboneOption,
    DeviceOption,
    Json,
    allow_tf32,
    gather_tasks,
    name_backbone,
    numbers,
    print_json,
    read_data,
)
from memoro.cli.settings import Settings, add_flags, read_settings, shell_log
from memoro.clock import Phases
from memoro.console import plain_console
from memoro.data import Augment, DataOptions
from memoro.data.open import check_place
from memoro.processes import printing_once
from memoro.training.cached import Cache
from memoro.training.recipe import Recipe, TrainOptions
from memoro.training.result import TrainResult
from memoro.training.train import train as train_tasks

app = typer.Typer()

TASK, RUNS, OUTPUT = "Data and task", "Training", "Output"


@app.command()
@add_flags(
    "train",
    kind={"rich_help_panel": TASK, "metavar": "KIND"},
    label_column={
        "rich_help_panel": TASK,
        "type": list[str] | None,
        "help": "Label column of a table; repeat to train a task for each in the same pass.",
    },
    image_size={"rich_help_panel": TASK},
    lr={
        "rich_help_panel": RUNS,
        "type": str | None,
        "default": None,
        "show_default": "0.001 with joint and side; others try three",
    },
    epochs={"rich_help_panel": RUNS},
    seed={"rich_help_panel": RUNS},
    precision={"rich_help_panel": RUNS, "metavar": "NAME", "help": PRECISION_HELP},
    folder={"rich_help_panel": OUTPUT},
    resume={"rich_help_panel": OUTPUT},
    track={"rich_help_panel": OUTPUT},
)
def train(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Argument(
            help="Folder of class folders, zip, table (.csv, .jsonl, .parquet), hub id or known dataset; NAME=DATA for "
            "each of several tasks.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", "-t", help="Name of the task.", show_default="the dataset's name", rich_help_panel=TASK),
    ] = None,
    backbone: BackboneOption = None,
    regime: Annotated[
        str | None,
        typer.Option(
            help="What is trained: joint, readout, side, memory or head.",
            show_default="joint; memory with --recipe paper",
            rich_help_panel=TASK,
        ),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(help="Memory cells in each layer.", show_default="0; 5 with memory", rich_help_panel=TASK),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(help="Rank of the task's low-rank weights.", show_default="4", rich_help_panel=TASK),
    ] = None,
    from_layer: Annotated[
        str | None,
        typer.Option(
            help="Layer at which the task forks from the backbone; later is cheaper.",
            show_default="two thirds of the depth; 0 with memory",
            rich_help_panel=TASK,
        ),
    ] = None,
    extends: Annotated[
        list[str] | None,
        typer.Option(help="Task file or hub id to build on; repeat for more.", rich_help_panel=TASK),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            help="Task file or hub id to start from; labels may be added or removed.",
            rich_help_panel=TASK,
        ),
    ] = None,
    recipe: Annotated[
        Literal["default", "paper"] | None,
        typer.Option(
            metavar="NAME",
            help="default (AdamW, plain images) or paper (SGD, random views).",
            show_default="paper with regimes head and memory",
            rich_help_panel=RUNS,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds to try for each combination.", rich_help_panel=RUNS)] = 1,
    settings: Settings = None,
    device: DeviceOption = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="Task file to write, or a folder (tasks/) for several.",
            show_default="TASK.safetensors",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """memoro train photos/pets -b facebook/dinov2-small
    memoro train houses.csv --label-column price --kind number
    memoro train photos/pets --start-from pets.safetensors
    memoro train pets=photos/pets rooms=rooms.zip --out tasks/
    memoro train photos/pets --rank 4,8 --lr 0.001,0.003 --seeds 3 --set views=4

    Train a task on a folder of images and write its file; or several tasks in one pass.

    Regimes: joint (weighted mean of side and readout; default), readout (a linear layer on statistics of the upper
    layers, solved in seconds), side (class token, low-rank weights for the task's token, head), memory (class token,
    memory, head; the paper's) and head (linear).

    Several values of --cells, --rank, --from-layer or --lr are tried in one pass; the best by validation score is kept.
    Without a validation split, small sets use folds; of larger ones, a part is held out. Ctrl-C saves a checkpoint;
    --resume continues from it.

    Images are augmented with --set views=4. If left and right matter or images show text, add --set flip=0.
    """
    found = read_settings("train", settings)
    cache = found[TrainOptions].pop("cache", None)
    if cache is not False:
        cache = Cache(**{"required": bool(cache), **found[Cache]})
    sizes = {"cells": cells, "rank": rank, "from_layer": from_layer}
    changes = {**flags, **found[Recipe], **found[TrainOptions], **found[DataOptions]}
    changes |= {name: numbers(text) for name, text in sizes.items() if text is not None}
    changes |= {"lr": numbers(flags["lr"], float) if flags["lr"] else None, "folder": flags["folder"] or "runs/{task}"}
    if found[Augment]:
        changes["augment"] = Augment(**found[Augment])
    allow_tf32(own_device(device), flags["precision"])
    sets = read_data(data)
    for source in (sets.values() if isinstance(sets, dict) else [sets]) if backbone is None else ():
        check_place(source)  # before the hint about backbones
    with printing_once(own_device(device)) as main:
        errors = plain_console(stderr=True, soft_wrap=True)
        try:
            results = train_tasks(
                sets,
                backbone=name_backbone(backbone, hint=True),
                device=device,
                task=task,
                regime=regime,
                seeds=seeds,
                extends=gather_tasks(extends or [], "--extends"),
                start_from=start_from,
                out=out or "",
                recipe=recipe,
                cache=cache,
                log=shell_log(errors, context),
                phases=context.obj or Phases(),
                **changes,
            )
        except KeyboardInterrupt as stop:
            errors.print(
                f"{stop or 'stopped'}. Run the same command with --resume to continue from the last checkpoint."
            )
            raise typer.Exit(130) from None
        trained = list(results.values()) if isinstance(results, dict) else [results]
        if main:
            _print_results(trained, as_json)
    if not all(result.metrics for result in trained):
        raise typer.Exit(1)


def _print_results(results: Sequence[TrainResult], as_json: bool) -> None:
    if as_json:
        records = [result.to_json() for result in results]
        print_json(records[0] if len(records) == 1 else {"tasks": records, "folder": str(results[0].folder)})
        return
    for table in [table for result in results for table in result.tables()]:
        plain_console().print(table, soft_wrap=isinstance(table, str))
