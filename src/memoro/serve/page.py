"""The page at /: its files, and sample images that memoro draws itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files

import numpy as np
from fastapi import FastAPI, Response
from PIL import Image, ImageFont

from memoro.errors import ServeError
from memoro.images.drawing import draw_apple, draw_digit, draw_landscape, draw_letter
from memoro.pages.page import read_style

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def _letter(text: str, seed: int) -> Image.Image:
    return draw_letter(text, ImageFont.load_default, np.random.default_rng(seed))


SAMPLES: dict[str, Callable[[], Image.Image]] = {
    **{f"letter-{text}": partial(_letter, text, seed) for text, seed in (("a", 1), ("e", 6), ("D", 4), ("M", 5))},
    **{f"digit-{text}": partial(draw_digit, text) for text in "238"},
    "landscape": draw_landscape,
    "apple": draw_apple,
}
"""Images to try without having any: some that the demo's tasks know, some that they do not."""


@cache
def read_files() -> dict[str, bytes]:
    """The files of the page by name; the first of its two stylesheets is the one that reports have inside."""
    own = {file.name: file.read_bytes() for file in files("memoro.serve").joinpath("static").iterdir()}
    return {**own, "style.css": read_style().encode()}


@cache
def draw_sample(name: str) -> bytes:
    """A sample as PNG."""
    buffer = io.BytesIO()
    SAMPLES[name]().save(buffer, "PNG")
    return buffer.getvalue()


def add_page(app: FastAPI) -> None:
    """Adds the routes of the page."""

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in read_files():
            raise ServeError(f"the page has no file {name!r}.", 404)
        kind = TYPES[name.rpartition(".")[2]]
        return Response(read_files()[name], media_type=kind, headers=HEADERS)

    @app.get("/page/samples/{name}.png", include_in_schema=False)
    async def sample(name: str) -> Response:
        if name not in SAMPLES:
            raise ServeError(f"there is no sample {name!r}.", 404)
        return Response(draw_sample(name), media_type="image/png")
