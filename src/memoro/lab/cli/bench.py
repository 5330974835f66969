"""The commands `memoro lab bench engine`, `gpu`, `export`, `train` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memoro.cli.options import BackboneOption, DeviceOption, Json, load, numbers, print_json, share_cores
from memoro.console import plain_console

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Batch = Annotated[int, typer.Option(min=1, help="Images per pass.")]
Tasks = Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")]
Forks = Annotated[str, typer.Option(help="Layers at which the tasks start, separated by commas.")]
Cells = Annotated[int, typer.Option(help="Memory cells of each task in each layer.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed runs of each candidate; the fastest is reported.")]


@bench.command("engine")
def bench_engine_command(
    patch: Annotated[list[int], typer.Option(help="Patch size of the ViT-B to measure; repeat for more.")] = [32, 16],  # noqa: B006
    batch: Batch = 8,
    tasks: Tasks = "1,10,50,100",
    forks: Forks = "0,8",
    cells: Cells = 5,
    rank: Annotated[int, typer.Option(help="Rank of each task's low-rank weights (regime side).")] = 0,
    rounds: Rounds = 5,
    precision: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(metavar="NAME")] = "float32",
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Compare one pass with many tasks to a plain pass, a dense attention mask and separate passes."""
    from memoro.backbones import load_backbone
    from memoro.backbones.load import own_device
    from memoro.lab.bench.engine import bench_engine
    from memoro.lab.bench.models import random_vit

    sizes: dict[str, Any] = {"counts": numbers(tasks), "forks": numbers(forks), "cells": cells, "rank": rank}
    results = {}
    for size in patch:
        backbone = load_backbone(random_vit(size), precision=precision, device=own_device(device))
        results[f"ViT-B/{size}"] = bench_engine(backbone, batch=batch, rounds=rounds, quiet=False, **sizes)
    setting = f"at 224, batch {batch}, {precision}, {cells} cells, rank {rank}: cost of one pass, in plain base passes"
    _show(results, {f"{name} {setting}": rows for name, rows in results.items()}, as_json)


@bench.command("gpu")
def bench_gpu_command(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="Backbone to measure; repeat for more.", show_default="all")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Precision; repeat for more.", show_default="float32 and bfloat16"),
    ] = None,
    tasks: Tasks = "1,100",
    batch: Batch = 32,
    rounds: Rounds = 7,
    images: Annotated[str, typer.Option(help="Numbers of images of a read-out; empty: none.")] = "2000,10000",
    classes: Annotated[str, typer.Option(help="Numbers of classes of a read-out.")] = "10,1000",
    features: Annotated[int, typer.Option(min=1, help="Width of the statistics; 9216 is that of a ViT-S.")] = 9216,
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Print the tables of docs/scale.md for this machine: images per second by backbone and precision, read-outs by
    number of images and classes. A GPU is used if there is one.

    memoro lab bench gpu --device cuda --batch 256
    """
    from memoro.backbones.load import own_device
    from memoro.backbones.precision import check_precision
    from memoro.lab.bench.gpu import CELLS, bench_passes, bench_solving
    from memoro.lab.bench.models import MODELS

    names, kinds = models or list(MODELS), [check_precision(kind) for kind in precision or ["float32", "bfloat16"]]
    _check_models(names)
    place = own_device(device)
    passes = bench_passes(names, kinds, place, counts=numbers(tasks), batch=batch, rounds=rounds)
    solved = bench_solving(numbers(images) if images else [], numbers(classes), features)
    titles = (
        f"Images per second (tasks: by their number, of {CELLS} cells)",
        "Read-outs from kept statistics, in seconds",
    )
    document = {"device": str(place), "passes": passes, "read-outs": solved}
    _show(document, dict(zip(titles, (passes, solved), strict=True)), as_json)


@bench.command("export")
def bench_export_command(
    backbone: BackboneOption = None,
    batch: Batch = 8,
    tasks: Tasks = "1,100",
    cells: Cells = 5,
    rounds: Rounds = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Start no further round after this many seconds.")] = 60,
    as_json: Json = False,
) -> None:
    """Compare an exported ONNX file in ONNX Runtime to the same tasks in torch, on the CPU.

    Exporting takes most of the time: half a minute of CPU time, more for 100 tasks.
    """
    from memoro.lab.bench.export import bench_export

    counts, frozen = numbers(tasks), load(backbone, "cpu")
    sizes: dict[str, int] = {"cells": cells, "batch": batch, "rounds": rounds}
    rows = bench_export(frozen, counts=counts, seconds=seconds, quiet=False, **sizes)
    _show(rows, {f"{frozen.name}, batch {batch}: images per second": rows}, as_json)


@bench.command("train")
def bench_train_command(
    model: Annotated[
        str, typer.Option(help="ViT-B/32, ViT-B/16, dinov2-small, or several separated by commas.")
    ] = "ViT-B/32",
    batch: Annotated[int, typer.Option(help="Images per step.")] = 16,
    cells: Cells = 5,
    runs: Annotated[str, typer.Option(help="Numbers of runs in one pass, separated by commas.")] = "1,8,32",
    forks: Forks = "0,8",
    rounds: Rounds = 5,
    memory: Annotated[bool, typer.Option(help="Also measure each method's peak memory in a separate process.")] = True,
    baselines: Annotated[bool, typer.Option(help="Also measure the baselines.")] = True,
    steps: Annotated[bool, typer.Option(help="Time single steps; without them, only --data is measured.")] = True,
    data: Annotated[
        str | None, typer.Option(help="Also train on this dataset and report the time to reach --goal.")
    ] = None,
    goal: Annotated[float, typer.Option(min=0, max=1, help="Test accuracy to reach, with --data.")] = 0.85,
    backbone: BackboneOption = None,
    image_size: Annotated[
        int | None, typer.Option(help="Image size in pixels, with --data.", show_default="the backbone's")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of epochs, with --data.")] = 6,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot the cost over the number of runs to this PNG, accuracy over time to *-goal.png."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a training step of every regime: one run, many runs and from cached features, in plain base passes.

    memoro lab bench train --no-steps --data photos.zip --goal 0.85 -b facebook/dinov2-small
    """
    from memoro.lab.bench.goal import bench_goal, draw_goal
    from memoro.lab.bench.train import bench_train, draw_growth, list_candidates

    names = model.split(",")
    _check_models(names)
    if not steps and data is None:
        raise typer.BadParameter("--no-steps leaves nothing to time: add --data")
    record: dict[str, Any] = {}
    tables = {}
    if steps:
        record["steps"] = {}
        for name in names:
            candidates = list_candidates(name, batch, cells, numbers(runs), numbers(forks), baselines=baselines)
            rows = record["steps"][name] = bench_train(candidates, rounds=rounds, memory=memory, quiet=False)
            tables[f"{name}, batch {batch}: one training step, in plain base passes"] = rows
        if plot is not None:
            draw_growth(plot, record["steps"])
    if data is not None:
        frozen = load(backbone)
        sizes: dict[str, Any] = {"cells": cells, "epochs": epochs, "batch": batch, "image_size": image_size}
        title = f"{Path(data).stem} on {frozen.name}: seconds of training to an accuracy of {goal:g}"
        reached = tables[title] = record["time_to_accuracy"] = bench_goal(frozen, data, goal, quiet=False, **sizes)
        if plot is not None:
            draw_goal(plot.with_name(f"{plot.stem}-goal.png"), goal, reached)
    _show(record, tables, as_json)


@bench.command("serve")
def bench_serve_command(
    model: Annotated[
        str, typer.Option(help="memoro-tiny, dinov2-small (random weights), a hub id or a folder; separated by commas.")
    ] = "dinov2-small,memoro-tiny",
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels.", show_default="112")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; each request asks all of them.")] = 100,
    batch: Batch = 16,
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent clients, one image per request.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Maximum number of requests.")] = 600,
    seconds: Annotated[
        float,
        typer.Option(
            min=1, help="Maximum seconds of requests; timing the engine and separate models takes half as long again."
        ),
    ] = 60,
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Compare throughput and latency over HTTP on loopback to the engine alone at the same batch size."""
    share_cores()
    from memoro.errors import need

    need("fastapi", "uvicorn", "python_multipart", "prometheus_client", extra="serve")
    from memoro.backbones import load_backbone
    from memoro.backbones.load import own_device
    from memoro.console import quiet_libraries
    from memoro.lab.bench.models import MODELS
    from memoro.lab.bench.serve import bench_serve

    quiet_libraries()
    rows = []
    for name in model.split(","):
        source, side = (MODELS[name][0](), MODELS[name][1]) if name in MODELS else (name, 112)
        backbone = load_backbone(source, device=own_device(device))
        how: dict[str, Any] = {"tasks": tasks, "batch": batch, "clients": clients, "requests": requests}
        rows.append(bench_serve(name, backbone, image_size or side, seconds=seconds, quiet=False, **how))
    _show(rows, {"Through HTTP on loopback: images per second, milliseconds": rows}, as_json, sideways=True)


def _check_models(names: Sequence[str]) -> None:
    from memoro.errors import MemoroError
    from memoro.lab.bench.models import MODELS

    if unknown := [name for name in names if name not in MODELS]:
        raise MemoroError(f"unknown model {unknown[0]!r}: choose {', '.join(MODELS)}.")


def _show(document: Any, tables: Mapping[str, Sequence[Any]], as_json: bool, *, sideways: bool = False) -> None:
    """Prints the document as JSON, or the tables that have rows, by title."""
    from memoro.lab.bench.models import rows_table

    if as_json:
        print_json(document)
    for title, rows in tables.items():
        if rows and not as_json:
            plain_console().print(rows_table(title, rows, sideways=sideways))
