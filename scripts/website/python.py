"""The reference of the Python API, from signatures, docstrings and the fields of options."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import Any, get_args, get_overloads, get_type_hints

import memoro
from memoro.options import read_options

PAGES = {
    "training": "Training",
    "data": "Data",
    "tasks": "Tasks and files",
    "backbones": "Backbones",
    "engine": "Compositions",
    "evaluation": "Evaluation",
    "teach": "Labelling",
    "serve": "Server",
    "similar": "Embeddings, similar images",
    "sklearn": "scikit-learn",
    "errors": "Errors",
}
"""Title of the page of each package; other packages have a page under their own name."""
JOINED = {"images": "backbones"}
EXTRA = ("sklearn",)
"""Public modules that are imported by their own name."""
INSIDE = {
    *("Anatomy", "Block", "Context", "Head", "Levels", "MlpParts", "Outputs", "Pass", "Phases", "QueryKeyValue"),
    *("Recognition", "Source", "TaskPlan"),
}
"""Types of public fields that users have no need of."""
WIDTH = 88


def home_of(value: Any) -> str:
    """The package of a class or function."""
    package = value.__module__.removeprefix("memoro.").split(".")[0]
    return JOINED.get(package, package)


def public() -> dict[str, Any]:
    """The public names: those of memoro, and of modules that need an extra."""
    found = {name: getattr(memoro, name) for name in memoro.__all__}
    for module in (import_module(f"memoro.{name}") for name in EXTRA):
        own = {
            name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        found |= {name: value for name, value in own.items() if inspect.isclass(value) and not name.startswith("_")}
    return found


def returned() -> dict[str, type]:
    """Classes that users meet without importing them: what public functions and methods return or take, and the types
    of their fields."""
    names = public()
    found: dict[str, type] = {}
    waiting = list(names.values())
    while waiting:
        value = waiting.pop()
        members = [member for _, member in members_of(value)] if inspect.isclass(value) else []
        for one in [value, *members]:
            for kind in hinted(one):
                own = kind.__module__.startswith("memoro.") and not kind.__name__.startswith("_")
                if own and kind.__name__ not in {*names, *found, *INSIDE} and kind.__doc__:
                    found[kind.__name__] = kind
                    waiting.append(kind)
    return dict(sorted(found.items()))


def hinted(value: Any) -> Iterator[type]:
    """The classes in the annotations of a function, a property or a class's fields."""
    value = value.fget if isinstance(value, property) else getattr(value, "func", value)
    waiting: list[Any] = []
    for one in [value, *(get_overloads(value) if inspect.isfunction(value) else ())]:
        with suppress(NameError, TypeError, AttributeError):  # names that only type checkers import
            waiting += get_type_hints(one).values()
    while waiting:
        one = waiting.pop()
        waiting += get_args(one)
        if inspect.isclass(one) and not get_args(one):
            yield one


def members_of(owner: type) -> list[tuple[str, Any]]:
    """Public methods and properties that memoro defines, in the order of the source."""
    found: dict[str, Any] = {}
    for base in reversed([base for base in owner.__mro__ if base.__module__.startswith("memoro")]):
        for name, member in vars(base).items():
            kinds = (property, cached_property, classmethod, staticmethod)
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds)):
                found[name] = member
    return list(found.items())


def field_texts(owner: type) -> dict[str, str]:
    """The string below each field in the source: what it is for."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not base.__module__.startswith("memoro"):
            continue
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # made at run time
            continue
        statements = getattr(body, "body", [])
        for field, text in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = str(getattr(text.value, "value", ""))
    return found


def text_of(value: Any) -> str:
    """A docstring as Markdown, with its examples as Python."""
    text = inspect.cleandoc((value.fget if isinstance(value, property) else value).__doc__ or "")
    if inspect.isclass(value) and dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):
        return ""
    return re.sub(r"(?m)(?:^ {4}.*\n?|^\n(?= {4}))+", _fence, text)


def _fence(found: re.Match[str]) -> str:
    return f"\n```python\n{textwrap.dedent(found[0]).strip()}\n```\n"


def written(kind: Any) -> str:
    """A type as it is in the source, without the modules that it comes from."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text).replace("NoneType", "None")


def signature(name: str, value: Callable[..., Any]) -> str:
    """The call with types and defaults, a line for each argument if it is long."""
    try:
        shape = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    words, starred = [], False
    for one in shape.parameters.values():
        if one.name in {"self", "cls"}:
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or one.kind in {one.KEYWORD_ONLY, one.VAR_POSITIONAL}
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        kind = "" if one.annotation is one.empty else f": {written(one.annotation)}"
        plain = one.default is one.empty
        default = "" if plain else f"{' = ' if kind else '='}{_default(one.default)}"
        words.append(f"{star}{one.name}{kind}{default}")
    empty = shape.return_annotation is shape.empty or inspect.isclass(value)
    end = "" if empty else f" -> {written(shape.return_annotation)}"
    line = f"{name}({', '.join(words)}){end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def _default(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return re.sub(r"<function (\w+).*>|<factory>", r"\1…", repr(value))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def fields_table(owner: type) -> str:
    """The fields of a dataclass: type, default and what they are for."""
    if not dataclasses.is_dataclass(owner):
        return ""
    options, texts = {one.field: one for one in read_options(owner).values()}, field_texts(owner)
    rows = []
    for field in dataclasses.fields(owner):
        if field.name.startswith("_"):
            continue
        option = options.get(field.name)
        default = "" if field.default is dataclasses.MISSING else _default(field.default)
        default = f"`{default}`" if default else "" if field.default_factory is dataclasses.MISSING else "its own"
        text = " ".join(filter(None, [option.help if option else "", texts.get(field.name, "")]))
        rows.append(f"| `{field.name}` | `{cell(written(field.type))}` | {cell(default)} | {cell(text)} |")
    if not rows:
        return ""
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def entry(name: str, value: Any, level: int = 2) -> str:
    """A class or function with all that users can call on it."""
    prefix = "memoro." if name in memoro.__all__ else "memoro.sklearn." if value.__module__ == "memoro.sklearn" else ""
    parts = [f"{'#' * level} {name} {{ #{name} }}", ""]
    plain = inspect.isclass(value) and (issubclass(value, Exception) or not hasattr(value, "__init__"))
    if not plain:
        parts += ["```python", signature(f"{prefix}{name}", value), "```", ""]
    parts += [text_of(value), ""]
    if not inspect.isclass(value) or plain:
        return "\n".join(parts)
    parts.append(fields_table(value))
    attributes = []
    for member, found in members_of(value):
        text = text_of(found)
        if isinstance(found, (property, cached_property)):
            get = found.fget if isinstance(found, property) else found.func
            kind = written(inspect.signature(get).return_annotation)
            attributes.append(f"| `{member}` | `{cell(kind)}` | {cell(text)} |")
        elif text:
            call = getattr(found, "__func__", found)
            parts += [f"{'#' * (level + 1)} {member} {{ #{name}.{member} }}", ""]
            parts += ["```python", signature(f"{name}.{member}", call), "```", "", text, ""]
    if attributes:
        at = next((at for at, part in enumerate(parts) if part.startswith("#" * (level + 1) + " ")), len(parts))
        parts.insert(at, "\n".join(["| attribute | type | meaning |", "|---|---|---|", *attributes, ""]))
    return "\n".join(parts)


def link_names(text: str, places: Mapping[str, str]) -> str:
    """Names in backticks, outside of code blocks and headings, become links to where they are described."""

    def link(found: re.Match[str]) -> str:
        name = found[1].removeprefix("memoro.")
        return f"[`{found[1]}`]({places[name]})" if name in places else found[0]

    parts = re.split(r"(?ms)(^```.*?^```$|^#.*?$)", text)
    return "".join(part if at % 2 else re.sub(r"(?<!\[)`([\w.]+)`(?!\])", link, part) for at, part in enumerate(parts))


def python_pages() -> dict[str, str]:
    """The pages of the reference by file name."""
    names, more = public(), returned()
    pages: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for name, value in [*names.items(), *more.items()]:
        place = home_of(value) if name in names or home_of(value) in PAGES else "training"
        pages.setdefault(place, []).append(name)
        places[name] = f"{place}.md#{name}"
        if inspect.isclass(value):
            places |= {f"{name}.{member}": f"{place}.md#{name}" for member, _ in members_of(value)}
    known = {**names, **more}
    texts: dict[str, str] = {}
    for page in [*PAGES, *sorted(pages.keys() - PAGES.keys())]:
        if page not in pages:
            continue
        own = sorted(pages[page], key=lambda name: (name not in names, inspect.isclass(known[name]), name))
        parts = [f"# {PAGES.get(page, page)}", ""]
        for number, name in enumerate(own):
            if name not in names and (not number or own[number - 1] in names):
                parts += ["---", "", "The following types are returned or taken by the above, and need no import.", ""]
            parts.append(entry(name, known[name]))
        texts[f"{page}.md"] = link_names("\n".join(parts), places)
    rows = [
        f"| [`{name}`]({places[name]}) | {cell(text_of(value).split(chr(10) + chr(10))[0].split('. ')[0])} |"
        for name, value in names.items()
    ]
    index = [
        "# Python API",
        "",
        "All public names: `memoro.NAME`, and the estimators of `memoro.sklearn`.",
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]
    texts["index.md"] = link_names("\n".join(index), places)
    return texts
