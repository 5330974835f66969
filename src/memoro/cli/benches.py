"""Commands that measure: bench engine, bench train."""

from __future__ import annotations

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

    counts, starts = numbers(runs), numbers(forks)
    with bar(f"ViT-B/{patch}", candidate_count(counts, starts, rounds, memory)) as tick:
        rows = bench_train(
            patch=patch, batch=batch, cells=cells, runs=counts, forks=starts, rounds=rounds, memory=memory, tick=tick
        )
    speeds = bench_loader()
    if as_json:
        print_json({"steps": [row.to_json() for row in rows], "loader_images_per_second": speeds})
    else:
        Console().print(train_table(f"ViT-B/{patch} at 224, batch {batch}", rows))
        said = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        Console().print(f"loader, 500x375 JPEGs to 224 with augmentation, images per second: {said}")
