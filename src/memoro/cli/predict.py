"""The command about new images: predict."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from memoro.cli.options import DeviceOption, Json, TaskBackboneOption, TaskFiles, load_models
from memoro.console import plain_console

app = typer.Typer()


@app.command()
def predict(
    images: Annotated[list[str], typer.Argument(help="Files, folders or globs.", show_default=False)],
    tasks: TaskFiles,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="table, json, jsonl (a line per image), csv or parquet.",
            show_default="by the suffix of --out, else table",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write to instead of stdout.", show_default=False)
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            min=1,
            help="Give this many labels with their probabilities.",
            show_default="the answer; all in JSON and for multi-label tasks",
        ),
    ] = None,
    unfamiliar: Annotated[
        str,
        typer.Option("--unfamiliar", help="Answers about images unlike a task's own: mark, drop or keep them."),
    ] = "mark",
    false_alarms: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of a task's own images that may be called unfamiliar."),
    ] = 0.01,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any image cannot be read.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    as_json: Json = False,
) -> None:
    """Predict with all tasks in one pass. Answers are written as they come.

    memoro predict new/*.jpg -t pets.safetensors -t rooms.safetensors

    memoro predict new/ -t pets.safetensors --out answers.csv --top 3

    Folders are searched for images, which are recognised by their suffix or
    their first bytes. An image that cannot be read has a row with the error.
    CSV and Parquet have a row for each image, task and label, and the columns
    image, task, label, probability, value (of a regression), low and high (of
    its 90 % interval), predicted, score, familiarity, unfamiliar, error.

    Probabilities are calibrated. familiarity is the share of the task's own
    images that look at least as strange as this one; score compares tasks:
    the highest is the most likely owner of the image.
    """
    from memoro.console import bar, format_count
    from memoro.engine.answers import Routing, stream_predictions
    from memoro.engine.composition import compose
    from memoro.evaluation.predictions import MAX_ROWS, Tally, predictions_table, write_predictions
    from memoro.files import part_of, write_gradually
    from memoro.images import find_images
    from memoro.regimes import Baseline

    form = _choose_form("json" if as_json else form, out)
    if unfamiliar not in {"mark", "drop", "keep"}:
        raise typer.BadParameter(f"--unfamiliar {unfamiliar!r} is not one of mark, drop, keep")
    routing = Routing(unfamiliar, false_alarms)  # type: ignore[arg-type]
    count = sum(1 for _ in find_images(images))
    frozen, models = load_models(tasks, backbone, device)
    errors = plain_console(stderr=True, soft_wrap=True)
    apart = [model for model in models if isinstance(model, Baseline)]
    model = compose(frozen, [task for task in models if not isinstance(task, Baseline)])
    if len(model.passes()) > 1:
        errors.print(f"{len(model.passes())} passes, because the tasks were trained with different preprocessing.")
    if apart:
        errors.print(f"{', '.join(one.name for one in apart)}: baselines, which need a separate pass each.")
    if without := [task.name for task in model.tasks.values() if task.spec.familiarity is None]:
        errors.print(
            f"{', '.join(without)}: the file has no familiarity, so no image is called unfamiliar. To add it: memoro "
            "calibrate TASK DATA"
        )
    passes = [*model.prediction_passes(), *(one for baseline in apart for one in baseline.prediction_passes())]
    names = [one.name for one in models]
    tally = Tally()
    try:
        with bar("predicting", count, quiet=not errors.is_terminal) as tick:
            how: dict[str, Any] = {"batch_size": batch_size, "top": top, "routing": routing}
            found = stream_predictions(find_images(images), passes, names, **how)
            rows = tally.count(found, tick)
            if form == "table":
                shown = list(islice(rows, MAX_ROWS))
                for _ in rows:
                    pass
            elif out is None:
                write_predictions(rows, form, sys.stdout.buffer, top)
            else:
                with write_gradually(out) as file:
                    write_predictions(rows, form, file, top)
    except KeyboardInterrupt:
        where = "" if out is None else f"; the answers so far are in {part_of(out)}"
        errors.print(f"stopped after {format_count(tally.images, 'image')}{where}.")
        raise typer.Exit(130) from None
    if form == "table":
        plain_console().print(predictions_table(shown, tally.images, top))
    elif out is not None:
        errors.print(f"{format_count(tally.images, 'image')} answered in {out}")
    if tally.first is not None:
        errors.print(
            f"{tally.unreadable} of {format_count(tally.images, 'image')} could not be read, such as "
            f"{tally.first.image}: {tally.first.error}"
        )
    raise typer.Exit(1 if tally.unreadable == tally.images or (strict and tally.unreadable) else 0)


def _choose_form(form: str | None, out: Path | None) -> str:
    """The format to write: as asked, or by the suffix of the file; to a terminal, a table."""
    suffixes = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
    form = form or ("table" if out is None else suffixes.get(out.suffix.lower(), "csv"))
    if form not in {"table", "json", "jsonl", "csv", "parquet"}:
        raise typer.BadParameter(f"{form!r} is not one of table, json, jsonl, csv, parquet")
    if form == "table" and out is not None:
        raise typer.BadParameter("a table is for the terminal: with --out, choose json, jsonl, csv or parquet")
    if form == "parquet" and out is None:
        raise typer.BadParameter("parquet is a binary format: name a file with --out predictions.parquet")
    if out is not None and out.is_dir():
        raise typer.BadParameter(f"{out} is a folder: name a file in it, such as {out / 'predictions.csv'}")
    return form
