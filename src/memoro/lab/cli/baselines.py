"""Commands about baselines: train-baseline, eval-baseline, predict-baseline, inspect-baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import BackboneOption, DeviceOption, Json, TaskBackboneOption, load, name_backbone, print_json
from memoro.console import make_table, plain_console

baselines = typer.Typer()

File = Annotated[Path, typer.Argument(help="File of a baseline.", show_default=False)]
Workers = Annotated[int | None, typer.Option(help="Processes that decode images.", show_default="one per core")]


@baselines.command("train-baseline")
def train_command(
    method: Annotated[str, typer.Argument(help="What to train; see above.", show_default=False)],
    data: Annotated[str, typer.Argument(help="Dataset, as in memoro train.", show_default=False)],
    backbone: BackboneOption = None,
    device: DeviceOption = None,
    task: Annotated[str | None, typer.Option("--task", "-t", help="Name.", show_default="the dataset's")] = None,
    cells: Annotated[int | None, typer.Option(help="Memory cells, where the method has some.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of lora and lora-all.")] = None,
    width: Annotated[int, typer.Option(help="Bottleneck of adapters.")] = 5,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Less memory and more time, for lora, lora-all and full.")
    ] = False,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; repeat to try several.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 15,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    image_size: Annotated[int | None, typer.Option(min=1, help="Input size in pixels.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    workers: Workers = None,
    folder: Annotated[
        Path | None, typer.Option(help="Run folder: metrics, plots, checkpoint, report.", show_default="runs/TASK")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in the run folder.")] = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="File to write.", show_default="TASK")] = None,
    as_json: Json = False,
) -> None:
    """Train a model that changes the backbone's own tokens, to compare tasks with. Each has a pass of its own.

    memoro lab train-baseline lora photos/pets -b facebook/dinov2-small

    Methods: memory-full (memory without the mask), class-full (class token
    without it), vpt (prompts), adapter, adapter+memory-full, propagated and
    propagated-additive (memory is passed from layer to layer), lora (on
    queries and values), lora-all (on all matrices), full (all weights).
    """
    from memoro.lab import train_baseline

    errors = plain_console(stderr=True, soft_wrap=True)
    result = train_baseline(
        data, method, backbone=name_backbone(backbone), device=device, task=task, cells=cells, rank=rank, width=width,
        checkpointing=checkpointing,
        lr=lr, epochs=epochs, batch_size=batch_size, image_size=image_size, seed=seed, workers=workers, resume=resume,
        folder=folder or "runs/{task}", out=out or Path(), quiet=False, log=errors.print,
    )  # fmt: skip
    if as_json:
        print_json(result.to_json())
    for table in () if as_json else result.tables():
        plain_console().print(table, soft_wrap=isinstance(table, str))
    if not result.metrics:
        raise typer.Exit(1)


@baselines.command("eval-baseline")
def evaluate_command(
    file: File,
    data: Annotated[str, typer.Argument(help="Dataset, as in memoro eval.", show_default=False)],
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Evaluate a baseline on the test split of its data, or on all of it if there is none.

    memoro lab eval-baseline lora.safetensors photos/pets
    """
    from memoro.evaluation.metrics import metrics_tables
    from memoro.lab import evaluate_baseline

    model = _load(file, backbone, device)
    found = {model.name: evaluate_baseline(model, data, batch_size=batch_size, workers=workers, quiet=False)}
    if as_json:
        print_json(found)
    for table in () if as_json else metrics_tables(found):
        plain_console().print(table)


@baselines.command("predict-baseline")
def predict_command(
    file: File,
    images: Annotated[list[Path], typer.Argument(help="Image files.", show_default=False)],
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
) -> None:
    """Print what a baseline answers for each image, as JSON.

    memoro lab predict-baseline lora.safetensors photos/new/*.jpg
    """
    model = _load(file, backbone, device)
    print_json({str(image): found[model.name] for image, found in zip(images, model.predict(images), strict=True)})


@baselines.command("inspect-baseline")
def inspect_command(
    file: File,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="Also check if it fits this backbone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the file of a baseline records.

    memoro lab inspect-baseline lora.safetensors
    """
    from memoro.evaluation.inspect import describe_model
    from memoro.lab.baselines.file import read_baseline
    from memoro.tasks.record import describe_fact

    spec, content, parameters = read_baseline(file)
    own = {"regime": spec.regime, "sizes": dict(spec.sizes), "parameters": parameters, "content": content}
    record = describe_model(spec, own, None if backbone is None else load(backbone, "cpu"))
    if as_json:
        print_json(record)
    else:
        rows = [[name, describe_fact(value)] for name, value in record.items()]
        plain_console().print(make_table(["", spec.name], rows, str(file), left=2))


def _load(file: Path, backbone: str | None, device: str | None) -> Any:
    from memoro.lab import load_baseline
    from memoro.lab.baselines.file import read_baseline

    return load_baseline(file, load(backbone, device, read_baseline(file)[0].backbone))
