"""Commands about images: train, sweep, eval, predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from memoro.cli.options import BackboneOption, Json, load, numbers, plain, print_json

if TYPE_CHECKING:
    from memoro.train.command import TrainOrder
    from memoro.train.recipe import Recipe

app = typer.Typer()


Data = Annotated[
    list[str],
    typer.Argument(
        help="Folder of class folders, zip, CSV/Parquet, hub id or known set; NAME=DATA for each of several tasks.",
        show_default=False,
    ),
]
TaskName = Annotated[str | None, typer.Option("--task", "-t", help="Name of the task.", show_default="the set's name")]
Columns = Annotated[
    list[str] | None, typer.Option("--label-column", help="Column of a table; repeat for a task of each, in one pass.")
]
RegimeName = Annotated[
    str,
    typer.Option(
        help="memory (class token, memory, head; the paper's) or head (linear). To compare with, not to compose: "
        "memory-full (no mask), class-full (class token, no mask), vpt (prompts), adapter, adapter+memory-full, "
        "propagated and propagated-additive (memory goes from layer to layer), full (all weights), lora."
    ),
]
Width = Annotated[int, typer.Option(help="Bottleneck of adapters.")]
Rank = Annotated[int, typer.Option(help="Of LoRA's matrices.")]
Extends = Annotated[list[Path] | None, typer.Option(help="Files of tasks to build on; repeat for more.")]
ImageSize = Annotated[
    int | None, typer.Option(help="Pixels; resize and crop scale alike.", show_default="the backbone's")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Task file; a folder for several tasks.", show_default="TASK.safetensors"),
]
Folder = Annotated[Path | None, typer.Option(help="Run folder.", show_default="runs/TASK")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run folder's checkpoint.")]
Epochs = Annotated[int, typer.Option(help="Times that every image is seen.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images to a batch.")]
Optimizer = Annotated[str, typer.Option(help="sgd or adamw.")]
CropKind = Annotated[str, typer.Option(help="inception (random part), pad (shifted) or none.")]
CropScale = Annotated[float, typer.Option(help="Smallest share of the image that an inception crop takes.")]
Flip = Annotated[float, typer.Option(help="Probability of a mirror image.")]
Views = Annotated[
    int,
    typer.Option(min=0, help="Views of an image, in turn: the plain one, then random ones. 0: a new one every epoch."),
]
Patience = Annotated[int, typer.Option(help="Stop after so many epochs without a better score; 0 for never.")]
DataSeed = Annotated[int, typer.Option(help="Of order, augmentation and validation split.")]
ValFraction = Annotated[float, typer.Option(help="Held out where the data has no validation split.")]
Folds = Annotated[
    int | None,
    typer.Option(help="Compare runs on so many folds; 0: on a validation split.", show_default="4 for small sets"),
]
Workers = Annotated[int | None, typer.Option(help="Processes that decode images.", show_default="one a core")]
UseCache = Annotated[
    bool | None,
    typer.Option("--cache/--no-cache", help="Keep base passes on disk.", show_default="where they fit, on a CPU"),
]
CacheFolder = Annotated[Path | None, typer.Option(help="Where.", show_default="~/.cache/memoro/features")]
CacheBudget = Annotated[float, typer.Option(help="Gigabytes that all kept passes may take.")]
CacheDtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.")]


@app.command()
def train(
    data: Data,
    backbone: BackboneOption = None,
    task: TaskName = None,
    regime: RegimeName = "memory",
    cells: Annotated[int, typer.Option(help="Memory cells a layer.")] = 5,
    width: Width = 5,
    rank: Rank = 8,
    from_layer: Annotated[int, typer.Option(help="Layer at which the task forks off; later is cheaper.")] = 0,
    extends: Extends = None,
    label_column: Columns = None,
    image_size: ImageSize = None,
    out: Out = None,
    folder: Folder = None,
    resume: Resume = False,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="the best of three, in one pass")
    ] = None,
    epochs: Epochs = 15,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: BatchSize = 32,
    optimizer: Optimizer = "sgd",
    momentum: Annotated[float, typer.Option(help="Of sgd.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="Decay of the weights.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient; 0 for none.")] = 1.0,
    memory_rate: Annotated[
        float | None, typer.Option(help="Memory's share of the rate.", show_default="0.03 with sgd, 1 with adamw")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up before the cosine.")] = 5,
    label_smoothing: Annotated[float, typer.Option(help="Share of the target spread over all classes.")] = 0.0,
    balance: Annotated[bool, typer.Option("--balance", help="Weight rare classes up.")] = False,
    crop: CropKind = "inception",
    crop_scale: CropScale = 0.08,
    flip: Flip = 0.5,
    views: Views = 4,
    patience: Patience = 0,
    accumulate: Annotated[int, typer.Option(help="Batches to an optimiser step.")] = 1,
    precision: Annotated[str, typer.Option(help="no or bf16 (mixed).")] = "no",
    seed: Annotated[int, typer.Option(help="Of the initial weights.")] = 0,
    data_seed: DataSeed = 0,
    val_fraction: ValFraction = 0.15,
    folds: Folds = None,
    cache: UseCache = None,
    cache_folder: CacheFolder = None,
    cache_budget: CacheBudget = 20.0,
    cache_dtype: CacheDtype = "float16",
    workers: Workers = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read a hub set as a stream, storing nothing; needs --steps.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a task on a folder of images and write its file; or several tasks in one pass.

    Without --lr a few learning rates are tried, all in one pass, and the best by validation is kept. Without a
    validation split one is held out. Ctrl-C saves: --resume goes on.

    memoro train photos/pets -b facebook/dinov2-small

    memoro train pets=photos/pets rooms=rooms.zip -b facebook/dinov2-small --out tasks/
    """
    from memoro.data import Augment
    from memoro.featurestore import default_folder
    from memoro.train.cached import Cache
    from memoro.train.command import TrainOrder, default_grid
    from memoro.train.recipe import Recipe

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
    data: Data,
    backbone: BackboneOption = None,
    task: TaskName = None,
    regime: RegimeName = "memory",
    cells: Annotated[str, typer.Option(help="Cell counts to try, separated by commas.")] = "0,5",
    width: Width = 5,
    rank: Rank = 8,
    from_layer: Annotated[str, typer.Option(help="Forks to try.")] = "0",
    lr: Annotated[str, typer.Option(help="Learning rates to try.")] = "0.03,0.1,0.3",
    seeds: Annotated[int, typer.Option(help="Initial weights to try of each.")] = 1,
    halving: Annotated[
        bool, typer.Option("--halving", help="After every quarter of the epochs, stop the worse half of the runs.")
    ] = False,
    extends: Extends = None,
    label_column: Columns = None,
    image_size: ImageSize = None,
    out: Out = None,
    folder: Folder = None,
    resume: Resume = False,
    epochs: Epochs = 15,
    batch_size: BatchSize = 32,
    optimizer: Optimizer = "sgd",
    crop: CropKind = "inception",
    crop_scale: CropScale = 0.08,
    flip: Flip = 0.5,
    views: Views = 4,
    patience: Patience = 0,
    data_seed: DataSeed = 0,
    val_fraction: ValFraction = 0.15,
    folds: Folds = None,
    cache: UseCache = None,
    cache_folder: CacheFolder = None,
    cache_budget: CacheBudget = 20.0,
    cache_dtype: CacheDtype = "float16",
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Train every combination in one pass of the backbone and keep the best by validation score.

    memoro sweep photos/pets -b facebook/dinov2-small --cells 0,5,10 --from-layer 0,8 --lr 0.03,0.1,0.3 --seeds 3
    """
    from memoro.data import Augment
    from memoro.featurestore import default_folder
    from memoro.train.cached import Cache
    from memoro.train.command import TrainOrder
    from memoro.train.recipe import Recipe
    from memoro.train.sweep import Grid

    grid = Grid(tuple(numbers(cells)), tuple(numbers(from_layer)), tuple(numbers(lr, float)), seeds)
    recipe = Recipe(
        epochs=epochs, batch_size=batch_size, optimizer=optimizer,  # type: ignore[arg-type]
        augment=Augment(crop=crop, scale=(crop_scale, 1.0), flip=flip), views=views or None, patience=patience,  # type: ignore[arg-type]
        data_seed=data_seed, val_fraction=val_fraction,
    )  # fmt: skip
    order = TrainOrder(
        data, task, regime, grid, label_column or [], extends or [], image_size, folds, out=out, folder=folder,
        resume=resume, workers=workers, halving=halving, must_sweep=True, width=width, rank=rank, keep=cache,
        cache=Cache(cache_folder or default_folder(), cache_budget, cache_dtype),  # type: ignore[arg-type]
    )  # fmt: skip
    _run(order, recipe, backbone, as_json)


def _run(order: TrainOrder, recipe: Recipe, name: str | None, as_json: bool) -> None:
    from memoro.train.command import run_order
    from memoro.train.processes import find_processes, own_device

    here = find_processes(own_device())
    errors = Console(stderr=True, soft_wrap=True, quiet=not here.main)
    backbone = load(name, hint=here.main, device=own_device())
    try:
        record, tables = run_order(backbone, order, recipe, quiet=as_json or not here.main, console=errors)
    except KeyboardInterrupt as stop:
        errors.print(f"{stop or 'stopped'}: the same command with --resume goes on from the last checkpoint.")
        raise typer.Exit(130) from None
    if as_json and here.main:
        print_json(record)
        return
    for table in tables:
        Console().print(table)


@app.command("eval")
def evaluate_tasks(
    data: Annotated[
        list[str], typer.Argument(help="One set for all tasks, or NAME=DATA for each.", show_default=False)
    ],
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    backbone: BackboneOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a batch.")] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images.", show_default="one a core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tasks on the test split of their data (or on all of it where there is none)."""
    from memoro.regimes.baselinefile import load_models
    from memoro.report import metrics_table
    from memoro.train.command import read_data_arguments
    from memoro.train.evaluate import evaluate

    frozen = load(backbone)
    loaded = load_models(tasks, frozen)
    errors = Console(stderr=True, soft_wrap=True)
    results = evaluate(
        frozen, loaded, read_data_arguments(data, [task.name for task in loaded]),
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
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    backbone: BackboneOption = None,
    form: Annotated[str, typer.Option("--format", "-f", help="table, json, csv or parquet.")] = "table",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write to instead of stdout.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images to a pass.")] = 32,
    as_json: Json = False,
) -> None:
    """What all tasks say of images, in one pass."""
    from memoro.composition import compose
    from memoro.predictions import find_images, predict_files, predictions_table, write_predictions
    from memoro.progress import bar
    from memoro.regimes import Baseline
    from memoro.regimes.baselinefile import load_models

    form = "json" if as_json else form
    if form not in {"table", "json", "csv", "parquet"}:
        raise typer.BadParameter(f"{form!r} is none of table, json, csv, parquet")
    errors = Console(stderr=True, soft_wrap=True)
    frozen = load(backbone)
    loaded = load_models(tasks, frozen)
    apart = [model for model in loaded if isinstance(model, Baseline)]
    model = compose(frozen, [task for task in loaded if not isinstance(task, Baseline)])
    paths = find_images(images)
    if len(model.passes()) > 1:
        errors.print(f"{len(model.passes())} passes: the tasks were trained with different preprocessing.")
    if apart:
        errors.print(f"a pass each for {', '.join(plain(one.name) for one in apart)}: no tasks, but baselines.")
    with bar("predicting", len(paths)) as tick:
        answers, skipped = predict_files([model, *apart], paths, batch_size=batch_size, tick=tick)
    for reason in list(skipped.values())[:5]:
        errors.print(f"skipped {plain(reason)}", highlight=False)
    if skipped:
        errors.print(f"{len(skipped)} of {len(paths)} images could not be read.")
    if form == "table" and out is None:
        Console().print(predictions_table(answers))
    elif (text := write_predictions(answers, "csv" if form == "table" else form, out)) is not None:  # type: ignore[arg-type]
        typer.echo(text, nl=False)
    raise typer.Exit(0 if answers else 1)
