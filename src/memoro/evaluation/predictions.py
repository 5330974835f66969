"""Predictions, and how they are written: CSV, JSON, JSON lines, Parquet, or a table for the terminal."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.table import Table

from memoro.answer import COLUMNS
from memoro.backbones import Backbone
from memoro.console import Cell, fits, format_count, make_table, to_json
from memoro.data.workers import DecodeAhead
from memoro.engine.answers import AnswerOptions, Decode, Pass, Prediction, answer_pictures, new_decoder
from memoro.engine.composition import compose
from memoro.errors import DataError
from memoro.images import NamedPicture
from memoro.tasks.spec import hash_record
from memoro.tasks.task import Task

MAX_ROWS = 200
"""Images that a table shows."""
ROW_GROUP = 20_000
"""Rows of a Parquet file that are collected before they are written."""


@dataclass(frozen=True)
class Predictor:
    """Tasks on one backbone, and how they answer. It can be sent to other machines."""

    backbone: Backbone
    models: tuple[Task, ...]
    how: AnswerOptions

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]

    @cached_property
    def passes(self) -> list[Pass]:
        return compose(self.backbone, self.models).prediction_passes()

    def on(self, device: torch.device | str) -> Predictor:
        """The same on another device."""
        return Predictor(self.backbone.to(device), self.models, self.how)

    def predict(self, pictures: Iterator[NamedPicture], decode: Decode | None = None) -> Iterator[Prediction]:
        """The prediction for each image, in order. They are decoded here, or as `decoder` says."""
        return answer_pictures(pictures, self.passes, self.names, self.how, decode)

    def decoder(self, workers: int) -> Decode | None:
        """Decodes images for `predict` in this many processes, which end with it."""
        return DecodeAhead(new_decoder(self.passes), workers) if workers else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Predictor, (self.backbone, self.models, self.how)  # passes are functions, and built where they run

    def describe(self) -> dict[str, Any]:
        """All that decides the answers, as JSON."""
        how = self.how
        return {
            "backbone": self.backbone.fingerprint.digest,
            "precision": str(self.backbone.dtype).removeprefix("torch."),
            "tasks": {model.name: _hash(model) for model in self.models},
            "top": how.top,
            "unfamiliar": how.routing.unfamiliar,
            "false_alarms": how.routing.false_alarms,
            "embeddings": how.embeddings,
        }


def _hash(model: Task) -> str:
    """A hash of the model's weights and of everything that turns its logits into answers."""
    calibration, familiarity = model.spec.calibration, model.spec.familiarity
    record = {
        "content": model.content_hash(),
        "calibration": None if calibration is None else asdict(calibration),
        "familiarity": None if familiarity is None else [familiarity.slope, familiarity.offset, familiarity.noticed],
    }
    return hash_record(record, {} if familiarity is None else familiarity.tensors)


_EMPTY: dict[str, Any] = dict.fromkeys((*COLUMNS, "embedding"))


@dataclass
class Tally:
    """How many predictions there were, and how many of images that could not be read."""

    images: int = 0
    unreadable: int = 0
    first: tuple[str, str] | None = None
    """The first that could not be read, and why."""

    def add(self, prediction: Prediction) -> None:
        errors = [] if prediction.error is None else [(prediction.image, prediction.error)]
        self.merge(Tally(1, len(errors), *errors))

    def merge(self, other: Tally) -> None:
        self.images += other.images
        self.unreadable += other.unreadable
        self.first = self.first or other.first


def flat_rows(prediction: Prediction, top: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a prediction, with all `COLUMNS` and None in those that are empty: see `Answer.rows`.

    An image that could not be read has a single row with its `error`; one whose answers were all dropped has a single
    row without a task. If there are embeddings, the first row of each task has its `embedding`, and the base's is in a
    row of its own, with `base` as the task.
    """

    def row(**cells: Any) -> dict[str, Any]:
        escaped = {name: _utf8(cell) for name, cell in cells.items()}
        return {**_EMPTY, "image": _utf8(prediction.image), **escaped}

    if prediction.error is not None:
        yield row(error=prediction.error)
    elif "base" in prediction.embeddings:
        yield row(task="base", embedding=prediction.embeddings["base"])
    elif not prediction.answers:
        yield row()
    for task, answer in prediction.answers.items():
        for number, cells in enumerate(answer.rows(top)):
            yield row(task=task, embedding=None if number else prediction.embeddings.get(task), **cells)


FORMS = ("csv", "json", "jsonl", "parquet")


def write_predictions(
    predictions: Iterable[Prediction],
    form: str,
    file: BinaryIO,
    top: int | None = None,
    *,
    embeddings: bool = False,
    raw_csv: bool = False,
) -> None:
    """Writes each prediction in one of the `FORMS` as it comes; Parquet in groups of at most `ROW_GROUP` rows.

    CSV is safe to open in a spreadsheet (see `no_formula`) unless it is to be raw.
    """
    check_form(form, embeddings)
    if form == "parquet":
        _write_parquet(predictions, file, top, embeddings)
        return
    if form == "csv":
        texts = _csv_texts(predictions, top, raw_csv)
    else:
        texts = _json_texts(predictions) if form == "json" else _json_lines(predictions)
    for text in texts:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()


def check_form(form: str, embeddings: bool = False) -> None:
    """Raises if predictions cannot be written like that: before the work is done."""
    if form == "parquet" and find_spec("pyarrow") is None:
        raise DataError("writing parquet needs pyarrow: pip install 'memoro[train]', or write CSV.")
    if embeddings and form != "parquet":
        raise DataError("embeddings are lists of numbers, for which only Parquet has a column: write Parquet.")


_FORMULA = re.compile(r"(?![+-]?[0-9]+(\.[0-9]+)?\Z)[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""The first characters of cells that a spreadsheet may take for a formula. Numbers are not."""


def no_formula(cell: Any) -> Any:
    """The cell of a CSV file; with an apostrophe before text that a spreadsheet may run as a formula, as the names of
    files and labels from strangers may be made to."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _without_apostrophe(cell: str) -> str:
    """What `no_formula` was given."""
    return cell[1:] if no_formula(cell[1:]) == cell else cell


def _csv_texts(predictions: Iterable[Prediction], top: int | None, raw: bool) -> Iterator[str]:
    """The header, then the rows of each prediction."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for prediction in predictions:
        for row in flat_rows(prediction, top):
            cells = {key: str(cell).lower() if isinstance(cell, bool) else cell for key, cell in row.items()}
            writer.writerow(cells if raw else {key: no_formula(cell) for key, cell in cells.items()})
        yield lines.getvalue()
        lines.seek(0)
        lines.truncate()
    yield lines.getvalue()


def _json_texts(predictions: Iterable[Prediction]) -> Iterator[str]:
    """One object: by image its answers by task, or `{"error": …}`."""
    start = "{"
    for one in predictions:
        entry = {one.image: one.to_json() if one.error is None else {"error": one.error}}
        yield start + to_json(entry, indent=2)[1:-2]
        start = ","
    yield "{}\n" if start == "{" else "\n}\n"


def _json_lines(predictions: Iterable[Prediction]) -> Iterator[str]:
    """An object for each image: its name in `image`, and `answers` by task, or `error`."""
    for one in predictions:
        rest = {"answers": one.to_json()} if one.error is None else {"error": one.error}
        yield to_json({"image": one.image, **rest}) + "\n"


def _write_parquet(predictions: Iterable[Prediction], file: BinaryIO, top: int | None, embeddings: bool) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {str: pyarrow.string(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    columns = [(name, types[kind]) for name, kind in COLUMNS.items()]
    schema = pyarrow.schema([*columns, *([("embedding", pyarrow.list_(pyarrow.float32()))] if embeddings else [])])
    rows = (row for prediction in predictions for row in flat_rows(prediction, top))
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(islice(rows, ROW_GROUP // 10 if embeddings else ROW_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def read_errors(path: Path, form: str) -> Iterator[tuple[str, str]]:
    """The images of a shard that could not be read, with their errors."""
    try:
        if form == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=["image", "error"]):
                    rows = batch.filter(batch["error"].is_valid())
                    yield from zip(rows["image"].to_pylist(), rows["error"].to_pylist(), strict=True)
        else:
            with path.open(encoding="utf-8", newline="") as lines:
                table = csv.DictReader(lines) if form == "csv" else map(json.loads, lines)
                plain = _without_apostrophe if form == "csv" else str
                yield from ((plain(row["image"]), plain(row["error"])) for row in table if row.get("error"))
    except Exception as error:  # of three libraries
        raise DataError(f"{path} is damaged ({error}): remove it and repeat the command.") from None


UNFAMILIAR = "unfamiliar to all tasks"
"""Shown instead of answers that were all dropped."""


def predictions_table(predictions: Sequence[Prediction], total: int, top: int | None = None, width: int = 80) -> Table:
    """A row for each of the first images and a column for each task; if that is wider than the terminal, a row for
    each image and task, with the task that the image most likely belongs to first, if all have a score."""
    names = list(dict.fromkeys(name for one in predictions for name in one.answers))
    title = format_count(total, "image")
    if total > len(predictions):
        title += f", the first {len(predictions)}; a file has all"
    errors = ["error"] if any(one.error is not None for one in predictions) else []
    rows: list[list[Cell]] = []
    for one in predictions:
        cells = [one.answers[name].lines(top) if name in one.answers else "" for name in names]
        if cells and not one.answers and one.error is None:
            cells[0] = UNFAMILIAR
        rows.append([one.image, *cells, *([one.error or ""] if errors else [])])
    table = make_table(["image", *names, *errors], rows, title, left=2 + len(names))
    if fits(table, width):
        return table
    rows, ranked = [], all(answer.score is not None for one in predictions for answer in one.answers.values())
    for one in predictions:
        order = sorted(one.answers, key=lambda name: -(one.answers[name].score or 0.0)) if ranked else list(one.answers)
        rows += [["", name, one.answers[name].lines(top)] for name in order] or [["", "", one.error or UNFAMILIAR]]
        rows[-max(1, len(order))][0] = one.image
    title += "; the most likely task first" if ranked else ""
    return make_table(["image", "task", "answer"], rows, title, left=3)


def _utf8(value: Any) -> Any:
    """File names may contain bytes that are not UTF-8, and labels any code point: those are escaped."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
