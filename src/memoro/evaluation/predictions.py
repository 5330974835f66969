"""Predictions for many images: which files are meant, and how the answers are written down."""

from __future__ import annotations

import csv
import glob
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.table import Table
from rich.text import Text

from memoro.errors import DataError, ImageError
from memoro.files import write_whole
from memoro.images import IMAGE_SUFFIXES, open_image

Form = Literal["table", "json", "csv", "parquet"]


def find_images(places: Iterable[str | Path]) -> list[Path]:
    """The image files that paths, folders (all levels) and globs stand for, each once, in order."""
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


class Predictor(Protocol):
    """A composition, or a baseline."""

    def predict(self, images: Any, *, batch_size: int = 32) -> list[dict[str, dict[str, Any]]]: ...


def predict_files(
    models: Sequence[Predictor],
    paths: Sequence[Path],
    *,
    batch_size: int = 32,
    tick: Callable[[int], None] = lambda n: None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Each readable image's answers by path, those of all models together, and why the others could not be read."""
    answers: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for at in range(0, len(paths), batch_size):
        batch = {}
        for path in paths[at : at + batch_size]:
            try:
                batch[str(path)] = open_image(path)
            except ImageError as error:
                skipped[str(path)] = str(error)
        for model in models if batch else ():
            for place, said in zip(batch, model.predict(batch.values(), batch_size=batch_size), strict=True):
                answers.setdefault(place, {}).update(said)
        tick(len(paths[at : at + batch_size]))
    return answers, skipped


def flat_rows(answers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an image and task: image, task, answer, probability (empty for numbers)."""
    rows = []
    for image, said in answers.items():
        for task, answer in said.items():
            if "label" in answer:
                rows.append(_row(image, task, answer["label"], answer["probability"]))
            elif "labels" in answer:
                rows += [_row(image, task, label, answer["probabilities"][label]) for label in answer["labels"]]
                if not answer["labels"]:
                    rows.append(_row(image, task, "", None))
            else:
                rows += [_row(image, task, f"{name}={value:.6g}", None) for name, value in answer["values"].items()]
    return rows


def write_predictions(answers: dict[str, dict[str, Any]], form: Form, out: Path | None) -> str | None:
    """The predictions as text, or None where they went to the file `out`. Parquet always needs a file."""
    rows = flat_rows(answers)
    if form == "parquet":
        if out is None:
            raise DataError("parquet is no text: name a file with --out predictions.parquet.")
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(
                "writing parquet needs pyarrow: pip install 'memoro[train]', or take --format csv."
            ) from None
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        write_whole(out, buffer.getvalue())
        return None
    if form == "csv":
        lines = io.StringIO()
        writer = csv.DictWriter(lines, ["image", "task", "answer", "probability"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        text = lines.getvalue()
    else:
        text = json.dumps(answers, ensure_ascii=False, indent=2) + "\n"
    if out is None:
        return text
    write_whole(out, text.encode())
    return None


def predictions_table(answers: dict[str, dict[str, Any]], most: int = 200) -> Table:
    """A table for people: a row an image, a column a task. Names stand there as they are, never as markup."""
    names = list(next(iter(answers.values()), {}))
    table = Table(
        title=("1 image" if len(answers) == 1 else f"{len(answers)} images")
        + (f", the first {most}" if len(answers) > most else "")
    )
    table.add_column("image", overflow="fold")
    for name in names:
        table.add_column(Text(name))
    for image, said in list(answers.items())[:most]:
        table.add_row(Text(image), *(Text(_brief(said[name])) for name in names))
    return table


def _row(image: str, task: str, answer: str, probability: float | None) -> dict[str, Any]:
    return {"image": image, "task": task, "answer": answer, "probability": probability}


def _brief(answer: dict[str, Any]) -> str:
    if "label" in answer:
        return f"{answer['label']} {answer['probability']:.2f}"
    if "labels" in answer:
        return ", ".join(answer["labels"]) or "-"
    return ", ".join(f"{name} {value:.4g}" for name, value in answer["values"].items())
