"""Commands about new images: predict, explain."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memoro.cli.options import (
    DeviceOption,
    Json,
    PrecisionOption,
    TaskBackboneOption,
    TaskFiles,
    load_models,
    print_json,
    share_cores,
)
from memoro.cli.settings import Settings, read_settings, shell_log
from memoro.console import Bar, Cell, format_count, format_time, make_table, plain_console

if TYPE_CHECKING:
    from memoro.data.source import Source
    from memoro.engine.answers import Prediction
    from memoro.evaluation.bulk import Job
    from memoro.evaluation.parallel import RayOptions
    from memoro.evaluation.predictions import Predictor, Tally

app = typer.Typer()

_MANY = "Many images"


@app.command()
def predict(
    context: typer.Context,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders, globs, .zip, tables (.csv, .jsonl, .parquet), hub ids; @FILE or -: paths in lines.",
        ),
    ],
    tasks: TaskFiles,
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    form: Annotated[
        Literal["table", "json", "jsonl", "csv", "parquet"] | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="table, json, jsonl (a line for each image), csv or parquet.",
            show_default="by the suffix of --out, else table; parquet for a folder",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="File to write to instead of stdout, or a folder (answers/)."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            min=1,
            help="Number of labels to output with their probabilities.",
            show_default="1; all in JSON and for multi-label tasks",
        ),
    ] = None,
    unfamiliar: Annotated[
        Literal["mark", "drop", "keep"],
        typer.Option("--unfamiliar", help="Mark answers for unfamiliar images, drop them, or keep them unmarked."),
    ] = "mark",
    false_alarms: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Familiarity below which an image counts as unfamiliar: about this share of a task's own images does.",
        ),
    ] = 0.01,
    embeddings: Annotated[
        bool,
        typer.Option("--embeddings", help="Also write the final tokens of the backbone and of each task (Parquet)."),
    ] = False,
    raw_csv: Annotated[
        bool,
        typer.Option("--raw-csv", help="Leave text in CSV as it is, even if a spreadsheet would run it as a formula."),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any image cannot be read.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a job: skip the shards that exist.", rich_help_panel=_MANY),
    ] = False,
    shard_size: Annotated[
        int | None,
        typer.Option(min=1, help="Images per file in the folder.", show_default="8192", rich_help_panel=_MANY),
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Read a hub dataset as a stream, storing nothing.", rich_help_panel=_MANY),
    ] = False,
    settings: Settings = None,
) -> None:
    """memoro predict new/*.jpg -t pets.safetensors -t rooms.safetensors
    memoro predict new/ -t pets.safetensors --out answers.csv --top 3
    memoro predict photos.parquet -t pets.safetensors --out answers/ --resume
    find photos -name "*.jpg" | memoro predict - -t pets.safetensors --out answers.csv

    Predict with all tasks in one pass. Answers are written batch by batch.

    Folders are searched for images, which are recognised by their suffix or their first bytes. Tables have a column of
    paths, Parquet also of images. An image that cannot be read gets a row with the error. CSV and Parquet have a row
    for each image, task and label, and the columns image, task, label, probability, value (of a regression), low and
    high (of its 90 % interval), predicted, score, familiarity, unfamiliar, error.

    Probabilities are calibrated if the task is. familiarity is the share of the task's own images that look at least as
    unusual as this one. The image most likely belongs to the task with the highest score, which compares the tasks of
    one call: it depends on which tasks are attached.

    With a folder as --out, answers are written in files of --shard-size images: stop at any time and continue with
    --resume. With --set ray=true, the machines of a Ray cluster share the work; they need access to the images and to
    the folder.
    """
    if out is not None:
        share_cores()
    from memoro.data import DataOptions
    from memoro.data.open import open_source
    from memoro.data.workers import worker_count
    from memoro.engine.answers import AnswerOptions, Routing
    from memoro.evaluation.bulk import SHARD_SIZE, Job
    from memoro.evaluation.parallel import RayOptions, list_devices, share
    from memoro.evaluation.predictions import Predictor, check_form

    folder = out is not None and (out.endswith(("/", os.sep)) or Path(out).is_dir())
    changes = read_settings("predict", settings)
    cluster = RayOptions(**changes[RayOptions])
    chosen = _choose_form(form, None if out is None else Path(out), folder)
    if not folder and (resume or cluster.wanted or shard_size is not None):
        raise typer.BadParameter("--resume, --shard-size and --set ray need a folder for the answers: --out answers/")
    check_form(chosen, embeddings)
    routing = Routing(unfamiliar, false_alarms)
    reading = changes[DataOptions]
    workers = reading.pop("workers", None)
    source = open_source(images, streaming=streaming, **reading)
    count = None if folder else _count(source)
    if cluster.wanted:  # all machines have to answer alike
        device, precision = "cpu", "float32" if precision == "auto" else precision
    frozen, models = load_models(tasks, backbone, device, precision)
    predictor = Predictor(
        frozen, tuple(models), AnswerOptions(**changes[AnswerOptions], top=top, routing=routing, embeddings=embeddings)
    )
    _explain_passes(predictor)
    devices = [frozen.device] if cluster.wanted else list_devices(device)
    tell = shell_log(plain_console(stderr=True, soft_wrap=True), context)
    with share(predictor, devices, worker_count(workers, count)) as shared:
        if folder:
            assert out is not None
            job = Job(source, shared, Path(out), chosen, shard_size or SHARD_SIZE, raw_csv)
            tally = _write_shards(job, resume, workers, cluster if cluster.wanted else None)
        else:
            file = None if out is None else Path(out)
            tally = _write_one(source, shared, chosen, file, count, workers, raw_csv)
    if tally.first is not None:
        some = f"{tally.unreadable} of {tally.images} images could not be read, such as "
        tell(f"{some if tally.images > 1 else ''}{': '.join(tally.first)}")
    raise typer.Exit(1 if tally.unreadable and (strict or tally.unreadable == tally.images) else 0)


def _count(source: Source) -> int | None:
    """The number of images, if it is known; raises if there are none."""
    from memoro.data.source import is_endless
    from memoro.errors import DataError

    if is_endless(source):
        return None
    count = sum(1 for _ in source.keys())  # noqa: SIM118
    if not count:
        raise DataError("there are no images.")
    return count


def _explain_passes(predictor: Predictor) -> None:
    """Says if more than one pass is needed, and which tasks cannot call images unfamiliar."""
    errors = plain_console(stderr=True, soft_wrap=True)
    passes = len(predictor.passes)
    if passes > 1:
        errors.print(f"{passes} passes, because the tasks were trained with different preprocessing.")
    if without := [task.name for task in predictor.models if task.spec.familiarity is None]:
        errors.print(
            f"{', '.join(without)}: the file has no familiarity, so no image is called unfamiliar. To add it: memoro "
            "calibrate TASK DATA"
        )


def _write_one(
    source: Source,
    predictor: Predictor,
    form: str,
    out: Path | None,
    count: int | None,
    workers: int | None,
    raw_csv: bool,
) -> Tally:
    """All answers in one place: a file, stdout or a table."""
    from memoro.data.workers import worker_count
    from memoro.evaluation.bulk import SHARD_SIZE, cut_shards
    from memoro.evaluation.predictions import MAX_ROWS, Tally, predictions_table, write_predictions
    from memoro.files import part_of, write_gradually

    errors = plain_console(stderr=True, soft_wrap=True)
    how, tally = predictor.how, Tally()
    pictures = (picture for shard in cut_shards(source.keys(), SHARD_SIZE) for picture in source.read(shard.keys))

    def count_all(tick: Callable[[int], None]) -> Iterator[Prediction]:
        for prediction in predictor.predict(pictures, predictor.decoder(worker_count(workers, count))):
            tally.add(prediction)
            yield prediction
            tick(1)

    try:
        with _progress(count, quiet=not errors.is_terminal) as tick:
            rows = count_all(tick)
            if form == "table":
                shown = list(islice(rows, MAX_ROWS))
                deque(rows, maxlen=0)
            else:
                with nullcontext(sys.stdout.buffer) if out is None else write_gradually(out) as file:
                    write_predictions(rows, form, file, how.top, embeddings=how.embeddings, raw_csv=raw_csv)
    except KeyboardInterrupt:
        errors.print(f"stopped after {format_count(tally.images, 'image')}.")
        if out is not None and tally.images and part_of(out).is_file():
            errors.print(f"The answers so far are in {part_of(out)}.")
        raise typer.Exit(130) from None
    if form == "table":
        console = plain_console()
        console.print(predictions_table(shown, tally.images, how.top, console.width))
    elif out is not None:
        errors.print(f"Wrote predictions for {format_count(tally.images, 'image')} to {out}.")
    return tally


def _write_shards(job: Job, resume: bool, workers: int | None, cluster: RayOptions | None) -> Tally:
    """Answers as files of a folder. Returns what all of them hold."""
    from memoro.data.workers import worker_count
    from memoro.evaluation.bulk import answer_here, begin, claim
    from memoro.evaluation.parallel import answer_on_ray, check_ray

    errors = plain_console(stderr=True, soft_wrap=True)
    if cluster is not None:
        check_ray(job)
    with claim(job):
        todo = begin(job, resume=resume)
        for change in todo.changes:
            errors.print(change)
        whole = todo.answered
        left = None if todo.images is None else todo.images - whole.images
        if todo.done:
            rest = "more" if left is None else left
            errors.print(f"Already done: {format_count(whole.images, 'image')}. Still to do: {rest}.")
        try:
            with _progress(left, quiet=left == 0) as tick:
                if cluster is not None:
                    address, count = cluster.address, cluster.workers
                    tally = answer_on_ray(job, todo, address=address, workers=count, tick=tick, tell=errors.print)
                else:
                    tally = answer_here(job, todo, workers=worker_count(workers, left), tick=tick)
        except KeyboardInterrupt:
            errors.print(f"stopped; the shards so far are in {job.folder}. To continue, add --resume.")
            raise typer.Exit(130) from None
    if left != 0:
        errors.print(f"Wrote predictions for {format_count(tally.images, 'image')} to {job.folder}.")
    whole.merge(tally)
    return whole


@contextmanager
def _progress(total: int | None, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a bar by some images. The bar shows the speed."""
    began, done = time.monotonic(), 0
    with Bar("predicting", total, quiet=quiet) as shown:

        def tick(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(time.monotonic() - began, 1e-9)
            figures = f"{speed:,.0f} images/s"
            if total is not None and done < total:
                figures += f", about {format_time((total - done) / speed)} left"
            shown.update(count, figures=figures)

        yield tick


def _choose_form(form: str | None, out: Path | None, folder: bool) -> str:
    """The format to write: as asked, or by the suffix of the file; to a terminal, a table."""
    suffixes = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}
    if folder:
        form = form or "parquet"
        if form not in {"parquet", "csv", "jsonl"}:
            raise typer.BadParameter(f"{form!r} is not one of parquet, csv, jsonl, which a folder may contain")
        return form
    form = form or ("table" if out is None else suffixes.get(out.suffix.lower()))
    if form is None:
        raise typer.BadParameter(f"--out {out}: name it .csv, .json, .jsonl or .parquet, or choose a --format")
    if form == "table" and out is not None:
        raise typer.BadParameter("a table is for the terminal: with --out, choose json, jsonl, csv or parquet")
    if form == "parquet" and out is None:
        raise typer.BadParameter("parquet is a binary format: name a file with --out predictions.parquet")
    return form


@app.command()
def explain(
    images: Annotated[list[str], typer.Argument(help="Images: files, folders or globs.")],
    tasks: TaskFiles,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write: .png, .jpg or .webp.")] = Path(
        "overlay.png"
    ),
    backbone: TaskBackboneOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = "auto",
    as_json: Json = False,
) -> None:
    """memoro explain photo.jpg -t pets.safetensors -o overlay.png
    memoro explain new/ -t pets.safetensors -t rooms.safetensors -o sheet.png

    Show where tasks looked: each image in grey, coloured by attention.

    Yellow is the most attention, dark blue none. Several images or tasks are drawn as a grid: a row for each image, a
    column for each task. The table shows how much attention went to the image's patches, the task's memory etc.
    """
    from memoro.engine.composition import compose
    from memoro.evaluation.overlays import draw_overlays, picture_format, save_picture
    from memoro.images import find_images

    picture_format(out)  # an error before the work
    frozen, members = load_models(tasks, backbone, device, precision)
    found = draw_overlays(compose(frozen, members), list(find_images(images)))
    errors = plain_console(stderr=True, soft_wrap=True)
    for reason in found.skipped.values():
        errors.print(f"skipped {reason}")
    if found.picture is None:
        raise typer.Exit(1)
    save_picture(found.picture, out)
    looked = [(image, name, *one) for image, row in found.answers.items() for name, one in row.items()]
    for name, note in {name: where.note for _, name, _, where in looked if where.note is not None}.items():
        errors.print(f"note: {name}: {note}")
    if as_json:
        print_json({"out": str(out), "images": found.to_json(), "skipped": found.skipped})
        return
    rows: list[list[Cell]] = [
        [image, name, str(answer), [f"{part} {share:.0%}" for part, share in where.shares().items()]]
        for image, name, answer, where in looked
    ]
    plain_console().print(make_table(["image", "task", "answer", "attention to"], rows, left=4))
    plain_console(soft_wrap=True).print(f"written to {out}")
