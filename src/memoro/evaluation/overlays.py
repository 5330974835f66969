"""Several images in one picture: overlays of tasks, and images that look alike."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from memoro.answer import Answer
from memoro.console import printable
from memoro.engine.composition import Composition
from memoro.engine.explain import Explanation
from memoro.errors import DataError, ImageError
from memoro.files import write_whole
from memoro.images import open_image

MAX_IMAGES = 100
_CELL, _GAP, _CAPTION = 256, 12, 44
_BACK, _TEXT = (255, 255, 255), (31, 35, 40)


@dataclass
class Overlays:
    """What `draw_overlays` drew."""

    picture: Image.Image | None = None
    """The overlay of one image and one task; else a sheet with a row for each image and a column for each task."""
    answers: dict[str, dict[str, tuple[Answer, Explanation]]] = field(default_factory=dict)
    """By image and task, with what the task attended to."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why images could not be read."""

    def to_json(self) -> dict[str, Any]:
        """The answers, by image and task, as JSON values."""
        return {
            image: {
                name: {
                    "answer": answer.to_json(),
                    "attention": looked.shares(),
                    "source": looked.source,
                    "note": looked.note,
                }
                for name, (answer, looked) in row.items()
            }
            for image, row in self.answers.items()
        }


def draw_overlays(model: Composition, paths: Sequence[Path]) -> Overlays:
    """Where every task of the composition looked in each image."""
    if len(paths) > MAX_IMAGES:
        raise DataError(f"{len(paths)} images are too many for one picture: give {MAX_IMAGES} at most.")
    overlays, rows = Overlays(), []
    for path in paths:
        try:
            explained = model.explain(path)
        except ImageError as error:
            overlays.skipped[str(path)] = str(error)
            continue
        answers = next(model.predict_stream([path])).answers
        overlays.answers[str(path)] = {name: (answers[name], one) for name, one in explained.items()}
        views = {name: one.overlay() for name, one in explained.items()}
        if len(paths) == len(views) == 1:
            [overlays.picture] = views.values()
            return overlays
        image = next(iter(explained.values())).images[0]
        cells = [draw_cell(view, name, str(answers[name])) for name, view in views.items()]
        rows.append([draw_cell(image, path.name, ""), *cells])
    if rows:
        overlays.picture = draw_sheet(rows)
    return overlays


def draw_matches(rows: Iterable[tuple[str, Sequence[tuple[str, float | None]]]]) -> Image.Image:
    """A row for each image, with those that look like it and how similar they are."""
    return draw_sheet(
        [
            [
                draw_cell(open_image(place, draft=512), Path(place).name, "" if score is None else f"{score:.3f}")
                for place, score in [(image, None), *matches]
            ]
            for image, matches in rows
        ]
    )


def draw_sheet(rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """Cells as `draw_cell` gives them, in rows and columns."""
    step = (_CELL + _GAP, _CELL + _CAPTION + _GAP)
    sheet = Image.new("RGB", (step[0] * max(map(len, rows)) + _GAP, step[1] * len(rows) + _GAP), _BACK)
    for down, cells in enumerate(rows):
        for across, cell in enumerate(cells):
            sheet.paste(cell, (_GAP + across * step[0], _GAP + down * step[1]))
    return sheet


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


def draw_cell(image: Image.Image, first: str, second: str) -> Image.Image:
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
