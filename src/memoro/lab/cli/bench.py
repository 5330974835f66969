"""The commands `memoro lab bench engine`, `train`, `serve` and `export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memoro.cli.options import BackboneOption, DeviceOption, Json, load, numbers, print_json, share_cores
from memoro.console import plain_console

if TYPE_CHECKING:
    from memoro.backbones import Backbone
    from memoro.lab.bench.step import Candidate, Setting

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@bench.command("engine")
def bench_engine_command(
    patch: Annotated[list[int], typer.Option(help="Patch size of the ViT-B to measure; repeat for more.")] = [32, 16],  # noqa: B006
    batch: Annotated[int, typer.Option(help="Images per pass.")] = 8,
    tasks: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "1,10,50,100",
    forks: Annotated[str, typer.Option(help="Layers at which the tasks start, separated by commas.")] = "0,8",
    cells: Annotated[int, typer.Option(help="Memory cells of each task in each layer.")] = 5,
    rank: Annotated[int, typer.Option(help="Rank of each task's low-rank weights (regime side).")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate; the fastest is reported.")] = 5,
    precision: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(metavar="NAME")] = "float32",
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Compare one pass with many tasks to a plain pass, a dense attention mask and separate passes."""
    from memoro.backbones import load_backbone
    from memoro.backbones.load import own_device
    from memoro.console import bar
    from memoro.lab.bench.engine import bench_engine, candidate_count, engine_table
    from memoro.lab.bench.models import random_vit

    counts, starts = numbers(tasks), numbers(forks)
    results: dict[str, Any] = {}
    for size in patch:
        with bar(f"ViT-B/{size}", rounds * candidate_count(counts, starts, rank)) as tick:
            backbone = load_backbone(random_vit(size), precision=precision, device=own_device(device))
            sizes = {"cells": cells, "rank": rank, "batch": batch}
            rows = bench_engine(backbone, counts=counts, forks=starts, rounds=rounds, tick=tick, **sizes)
        results[f"ViT-B/{size}"] = [asdict(row) for row in rows]
        if not as_json:
            own = f"{cells} cells" + (f", rank {rank}" if rank else "")
            plain_console().print(engine_table(f"ViT-B/{size} at 224, batch {batch}, {precision}, {own}", rows))
    if as_json:
        print_json(results)


@bench.command("gpu")
def bench_gpu_command(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="Backbone to measure; repeat for more.", show_default="all")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Precision; repeat for more.", show_default="float32 and bfloat16"),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "1,100",
    batch: Annotated[int, typer.Option(min=1, help="Images per pass.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate; the fastest is reported.")] = 7,
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
    from memoro.console import bar
    from memoro.errors import MemoroError
    from memoro.lab.bench.gpu import bench_passes, bench_solving, pass_table, solve_table
    from memoro.lab.bench.models import MODELS

    names, kinds = models or list(MODELS), [check_precision(kind) for kind in precision or ["float32", "bfloat16"]]
    if unknown := [name for name in names if name not in MODELS]:
        raise MemoroError(f"unknown model {unknown[0]!r}: choose {', '.join(MODELS)}.")
    counts, sizes, labels = numbers(tasks), numbers(images) if images else [], numbers(classes)
    place = own_device(device)
    with bar("passes", len(names) * len(kinds) * rounds * (1 + len(counts))) as tick:
        how: dict[str, Any] = {"counts": counts, "batch": batch, "rounds": rounds, "tick": tick}
        passes = bench_passes(names, kinds, place, **how)
    with bar("read-outs", len(sizes) * len(labels)) as tick:
        solved = bench_solving(sizes, labels, features, tick)
    if as_json:
        print_json(
            {"device": str(place), "passes": [asdict(r) for r in passes], "read-outs": [asdict(r) for r in solved]}
        )
        return
    plain_console().print(pass_table(passes))
    if solved:
        plain_console().print(solve_table(solved))


@bench.command("export")
def bench_export_command(
    backbone: BackboneOption = None,
    batch: Annotated[int, typer.Option(help="Images per pass.")] = 8,
    tasks: Annotated[str, typer.Option(help="Numbers of tasks, separated by commas.")] = "1,100",
    cells: Annotated[int, typer.Option(help="Memory cells in each layer.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate; the fastest is reported.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="Start no further round after this many seconds.")] = 60,
    as_json: Json = False,
) -> None:
    """Compare an exported ONNX file in ONNX Runtime to the same tasks in torch, on the CPU.

    Exporting takes most of the time: half a minute of CPU time, more for 100 tasks.
    """
    from memoro.lab.bench.export import bench_export, export_table

    counts, frozen = numbers(tasks), load(backbone, "cpu")
    sizes: dict[str, int] = {"cells": cells, "batch": batch, "rounds": rounds}
    rows = bench_export(frozen, counts=counts, seconds=seconds, quiet=False, **sizes)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        plain_console().print(export_table(f"{frozen.name}, batch {batch}", rows))


@bench.command("train")
def bench_train_command(
    model: Annotated[
        str, typer.Option(help="ViT-B/32, ViT-B/16, dinov2-small, or several separated by commas.")
    ] = "ViT-B/32",
    batch: Annotated[int, typer.Option(help="Images per step.")] = 16,
    cells: Annotated[int, typer.Option(help="Memory cells in each layer.")] = 5,
    runs: Annotated[str, typer.Option(help="Numbers of runs in one pass, separated by commas.")] = "1,8,32",
    forks: Annotated[str, typer.Option(help="Layers at which the tasks start, separated by commas.")] = "0,8",
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps per method; the fastest is reported.")] = 5,
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
    from memoro.lab.bench.models import MODELS
    from memoro.lab.bench.step import Setting, list_candidates

    for name in model.split(","):
        if name not in MODELS:
            raise typer.BadParameter(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    if not steps and data is None:
        raise typer.BadParameter("--no-steps leaves nothing to time: add --data")
    record: dict[str, Any] = {}
    if steps:
        settings = [Setting(name, batch, cells) for name in model.split(",")]
        candidates = list_candidates(cells, numbers(runs), numbers(forks), baselines=baselines)
        record |= _time_steps(settings, candidates, rounds, memory, plot, as_json)
    if data is not None:
        how = {"cells": cells, "epochs": epochs, "batch": batch, "image_size": image_size}
        record |= _time_to_goal(data, goal, load(backbone), plot, as_json, **how)
    if as_json:
        print_json(record)


@bench.command("serve")
def bench_serve_command(
    model: Annotated[
        str, typer.Option(help="memoro-tiny, dinov2-small (random weights), a hub id or a folder; separated by commas.")
    ] = "dinov2-small,memoro-tiny",
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels.", show_default="112")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks; each request asks all of them.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Images per pass, for the engine and the server.")] = 16,
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
    from memoro.console import bar, quiet_libraries
    from memoro.lab.bench.models import MODELS
    from memoro.lab.bench.serve import TICKS, bench_serve, serve_table

    quiet_libraries()
    rows = []
    for name in model.split(","):
        source = MODELS[name][0]() if name in MODELS else name
        side = image_size or (MODELS[name][1] if name in MODELS else 112)
        with bar(name, TICKS) as tick:
            backbone = load_backbone(source, device=own_device(device))
            how: dict[str, Any] = {"tasks": tasks, "batch": batch, "clients": clients, "requests": requests}
            rows.append(bench_serve(name, backbone, side, seconds=seconds, tick=tick, **how))
    if as_json:
        print_json([{**asdict(row), "ratio": row.ratio} for row in rows])
    else:
        plain_console().print(serve_table(rows))


def _time_steps(
    settings: Sequence[Setting],
    candidates: Sequence[Candidate],
    rounds: int,
    memory: bool,
    plot: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    from memoro.console import bar
    from memoro.lab.bench.train import bench_loader, bench_train, draw_growth, tick_count, train_table

    results = {}
    for setting in settings:
        with bar(setting.model, tick_count(candidates, rounds)) as tick:
            rows = results[setting.model] = bench_train(setting, candidates, rounds=rounds, memory=memory, tick=tick)
        if not as_json:
            plain_console().print(train_table(f"{setting.model} at {setting.side}, batch {setting.batch}", rows))
    if plot is not None:
        draw_growth(plot, results)
    speeds = bench_loader()
    if not as_json:
        shown = ", ".join(f"{name}: {speed:.0f}" for name, speed in speeds.items())
        plain_console().print(f"loader, images per second (JPEG, 500 x 375 to 224): {shown}")
    steps = {name: [asdict(row) for row in rows] for name, rows in results.items()}
    return {"steps": steps, "loader_images_per_second": speeds}


def _time_to_goal(
    data: str, goal: float, backbone: Backbone, plot: Path | None, as_json: bool, **how: Any
) -> dict[str, Any]:
    from memoro.console import bar
    from memoro.lab.bench.time_to_accuracy import bench_time_to_accuracy, draw_times, epoch_count, time_table

    with bar("time to accuracy", epoch_count(how["epochs"])) as tick:
        found = bench_time_to_accuracy(backbone, data, goal, tick=tick, **how)
    title = f"{Path(data).stem} on {backbone.name}: seconds of training to an accuracy of {goal:g}"
    if not as_json:
        plain_console().print(time_table(title, found))
    if plot is not None:
        draw_times(plot.with_name(f"{plot.stem}-goal.png"), title, found)
    return {"time_to_accuracy": [one.to_json() for one in found]}
