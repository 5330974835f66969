"""Commands about images: train, sweep, eval, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memoro.cli.options import BackboneOption, Json, load, numbers, plain, print_json

app = typer.Typer()


@app.command()
def train(
    data: Annotated[
        str, typer.Argument(help="Folder of class folders, zip, CSV/Parquet, hub id or known set.", show_default=False)
    ],
    backbone: BackboneOption,
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Name of the task.", show_default="the set's name")
    ] = None,
    regime: Annotated[str, typer.Option(help="memory (class token, memory and head) or head (linear).")] = "memory",
    cells: Annotated[int, typer.Option(help="Memory cells a layer.")] = 5,
    from_layer: Annotated[int, typer.Option(help="Layer at which the task forks off; later is cheaper.")] = 0,
    extends: Annotated[list[Path] | None, typer.Option(help="Files of tasks to build on; repeat for more.")] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels; resize and crop scale alike.", show_default="the backbone's")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Task file.", show_default="TASK.safetensors")] = None,
    folder: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/TASK")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's checkpoint.")] = False,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.1,
    epochs: Annotated[int, typer.Option(help="Times that every image is seen.")] = 15,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a batch.")] = 32,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    momentum: Annotated[float, typer.Option(help="Of sgd.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Decay of the weights.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient; 0 for none.")] = 1.0,
    memory_rate: Annotated[
        float | None, typer.Option(help="Memory's share of the rate.", show_default="0.03 with sgd, 1 with adamw")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up before the cosine.")] = 5,
    label_smoothing: Annotated[float, typer.Option(help="Share of the target spread over all classes.")] = 0.0,
    balance: Annotated[bool, typer.Option("--balance", help="Weight rare classes up.")] = False,
    crop: Annotated[str, typer.Option(help="inception (random part), pad (shifted) or none.")] = "inception",
    crop_scale: Annotated[float, typer.Option(help="Smallest share of the image that an inception crop takes.")] = 0.08,
    flip: Annotated[float, typer.Option(help="Probability of a mirror image.")] = 0.5,
    patience: Annotated[int, typer.Option(help="Stop after so many epochs without a better score; 0 for never.")] = 0,
    accumulate: Annotated[int, typer.Option(help="Batches to an optimiser step.")] = 1,
    precision: Annotated[str, typer.Option(help="no or bf16 (mixed).")] = "no",
    seed: Annotated[int, typer.Option(help="Of the initial weights.")] = 0,
    data_seed: Annotated[int, typer.Option(help="Of order, augmentation and validation split.")] = 0,
    val_fraction: Annotated[float, typer.Option(help="Held out where the data has no validation split.")] = 0.15,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images.", show_default="one a core")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read a hub set as a stream, storing nothing; needs --steps.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a task on a folder of images and write its file.

    Without a validation split one is held out; the best epoch by it is kept. Ctrl-C saves: --resume goes on.
    """
    from memoro.data import Augment
    from memoro.train.command import TrainOrder, run_train
    from memoro.train.recipe import Recipe

    recipe = Recipe(
        lr=lr, epochs=epochs, steps=steps, batch_size=batch_size, optimizer=optimizer, momentum=momentum,  # type: ignore[arg-type]
        weight_decay=weight_decay, clip=clip, memory_rate=memory_rate, warmup=warmup,
        label_smoothing=label_smoothing, balance=balance,
        augment=Augment(crop=crop, scale=(crop_scale, 1.0), flip=flip), patience=patience, accumulate=accumulate,  # type: ignore[arg-type]
        precision=precision, seed=seed, data_seed=data_seed, val_fraction=val_fraction,  # type: ignore[arg-type]
    )  # fmt: skip
    order = TrainOrder(
        data,
        task,
        regime,
        cells,
        from_layer,
        extends or [],
        image_size,
        out,
        folder,
        resume,
        workers,
        tensorboard,
        streaming,
    )
    errors = Console(stderr=True, soft_wrap=True)
    try:
        record, table = run_train(load(backbone), order, recipe, quiet=as_json, console=errors)
    except KeyboardInterrupt as stop:
        errors.print(f"{stop or 'stopped'}: the same command with --resume goes on from the last checkpoint.")
        raise typer.Exit(130) from None
    if as_json:
        print_json(record)
    else:
        Console().print(table)


@app.command()
def sweep(
    data: Annotated[str, typer.Argument(help="As for train.", show_default=False)],
    backbone: BackboneOption,
    task: Annotated[
        str | None, typer.Option("--task", "-t", help="Name of the task.", show_default="the set's name")
    ] = None,
    cells: Annotated[str, typer.Option(help="Cell counts to try, separated by commas.")] = "0,5",
    from_layer: Annotated[str, typer.Option(help="Forks to try.")] = "0",
    lr: Annotated[str, typer.Option(help="Learning rates to try.")] = "0.03,0.1,0.3",
    seeds: Annotated[int, typer.Option(help="Initial weights to try of each.")] = 1,
    epochs: Annotated[int, typer.Option(help="Times that every image is seen.")] = 15,
    batch_size: Annotated[int, typer.Option(help="Images to a batch.")] = 32,
    crop_scale: Annotated[float, typer.Option(help="Smallest share of the image that a crop takes.")] = 0.08,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels; resize and crop scale alike.", show_default="the backbone's")
    ] = None,
    extends: Annotated[list[Path] | None, typer.Option(help="Files of tasks to build on.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Task file.", show_default="TASK.safetensors")] = None,
    folder: Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/TASK")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's checkpoint.")] = False,
    data_seed: Annotated[int, typer.Option(help="Of order, augmentation and validation split.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes that decode.", show_default="one a core")] = None,
    as_json: Json = False,
) -> None:
    """Train every combination in one pass of the backbone and keep the best by validation score."""
    from memoro.data import Augment
    from memoro.train.command import TrainOrder, run_sweep_order
    from memoro.train.recipe import Recipe
    from memoro.train.sweep import Grid

    grid = Grid(tuple(numbers(cells)), tuple(numbers(from_layer)), tuple(numbers(lr, float)), seeds)
    recipe = Recipe(epochs=epochs, batch_size=batch_size, augment=Augment(scale=(crop_scale, 1.0)), data_seed=data_seed)
    order = TrainOrder(
        data, task, "memory", 0, 0, extends or [], image_size, out, folder, resume, workers, tensorboard=False
    )
    errors = Console(stderr=True, soft_wrap=True)
    record, table = run_sweep_order(load(backbone), order, grid, recipe, quiet=as_json, console=errors)
    if as_json:
        print_json(record)
    else:
        Console().print(table)
        Console().print(f"picture: {record['picture']}")


@app.command("eval")
def evaluate_tasks(
    data: Annotated[
        list[str], typer.Argument(help="One set for all tasks, or NAME=DATA for each.", show_default=False)
    ],
    backbone: BackboneOption,
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a batch.")] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images.", show_default="one a core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tasks on the test split of their data (or on all of it where there is none)."""
    from memoro.report import metrics_table
    from memoro.taskfile import load_tasks
    from memoro.train.command import read_data_arguments
    from memoro.train.evaluate import evaluate

    loaded = [task for file in tasks for task in load_tasks(file)]
    errors = Console(stderr=True, soft_wrap=True)
    results = evaluate(
        load(backbone), loaded, read_data_arguments(data, [task.name for task in loaded]),
        batch_size=batch_size, workers=workers, quiet=as_json,
        say=lambda text: errors.print(text, markup=False, highlight=False),
    )  # fmt: skip
    if as_json:
        print_json(results)
    else:
        Console().print(metrics_table(results))


@app.command()
def predict(
    images: Annotated[list[str], typer.Argument(help="Files, folders or globs.", show_default=False)],
    backbone: BackboneOption,
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    form: Annotated[str, typer.Option("--format", "-f", help="table, json, csv or parquet.")] = "table",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write to instead of stdout.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a pass.")] = 32,
    as_json: Json = False,
) -> None:
    """What all tasks say of images, in one pass."""
    from memoro.composition import compose
    from memoro.predictions import find_images, predict_files, predictions_table, write_predictions
    from memoro.progress import bar
    from memoro.taskfile import load_tasks

    form = "json" if as_json else form
    if form not in {"table", "json", "csv", "parquet"}:
        raise typer.BadParameter(f"{form!r} is none of table, json, csv, parquet")
    errors = Console(stderr=True, soft_wrap=True)
    model = compose(load(backbone), [task for file in tasks for task in load_tasks(file)])
    paths = find_images(images)
    if len(model.passes()) > 1:
        errors.print(f"{len(model.passes())} passes: the tasks were trained with different preprocessing.")
    with bar("predicting", len(paths)) as tick:
        answers, skipped = predict_files(model, paths, batch_size=batch_size, tick=tick)
    for reason in list(skipped.values())[:5]:
        errors.print(f"skipped {plain(reason)}", highlight=False)
    if skipped:
        errors.print(f"{len(skipped)} of {len(paths)} images could not be read.")
    if form == "table" and out is None:
        Console().print(predictions_table(answers))
    elif (text := write_predictions(answers, "csv" if form == "table" else form, out)) is not None:  # type: ignore[arg-type]
        typer.echo(text, nl=False)
    raise typer.Exit(0 if answers else 1)
