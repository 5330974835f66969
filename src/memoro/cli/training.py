"""Commands about images: train, sweep, eval, predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memoro.cli import trainoptions as o
from memoro.cli.options import BackboneOption, Json, TaskFiles, gather_models, gather_tasks, load, numbers, print_json
from memoro.console import plain_console
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.training.recipe import Recipe
    from memoro.training.train import TrainOrder

app = typer.Typer()


@app.command()
def train(
    data: o.Data,
    backbone: BackboneOption = None,
    task: o.TaskName = None,
    regime: o.RegimeName = "memory",
    cells: o.Cells = 5,
    from_layer: o.FromLayer = 0,
    extends: o.Extends = None,
    label_column: o.Columns = None,
    image_size: o.ImageSize = None,
    out: o.Out = None,
    folder: o.Folder = None,
    resume: o.Resume = False,
    lr: o.Rate = None,
    epochs: o.Epochs = 15,
    steps: o.Steps = None,
    batch_size: o.BatchSize = 32,
    optimizer: o.Optimizer = "sgd",
    momentum: o.Momentum = 0.9,
    weight_decay: o.WeightDecay = 0.0,
    clip: o.Clip = 1.0,
    memory_rate: o.MemoryRate = None,
    warmup: o.Warmup = 5,
    label_smoothing: o.LabelSmoothing = 0.0,
    balance: o.Balance = False,
    crop: o.CropKind = "inception",
    crop_scale: o.CropScale = 0.08,
    flip: o.Flip = 0.5,
    views: o.Views = 4,
    patience: o.Patience = 0,
    accumulate: o.Accumulate = 1,
    precision: o.Precision = "no",
    seed: o.Seed = 0,
    data_seed: o.DataSeed = 0,
    val_fraction: o.ValFraction = 0.15,
    folds: o.Folds = None,
    cache: o.UseCache = None,
    cache_folder: o.CacheFolder = None,
    cache_budget: o.CacheBudget = 20.0,
    cache_dtype: o.CacheDtype = "float16",
    workers: o.Workers = None,
    tensorboard: o.TensorBoard = False,
    streaming: o.Streaming = False,
    width: o.Width = 5,
    rank: o.Rank = 8,
    as_json: Json = False,
) -> None:
    """Train a task on a folder of images and write its file; or several tasks in one pass.

    Without --lr a few learning rates are tried, all in one pass, and the best
    by validation is kept. Without a validation split one is held out.
    Ctrl-C saves: --resume goes on.

    memoro train photos/pets -b facebook/dinov2-small

    memoro train pets=photos/pets rooms=rooms.zip --out tasks/

    Regimes that make a task, to compose with others:
    memory (class token, memory, head; the paper's) and head (linear).

    Regimes that make a baseline, to compare with, not to compose:
    memory-full (memory without the mask), class-full (class token without it),
    vpt (prompts), adapter, adapter+memory-full, propagated and
    propagated-additive (memory goes from layer to layer), lora,
    full (all weights).
    """
    from memoro.data import Augment
    from memoro.engine.featurestore import default_folder
    from memoro.training.cached import Cache
    from memoro.training.recipe import Recipe
    from memoro.training.train import TrainOrder, default_grid

    if streaming:
        _check_stream(data)
    recipe = Recipe(
        epochs=epochs, steps=steps, batch_size=batch_size, optimizer=optimizer, momentum=momentum,  # type: ignore[arg-type]
        weight_decay=weight_decay, clip=clip, memory_rate=memory_rate, warmup=warmup,
        label_smoothing=label_smoothing, balance=balance,
        augment=Augment(crop=crop, scale=(crop_scale, 1.0), flip=flip), views=views or None, patience=patience,  # type: ignore[arg-type]
        accumulate=accumulate, precision=precision, seed=seed, data_seed=data_seed, val_fraction=val_fraction,  # type: ignore[arg-type]
    )  # fmt: skip
    order = TrainOrder(
        data, task, regime, default_grid(cells, from_layer, lr, recipe, streaming), label_column or [], extends or [],
        image_size, folds, out=out, folder=folder, resume=resume, workers=workers, tensorboard=tensorboard,
        streaming=streaming, width=width, rank=rank, keep=cache,
        cache=Cache(cache_folder or default_folder(), cache_budget, cache_dtype),  # type: ignore[arg-type]
    )  # fmt: skip
    _run(order, recipe, backbone, as_json)


@app.command()
def sweep(
    data: o.Data,
    backbone: BackboneOption = None,
    task: o.TaskName = None,
    regime: o.RegimeName = "memory",
    cells: o.CellCounts = "0,5",
    from_layer: o.FromLayers = "0",
    lr: o.Rates = None,
    seeds: o.Seeds = 1,
    seed: o.Seed = 0,
    halving: o.Halving = False,
    extends: o.Extends = None,
    label_column: o.Columns = None,
    image_size: o.ImageSize = None,
    out: o.Out = None,
    folder: o.Folder = None,
    resume: o.Resume = False,
    epochs: o.Epochs = 15,
    steps: o.Steps = None,
    batch_size: o.BatchSize = 32,
    optimizer: o.Optimizer = "sgd",
    momentum: o.Momentum = 0.9,
    weight_decay: o.WeightDecay = 0.0,
    clip: o.Clip = 1.0,
    memory_rate: o.MemoryRate = None,
    warmup: o.Warmup = 5,
    label_smoothing: o.LabelSmoothing = 0.0,
    balance: o.Balance = False,
    crop: o.CropKind = "inception",
    crop_scale: o.CropScale = 0.08,
    flip: o.Flip = 0.5,
    views: o.Views = 4,
    patience: o.Patience = 0,
    accumulate: o.Accumulate = 1,
    precision: o.Precision = "no",
    data_seed: o.DataSeed = 0,
    val_fraction: o.ValFraction = 0.15,
    folds: o.Folds = None,
    cache: o.UseCache = None,
    cache_folder: o.CacheFolder = None,
    cache_budget: o.CacheBudget = 20.0,
    cache_dtype: o.CacheDtype = "float16",
    workers: o.Workers = None,
    tensorboard: o.TensorBoard = False,
    width: o.Width = 5,
    rank: o.Rank = 8,
    as_json: Json = False,
) -> None:
    """Train every combination in one pass of the backbone and keep the best by validation score.

    memoro sweep photos/pets --cells 0,5,10 --from-layer 0,8 --seeds 3

    Regimes are those of memoro train: memory and head make tasks, in one pass
    for all; the others make baselines, each in passes of its own.
    """
    from memoro.data import Augment
    from memoro.engine.featurestore import default_folder
    from memoro.training.cached import Cache
    from memoro.training.recipe import Recipe
    from memoro.training.sweep import RATES, Grid
    from memoro.training.train import TrainOrder

    recipe = Recipe(
        epochs=epochs, steps=steps, batch_size=batch_size, optimizer=optimizer, momentum=momentum,  # type: ignore[arg-type]
        weight_decay=weight_decay, clip=clip, memory_rate=memory_rate, warmup=warmup,
        label_smoothing=label_smoothing, balance=balance,
        augment=Augment(crop=crop, scale=(crop_scale, 1.0), flip=flip), views=views or None, patience=patience,  # type: ignore[arg-type]
        accumulate=accumulate, precision=precision, seed=seed, data_seed=data_seed, val_fraction=val_fraction,  # type: ignore[arg-type]
    )  # fmt: skip
    rates = RATES[recipe.optimizer] if lr is None else tuple(numbers(lr, float))
    grid = Grid(tuple(numbers(cells)), tuple(numbers(from_layer)), rates, seeds, seed)
    order = TrainOrder(
        data, task, regime, grid, label_column or [], extends or [], image_size, folds, out=out, folder=folder,
        resume=resume, workers=workers, tensorboard=tensorboard, halving=halving, must_sweep=True, width=width,
        rank=rank, keep=cache,
        cache=Cache(cache_folder or default_folder(), cache_budget, cache_dtype),  # type: ignore[arg-type]
    )  # fmt: skip
    _run(order, recipe, backbone, as_json)


def _check_stream(data: list[str]) -> None:
    for source in data:
        if Path(source).exists():
            raise DataError(
                f"{source} is here already: --streaming is for hub sets such as owner/name, with --steps 1000 or so. "
                "Leave it out."
            )


def _run(order: TrainOrder, recipe: Recipe, name: str | None, as_json: bool) -> None:
    from memoro.training.distributed import find_processes, own_device
    from memoro.training.train import run_order

    gather_tasks(order.extends, "--extends")  # what is wrong with them is told before anything else is read
    here = find_processes(own_device())
    errors = plain_console(stderr=True, soft_wrap=True, quiet=not here.main)
    backbone = load(name, hint=here.main, device=own_device())
    try:
        record, tables = run_order(backbone, order, recipe, quiet=as_json or not here.main, console=errors)
    except KeyboardInterrupt as stop:
        errors.print(f"{stop or 'stopped'}: the same command with --resume goes on from the last checkpoint.")
        raise typer.Exit(130) from None
    if as_json and here.main:
        print_json(record)
    for table in [] if as_json else tables:
        plain_console().print(table, soft_wrap=isinstance(table, str))
    if any("failed" in one for one in record.get("tasks", ())):
        raise typer.Exit(1)


@app.command("eval")
def evaluate_tasks(
    data: Annotated[
        list[str], typer.Argument(help="One set for all tasks, or NAME=DATA for each.", show_default=False)
    ],
    tasks: TaskFiles,
    backbone: BackboneOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a batch.")] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images.", show_default="one a core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tasks on the test split of their data (or on all of it where there is none).

    memoro eval photos/pets -t pets.safetensors

    memoro eval pets=photos/pets rooms=rooms.zip -t pets.safetensors -t rooms.safetensors
    """
    from memoro.evaluation.evaluate import evaluate
    from memoro.evaluation.metrics import metrics_table
    from memoro.training.train import read_data_arguments

    frozen = load(backbone)
    loaded = gather_models(tasks, frozen)
    errors = plain_console(stderr=True, soft_wrap=True)
    results = evaluate(
        frozen, loaded, read_data_arguments(data, [task.name for task in loaded]),
        batch_size=batch_size, workers=workers, quiet=as_json,
        log=errors.print,
    )  # fmt: skip
    if as_json:
        print_json(results)
    else:
        plain_console().print(metrics_table(results))


@app.command()
def predict(
    images: Annotated[list[str], typer.Argument(help="Files, folders or globs.", show_default=False)],
    tasks: TaskFiles,
    backbone: BackboneOption = None,
    form: Annotated[str, typer.Option("--format", "-f", help="table, json, csv or parquet.")] = "table",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write to instead of stdout.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a pass.")] = 32,
    as_json: Json = False,
) -> None:
    """What all tasks say of images, in one pass.

    memoro predict new/*.jpg -t pets.safetensors -t rooms.safetensors

    memoro predict new/ -t pets.safetensors --format csv --out answers.csv
    """
    from memoro.console import bar, format_count
    from memoro.engine.composition import compose
    from memoro.evaluation.predictions import find_images, predict_files, predictions_table, write_predictions
    from memoro.regimes import Baseline

    form = "json" if as_json else form
    if form not in {"table", "json", "csv", "parquet"}:
        raise typer.BadParameter(f"{form!r} is none of table, json, csv, parquet")
    errors = plain_console(stderr=True, soft_wrap=True)
    frozen = load(backbone)
    loaded = gather_models(tasks, frozen)
    apart = [model for model in loaded if isinstance(model, Baseline)]
    model = compose(frozen, [task for task in loaded if not isinstance(task, Baseline)])
    paths = find_images(images)
    if len(model.passes()) > 1:
        errors.print(f"{len(model.passes())} passes: the tasks were trained with different preprocessing.")
    if apart:
        errors.print(f"a pass each for {', '.join(one.name for one in apart)}: no tasks, but baselines.")
    with bar("predicting", len(paths)) as tick:
        answers, skipped = predict_files([model, *apart], paths, batch_size=batch_size, tick=tick)
    for reason in list(skipped.values())[:5]:
        errors.print(f"skipped {reason}")
    if skipped:
        errors.print(f"{len(skipped)} of {format_count(len(paths), 'image')} could not be read.")
    if form == "table" and out is None:
        if answers:
            plain_console().print(predictions_table(answers))
    elif (text := write_predictions(answers, "csv" if form == "table" else form, out)) is not None:  # type: ignore[arg-type]
        typer.echo(text, nl=False)
    raise typer.Exit(0 if answers else 1)
