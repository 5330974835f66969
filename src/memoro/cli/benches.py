"""Commands that measure: bench engine, bench train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from memoro.cli.options import Json, numbers, print_json

bench = typer.Typer(help="Measure on this machine. Ratios, in one process.", no_args_is_help=True)


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

    counts, starts = numbers(tasks), numbers(forks)
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
        print_json(results)


@bench.command("train")
def bench_train_command(
    model: Annotated[
        str, typer.Option(help="ViT-B/32, ViT-B/16, dinov2-small, or several separated by commas.")
    ] = "ViT-B/32",
    batch: Annotated[int, typer.Option(help="Images to a step.")] = 16,
    cells: Annotated[int, typer.Option(help="Memory cells a layer.")] = 5,
    runs: Annotated[str, typer.Option(help="Runs in one pass, separated by commas.")] = "1,8,32",
    forks: Annotated[str, typer.Option(help="Layers at which the tasks start.")] = "0,8",
    rounds: Annotated[int, typer.Option(help="Steps of each way; the fastest counts.")] = 5,
    memory: Annotated[
        bool, typer.Option(help="Also take the peak memory of each way, in a process of its own.")
    ] = True,
    baselines: Annotated[bool, typer.Option(help="Also the regimes that change the backbone's tokens.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the cost over the number of runs into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """One training step of every regime, alone, in many runs and from kept features, in plain base passes."""
    from memoro.bench.steps import MODELS, Setting, list_ways
    from memoro.bench.train import bench_loader, bench_train, draw_growth, tick_count
    from memoro.progress import bar
    from memoro.report import train_table

    results: dict[str, Any] = {}
    ways = list_ways(cells, numbers(runs), numbers(forks), baselines=baselines)
    for name in model.split(","):
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(MODELS)}")
        with bar(name, tick_count(ways, rounds)) as tick:
            results[name] = bench_train(Setting(name, batch, cells), ways, rounds=rounds, memory=memory, tick=tick)
        if not as_json:
            Console().print(train_table(f"{name} at {MODELS[name][1]}, batch {batch}", results[name]))
    if plot is not None:
        draw_growth(plot, results)
    speeds = bench_loader()
    if as_json:
        steps = {name: [row.to_json() for row in rows] for name, rows in results.items()}
        print_json({"steps": steps, "loader_images_per_second": speeds})
    else:
        shown = ", ".join(f"{name}: {speed:.0f}" for name, speed in speeds.items())
        Console().print(f"loader, images per second (JPEG, 500 x 375 to 224): {shown}", highlight=False)
