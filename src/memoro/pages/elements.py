"""A self-contained HTML page: its style and images are inside, it has no script, and all text is escaped."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Literal

from PIL import Image
from rich.table import Table

from memoro.console import format_count, printable

MANY = 5
"""Columns that fit a phone."""


class Html(str):
    """Text that is HTML already; any other text is escaped when it becomes part of a page."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element with escaped children and attributes; attributes that are None are left out.

    `class_` is written as `class`, and `_` in a name as `-`.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{to_html(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(map(to_html, children))
    return Html(f"<{name}{shown}>" if name in {"img", "meta", "br"} else f"<{name}{shown}>{inside}</{name}>")


def to_html(value: object) -> Html:
    """The value escaped, with control characters shown as such, unless it is HTML."""
    return value if isinstance(value, Html) else Html(escape(printable(str(value))))


def prose(text: str) -> Html:
    """A sentence, with what it has in backticks as code."""
    return Html(re.sub(r"`([^`]+)`", r"<code>\1</code>", to_html(text)))


def join(parts: Iterable[object]) -> Html:
    return Html("\n".join(map(to_html, parts)))


@cache
def read_style() -> str:
    return files("memoro.pages").joinpath("style.css").read_text(encoding="utf-8")


@cache
def page_policy() -> str:
    """The content security policy of a page: its own style and images within the page are allowed, nothing else."""
    digest = base64.b64encode(hashlib.sha256(read_style().encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def render_page(title: str, *parts: object) -> str:
    """The page as text, with its content security policy."""
    head = [
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{page_policy()}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{read_style()}</style>"),
    ]
    body = tag("body", tag("main", join(parts)))
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n{body}</html>\n'


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], *, left: int = 1) -> Html:
    """A table that scrolls by itself on a narrow screen. The first `left` columns are aligned left.

    With many columns, a narrow screen shows each row as a list of names and values.
    """
    many = len(columns) > MANY

    def cells(name: str, row: Sequence[object]) -> Html:
        found = []
        for at, cell in enumerate(row):
            label = columns[at] if many and name == "td" else None
            found.append(tag(name, cell, class_="left" if at < left else None, data_label=label))
        return tag("tr", *found)

    head = [tag("thead", cells("th", columns))] if any(columns) else []
    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", *head, body, class_="many" if many else None), class_="scroll")


def table_of(shown: Table) -> Html:
    """A table of the terminal as HTML."""
    columns = [column.header for column in shown.columns] if shown.show_header else []
    left = sum(column.justify == "left" for column in shown.columns)
    rows = zip(*(list(column.cells) for column in shown.columns), strict=True)
    return table(columns, rows, left=left)


def fold_rows(columns: Sequence[object], rows: Sequence[Sequence[object]], first: int, noun: str, **how: int) -> Html:
    """A table of the first rows, and the others, at most a thousand, in a part that is opened on demand."""
    parts = [table(columns, rows[:first], **how)]
    if more := rows[first : first + 1000]:
        left_out = len(rows) - first - len(more)
        text = f"{format_count(len(more), noun)} more" + (f", without {left_out:,} others" if left_out else "")
        parts.append(tag("details", tag("summary", text), table(columns, more, **how)))
    return join(parts)


def picture(
    image: Image.Image, alt: str, *, edge: int | None = 192, form: Literal["JPEG", "PNG"] = "JPEG", **attributes: object
) -> Html:
    """An image within the page, scaled down to `edge` pixels at most."""
    if edge is not None and max(image.size) > edge:
        image = image.copy()
        image.thumbnail((edge, edge))
    buffer = io.BytesIO()
    image.save(buffer, format=form, quality=82)
    data = base64.b64encode(buffer.getvalue()).decode()
    width, height = image.size
    source = f"data:image/{form.lower()};base64,{data}"
    return tag("img", src=source, alt=alt, width=width, height=height, **attributes)
