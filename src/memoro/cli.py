"""The command line. It reads arguments, calls the library and prints; nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from memoro.errors import MemoroError

TEACH = """\
[bold]memoro[/] teaches one frozen Vision Transformer many tasks. A task is a small file; one pass answers them all,
and the backbone's own answer does not change by a bit.

  memoro demo                                            see it work, with what is installed
  memoro train photos/ --backbone FOLDER --task pets     a folder of class folders becomes pets.safetensors
  memoro eval photos/ --backbone FOLDER --tasks pets.safetensors
  memoro predict new/*.jpg --backbone FOLDER --tasks pets.safetensors --tasks flowers.safetensors
  memoro inspect pets.safetensors                        what is in a task file
  memoro compose pets.safetensors flowers.safetensors -o both.safetensors
                                                         put tasks into one file
  memoro verify --backbone FOLDER --tasks both.safetensors photo.jpg
                                                         prove that the backbone is untouched
  memoro import model.pt --backbone FOLDER -o tasks.safetensors
                                                         tasks of the paper's public reproduction
  memoro bench engine                                    what 1 to 100 tasks cost here

BACKBONE is a hub id or a folder. [bold]memoro COMMAND --help[/] tells more; most commands take [bold]--json[/]."""

app = typer.Typer(add_completion=False, no_args_is_help=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure on this machine. Ratios, in one process.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, everything else on stderr.")]
BackboneOption = Annotated[str, typer.Option("--backbone", "-b", help="Hub id or folder of a Vision Transformer.")]
Files = Annotated[list[Path], typer.Argument(help="Task files or bundles.", show_default=False)]


def main() -> None:
    """Runs the command line; an error of memoro's own becomes one line and exit code 1."""
    try:
        app()
    except MemoroError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/] {_plain(str(error))}", highlight=False)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Teach one frozen Vision Transformer many tasks."""
    if version:
        from memoro import __version__

        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        Console(soft_wrap=True).print(TEACH, highlight=False)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A task file or bundle.", show_default=False)],
    backbone: Annotated[str | None, typer.Option("--backbone", "-b", help="Also say whether it fits this one.")] = None,
    as_json: Json = False,
) -> None:
    """What is in a task file: labels, memory, parents, backbone, how it was trained and how good it is."""
    from memoro.report import inspect_table, inspect_tasks
    from memoro.taskfile import load_tasks

    tasks = load_tasks(file)
    record = inspect_tasks(file, tasks, None if backbone is None else _load(backbone))
    if as_json:
        _print_json(record)
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
    backbone: BackboneOption,
    tasks: Annotated[list[Path], typer.Option("--tasks", "-t", help="Task files or bundles; repeat for more.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Images to run on; random pixels without.")] = None,
    as_json: Json = False,
) -> None:
    """Run the original model beside the composition: base equal to the bit, tasks equal alone and composed.

    Exits with 1 where the base differs.
    """
    from memoro.composition import compose
    from memoro.receipt import sample_pixels
    from memoro.taskfile import load_tasks

    loaded = _load(backbone)
    model = compose(loaded, [task for file in tasks for task in load_tasks(file)])
    receipt = model.verify(sample_pixels(loaded, images or []))
    if as_json:
        _print_json(receipt.to_json())
    else:
        typer.echo(str(receipt))
    raise typer.Exit(0 if receipt.base_equal else 1)


@app.command("import")
def import_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(help="A state dict (.pt) of the public reproduction.", show_default=False)
    ],
    backbone: BackboneOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="The task file to write.", show_default=False)],
    names: Annotated[str | None, typer.Option(help="Names for its tasks, separated by commas.")] = None,
) -> None:
    """Read tasks out of a checkpoint of the paper's public reproduction."""
    from memoro.reproduction import import_tasks
    from memoro.taskfile import save_tasks

    tasks = import_tasks(_load(backbone), checkpoint, names=None if names is None else names.split(","))
    save_tasks(tasks, out)
    for task in tasks:
        over = ", ".join(parent.name for parent in task.extends)
        Console().print(f"{task.name}: {len(task.labels)} classes, {task.cells} cells{over and f', extends {over}'}")
    Console().print(f"written to {out}")


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
        weight_decay=weight_decay, clip=clip, warmup=warmup, label_smoothing=label_smoothing, balance=balance,
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
        record, table = run_train(_load(backbone), order, recipe, quiet=as_json, console=errors)
    except KeyboardInterrupt as stop:
        errors.print(f"{stop or 'stopped'}: the same command with --resume goes on from the last checkpoint.")
        raise typer.Exit(130) from None
    if as_json:
        _print_json(record)
    else:
        Console().print(table)


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
        _load(backbone), loaded, read_data_arguments(data, [task.name for task in loaded]),
        batch_size=batch_size, workers=workers, quiet=as_json,
        say=lambda text: errors.print(text, markup=False, highlight=False),
    )  # fmt: skip
    if as_json:
        _print_json(results)
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
    model = compose(_load(backbone), [task for file in tasks for task in load_tasks(file)])
    paths = find_images(images)
    if len(model.passes()) > 1:
        errors.print(f"{len(model.passes())} passes: the tasks were trained with different preprocessing.")
    with bar("predicting", len(paths)) as tick:
        answers, skipped = predict_files(model, paths, batch_size=batch_size, tick=tick)
    for reason in list(skipped.values())[:5]:
        errors.print(f"skipped {_plain(reason)}", highlight=False)
    if skipped:
        errors.print(f"{len(skipped)} of {len(paths)} images could not be read.")
    if form == "table" and out is None:
        Console().print(predictions_table(answers))
    elif (text := write_predictions(answers, "csv" if form == "table" else form, out)) is not None:  # type: ignore[arg-type]
        typer.echo(text, nl=False)
    raise typer.Exit(0 if answers else 1)


@app.command()
def demo() -> None:
    """Attach 1, 10 and 100 tasks to a ViT, prove its answer unchanged, and show what they cost."""
    from memoro.demo import run_demo

    run_demo(Console())


@bench.command("engine")
def bench_engine_command(
    patch: Annotated[list[int], typer.Option(help="Patch size of the ViT-B to measure; repeat for more.")] = [32, 16],  # noqa: B006
    batch: Annotated[int, typer.Option(help="Images in a pass.")] = 8,
    tasks: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "1,10,50,100",
    forks: Annotated[str, typer.Option(help="Layers at which the tasks start.")] = "0,8",
    rounds: Annotated[int, typer.Option(help="Runs of each candidate; the best counts.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Json = False,
) -> None:
    """One pass with many tasks against a plain pass, the dense-mask way and separate passes."""
    from memoro.bench.engine import bench_engine, candidate_count, load_bench_backbone
    from memoro.progress import bar
    from memoro.report import engine_table

    counts, starts = _numbers(tasks), _numbers(forks)
    results: dict[str, Any] = {}
    for size in patch:
        with bar(f"ViT-B/{size}", rounds * candidate_count(counts, starts)) as tick:
            rows = bench_engine(
                load_bench_backbone(size, dtype), counts=counts, forks=starts, batch=batch, rounds=rounds, tick=tick
            )
        results[f"ViT-B/{size}"] = [row.to_json() for row in rows]
        if not as_json:
            Console().print(engine_table(f"ViT-B/{size} at 224, batch {batch}, {dtype}", rows))
    if as_json:
        _print_json(results)


@bench.command("train")
def bench_train_command(
    patch: Annotated[int, typer.Option(help="Patch size of the ViT-B.")] = 32,
    batch: Annotated[int, typer.Option(help="Images to a step.")] = 16,
    cells: Annotated[int, typer.Option(help="Memory cells a layer.")] = 5,
    runs: Annotated[str, typer.Option(help="Runs in one pass, separated by commas.")] = "1,8,32",
    forks: Annotated[str, typer.Option(help="Layers at which the tasks start.")] = "0,8",
    rounds: Annotated[int, typer.Option(help="Steps of each way; the fastest counts.")] = 5,
    memory: Annotated[
        bool, typer.Option(help="Also take the peak memory of each way, in a process of its own.")
    ] = True,
    as_json: Json = False,
) -> None:
    """One training step of memoro's ways, of LoRA and of full fine-tuning, in plain base passes; and the loader."""
    from memoro.bench.train import bench_loader, bench_train, candidate_count
    from memoro.progress import bar
    from memoro.report import train_table

    counts, starts = _numbers(runs), _numbers(forks)
    with bar(f"ViT-B/{patch}", candidate_count(counts, starts, rounds, memory)) as tick:
        rows = bench_train(
            patch=patch, batch=batch, cells=cells, runs=counts, forks=starts, rounds=rounds, memory=memory, tick=tick
        )
    speeds = bench_loader()
    if as_json:
        _print_json({"steps": [row.to_json() for row in rows], "loader_images_per_second": speeds})
    else:
        Console().print(train_table(f"ViT-B/{patch} at 224, batch {batch}", rows))
        said = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        Console().print(f"loader, 500x375 JPEGs to 224 with augmentation, images per second: {said}")


def _load(backbone: str) -> Any:
    from memoro.backbones import load_backbone
    from memoro.progress import quiet_libraries

    quiet_libraries()
    return load_backbone(backbone)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,10,100") from None


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
