"""The command `memoro lab reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memoro.cli.options import DeviceOption
from memoro.console import plain_console, quoted

TableName = Literal[
    "table2", "table4", "table5", "naive-concat", "masking", "extension", "fork", "models", "lr-stability", "all"
]


def reproduce(
    table: Annotated[TableName, typer.Argument(help="What to measure.", show_default=False)],
    scale: Annotated[
        Literal["cpu", "paper"],
        typer.Option(help="cpu: hours on two cores. paper: ViT-B/32, four large sets, 20,000 steps of 512 images."),
    ] = "cpu",
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            help="Dataset with train/ and test/ (folder or zip), or a folder of several; repeat for more.",
            show_default="paper: its four sets",
        ),
    ] = None,
    backbone: Annotated[
        list[str] | None,
        typer.Option("--backbone", "-b", help="Hub id or folder; repeat for more.", show_default="cpu: memoro-tiny"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of records and tables.", show_default="results/SCALE")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and what it needs; train nothing.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Only write the tables from recorded results.")] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this column of a table, such as full or 'memory 5'; repeat for more.", show_default="all"
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum training images per dataset.", show_default="cpu: 2000, paper: all"),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of masked regimes.", show_default="cpu: 10; paper: steps")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of regimes that change base tokens.", show_default="cpu: 150, paper: 20000"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs at the chosen rate.", show_default="3")] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            min=1, max=4, help="Folds (of 4) used to choose learning rates.", show_default="1 to 4, by dataset size"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per step.", show_default="cpu: 32, paper: 512")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Image size in pixels.", show_default="the backbone's; cpu: at most 112"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode images.", show_default="one per core")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Reproduce the paper's tables on your own datasets: accuracy, parameters, FLOPs, masks.

    memoro lab reproduce table2 --data rsscn7.zip --data pacs_sketch.zip

    Prints a time estimate first. Each job (some minutes) is recorded when it is done and has checkpoints: run the same
    command again to continue, or in a second terminal to share the work. Learning rates are chosen on held-out training
    images; the test split is used once.

    memoro lab reproduce table2 --data rsscn7.zip --method full --method "memory-full 5"

    torchrun --nproc-per-node 8 -m memoro lab reproduce all --scale paper
    """
    from memoro.console import quiet_libraries
    from memoro.lab.reproduce.plan import TABLES
    from memoro.lab.reproduce.run import dry_run as run_dry
    from memoro.lab.reproduce.run import run_tables, write_reports
    from memoro.lab.reproduce.runner import make_request

    quiet_libraries()
    console = plain_console(soft_wrap=True)
    if report:
        tables = tuple(TABLES) if table == "all" else (table,)
        write_reports(tables, scale, out or Path("results") / scale, console.print)
        return
    changes: dict[str, Any] = {"most": most, "epochs": epochs, "steps": steps, "seeds": seeds, "folds": folds}
    changes["batch_size"] = batch_size
    request, runner = make_request(
        table, scale, data or [], backbone or [], out,
        command=quoted("memoro", *map(_without_folder, sys.argv[1:])),
        image_size=image_size, workers=workers, device=device, methods=method or [],
        changes={name: value for name, value in changes.items() if value is not None},
    )  # fmt: skip

    def log(text: str) -> None:
        if runner.main:
            console.print(text)

    if dry_run:
        run_dry(request, runner, log)
        return
    try:
        run_tables(request, runner, log)
    except KeyboardInterrupt:
        log("stopped. Finished jobs are recorded, and this one has a checkpoint: the same command continues.")
        raise typer.Exit(130) from None


def _without_folder(word: str) -> str:
    """An absolute path, also in `--out=PATH`, would tell others where this user's files are."""
    option, equals, path = word.rpartition("=")
    return f"{option}{equals}{Path(path).name}" if Path(path).is_absolute() else word
