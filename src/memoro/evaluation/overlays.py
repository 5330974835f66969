"""Overlays of several images and tasks, as one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from memoro.console import printable
from memoro.engine.composition import Composition
from memoro.errors import DataError, ImageError
from memoro.files import write_whole

MAX_IMAGES = 100
_CELL, _GAP, _CAPTION = 256, 12, 44
_BACK, _TEXT = (255, 255, 255), (31, 35, 40)


@dataclass
class Overlays:
    """What `draw_overlays` found."""

    picture: Image.Image | None = None
    """The overlay of one image and one task; else a sheet with a row for each image and a column for each task."""
    answers: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """By image and task: the `answer`, the `attention` to patches, memory and the rest, whose attention it is
    (`source`), and a `note` on the picture, if it needs one."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why images could not be read."""

    @property
    def notes(self) -> dict[str, str]:
        """By task: what a reader has to know about its pictures."""
        found = [(name, own["note"]) for tasks in self.answers.values() for name, own in tasks.items()]
        return {name: note for name, note in found if note is not None}


def draw_overlays(model: Composition, paths: Sequence[Path]) -> Overlays:
    """Where every task of the composition looked in each image."""
    if len(paths) > MAX_IMAGES:
        raise DataError(f"{len(paths)} images are too many for one picture: give {MAX_IMAGES} at most.")
    found, rows = Overlays(), []
    single = len(paths) == len(model.names) == 1
    for path in paths:
        try:
            answers = model.predict([path])[0]
            explained = {name: model.explain(path, name) for name in model.names}
        except ImageError as error:
            found.skipped[str(path)] = str(error)
            continue
        found.answers[str(path)] = {
            name: {"answer": answers[name], "attention": own.shares(), "source": own.source, "note": own.note}
            for name, own in explained.items()
        }
        if single:
            found.picture = next(iter(explained.values())).overlay()
            return found
        cells = [_cell(next(iter(explained.values())).images[0], path.name, "")]
        cells += [_cell(own.overlay(), name, brief_answer(answers[name])) for name, own in explained.items()]
        rows.append(cells)
    if rows:
        step = (_CELL + _GAP, _CELL + _CAPTION + _GAP)
        sheet = Image.new("RGB", (step[0] * len(rows[0]) + _GAP, step[1] * len(rows) + _GAP), _BACK)
        for down, cells in enumerate(rows):
            for across, cell in enumerate(cells):
                sheet.paste(cell, (_GAP + across * step[0], _GAP + down * step[1]))
        found.picture = sheet
    return found


def picture_format(path: Path) -> str:
    """The format that the file's suffix stands for."""
    form = Image.registered_extensions().get(path.suffix.lower())
    if form not in {"PNG", "JPEG", "WEBP"}:
        raise DataError(f"{path}: choose a name that ends with .png, .jpg or .webp.")
    return form


def save_picture(picture: Image.Image, path: Path) -> None:
    """Writes the picture in the format of the file's suffix."""
    buffer = io.BytesIO()
    picture.save(buffer, format=picture_format(path))
    write_whole(path, buffer.getvalue())


def brief_answer(answer: dict[str, Any]) -> str:
    """An answer of `predict` in a few words."""
    if "label" in answer:
        text = f"{answer['label']} {answer['probability']:.2f}"
    elif "labels" in answer:
        text = ", ".join(f"{label} {answer['probabilities'][label]:.2f}" for label in answer["labels"]) or "no label"
    else:
        text = ", ".join(f"{name} {value:.4g}" for name, value in answer["values"].items())
    return f"unfamiliar ({text})" if answer.get("unfamiliar") else text


def _cell(image: Image.Image, first: str, second: str) -> Image.Image:
    """The image above two lines of text."""
    cell = Image.new("RGB", (_CELL, _CELL + _CAPTION), _BACK)
    shown = ImageOps.contain(image, (_CELL, _CELL))
    cell.paste(shown, ((_CELL - shown.width) // 2, (_CELL - shown.height) // 2))
    font, draw = ImageFont.load_default(size=15), ImageDraw.Draw(cell)
    for line, text in enumerate((first, second)):
        text = printable(text)
        while text and draw.textlength(text, font) > _CELL:
            text = text[:-2] + "…"
        draw.text((0, _CELL + 2 + 20 * line), text, _TEXT, font)
    return cell
