"""Predictions for many images: finding the files, and writing the answers."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from memoro.console import format_count, make_table
from memoro.engine.composition import Composition
from memoro.errors import DataError, ImageError
from memoro.files import write_whole
from memoro.images import IMAGE_SUFFIXES
from memoro.regimes import Baseline

Form = Literal["table", "json", "csv", "parquet"]
Answers = dict[str, dict[str, Any]]
"""By image and by task: what `read_answers` gives."""

MAX_ROWS = 200
FIELDS = ("image", "task", "answer", "probability")


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """The image files of paths, folders (recursively) and globs, each once, in order."""
    found: dict[Path, None] = {}
    for place in places:
        path = Path(place)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        elif path.is_file():
            inside = [path]
        else:
            inside = sorted(Path(match) for match in glob.glob(str(place), recursive=True) if Path(match).is_file())
        if not inside:
            raise DataError(f"{place}: no images there. Give files, folders or globs such as 'photos/**/*.jpg'.")
        found.update(dict.fromkeys(inside))
    return list(found)


def predict_files(
    models: Sequence[Composition | Baseline],
    paths: Sequence[Path],
    *,
    batch_size: int = 32,
    tick: Callable[[int], None] = lambda n: None,
) -> tuple[Answers, dict[str, str]]:
    """The answers of all models for each readable image, by path, and why each of the others could not be read."""
    answers: Answers = {}
    skipped: dict[str, str] = {}

    def predict(batch: Sequence[Path]) -> None:
        # The models open the images, at the size that each of them needs.
        found = [model.predict(batch, batch_size=batch_size) for model in models]
        for path, *own in zip(batch, *found, strict=True):
            answers[str(path)] = {name: answer for one in own for name, answer in one.items()}

    for at in range(0, len(paths), batch_size):
        batch = paths[at : at + batch_size]
        try:
            predict(batch)
        except ImageError:  # of one of them
            for path in batch:
                try:
                    predict([path])
                except ImageError as error:
                    skipped[str(path)] = str(error)
        tick(len(batch))
    return answers, skipped


def flat_rows(answers: Answers) -> list[dict[str, Any]]:
    """Rows of image, task, answer and probability (None for numbers): one for each answer."""
    rows = []
    for image, found in answers.items():
        for task, answer in found.items():
            values: list[tuple[str, float | None]]
            if "label" in answer:
                values = [(answer["label"], answer["probability"])]
            elif "labels" in answer:
                values = [(label, answer["probabilities"][label]) for label in answer["labels"]] or [("", None)]
            else:
                values = [(f"{name}={value:.6g}", None) for name, value in answer["values"].items()]
            rows += [dict(zip(FIELDS, (_utf8(image), task, _utf8(text), p), strict=True)) for text, p in values]
    return rows


def write_predictions(answers: Answers, form: Form, out: Path | None) -> str | None:
    """Writes the predictions to the file `out`; without one, returns them as text."""
    if form == "parquet":
        if out is None:
            raise DataError("parquet is a binary format: name a file with --out predictions.parquet.")
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(
                "writing parquet needs pyarrow: pip install 'memoro[train]', or use --format csv."
            ) from None
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(flat_rows(answers)), buffer)
        data = buffer.getvalue()
    elif form == "csv":
        lines = io.StringIO()
        writer = csv.DictWriter(lines, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_rows(answers))
        data = lines.getvalue().encode()
    else:
        data = (json.dumps(answers, ensure_ascii=False, indent=2) + "\n").encode(errors="backslashreplace")
    if out is None:
        return data.decode()
    write_whole(out, data)
    return None


def predictions_table(answers: Answers) -> Table:
    """A row for each image, a column for each task."""
    names = list(next(iter(answers.values()), {}))
    rows = [[image, *(_brief(found[name]) for name in names)] for image, found in list(answers.items())[:MAX_ROWS]]
    title = format_count(len(answers), "image") + (f", the first {MAX_ROWS}" if len(answers) > MAX_ROWS else "")
    return make_table(["image", *names], rows, title, left=1 + len(names))


def _utf8(text: str) -> str:
    """File names may contain bytes that are not UTF-8, and labels any code point: those are escaped."""
    return text.encode(errors="backslashreplace").decode()


def _brief(answer: dict[str, Any]) -> str:
    if "label" in answer:
        return f"{answer['label']} {answer['probability']:.2f}"
    if "labels" in answer:
        return ", ".join(answer["labels"]) or "-"
    return ", ".join(f"{name} {value:.4g}" for name, value in answer["values"].items())
