"""The page at /: its files, headers, weight and samples. What it does is tested in a browser (tests_browser)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving import Running, backbone, fill, folder, picture, serving
from typer.testing import CliRunner

from memoro.backbones import Backbone
from memoro.cli import app
from memoro.engine.explain import _RAMP
from memoro.images import Preprocessing
from memoro.pages.elements import read_style
from memoro.serve.app import SAMPLES, read_files

__all__ = ["backbone", "folder"]  # fixtures

READ = "read-secret"


@pytest.fixture(scope="module")
def server(backbone: Backbone, folder: Path) -> Iterator[Running]:
    with serving(backbone, folder, read_token=READ) as running:
        yield running


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.found if name in attributes]


@pytest.fixture(scope="module")
def index(server: Running) -> Elements:
    return Elements(server.request("GET", "/")[2].decode())


def test_the_page_is_served_without_a_token_and_nothing_else_is(server: Running) -> None:
    status, headers, page = server.request("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page == read_files()["index.html"]
    for path in ("/v1/tasks", "/docs", "/metrics", "/page", "/pages/x", "/v1/tasks/pets"):
        assert server.request("GET", path)[0] == 401, path
    assert server.request("POST", "/v1/predict", picture())[0] == 401
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/page/samples/nothing.png"):
        assert server.request("GET", path)[0] == 404, path


def test_headers(server: Running) -> None:
    for path in ("/", *(f"/page/{name}" for name in read_files())):
        status, headers, data = server.request("GET", path)
        assert (status, len(data) > 0) == (200, True), path
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' blob:"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
    types = {path: server.request("GET", path)[1]["content-type"] for path in ("/page/page.js", "/page/style.css")}
    assert types == {"/page/page.js": "text/javascript; charset=utf-8", "/page/style.css": "text/css; charset=utf-8"}
    assert server.request("GET", "/", host="evil.example")[0] == 403


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(index: Elements) -> None:
    scripts = [attributes for tag, attributes in index.found if tag == "script"]
    assert [script.get("type") for script in scripts] == ["module"]
    assert all(script.get("src") for script in scripts)
    assert not any(tag in {"style", "iframe", "object", "base"} for tag, _ in index.found)
    assert not any(name == "style" or name.startswith("on") for _, attributes in index.found for name in attributes)
    for name, data in read_files().items():
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|//[a-z]+\.|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text
        ), name


def test_every_file_that_is_named_is_served_and_every_file_is_named(index: Elements) -> None:
    named = {link.removeprefix("page/") for link in [*index.values("src"), *index.values("href")] if "page/" in link}
    scripts = "".join(data.decode() for name, data in read_files().items() if name.endswith(".js"))
    imported = set(re.findall(r'from "\./([a-z]+\.js)"', scripts))
    samples = {f"samples/{name}.png" for name in SAMPLES}
    assert (named | imported) - samples == set(read_files()) - {"index.html"}
    assert {name for name in named if name.startswith("samples/")} == samples
    assert index.values("data-sample") == list(SAMPLES)


def test_what_screen_readers_need(index: Elements) -> None:
    """Every control has a name, every image a text, and what changes is announced."""
    assert all(attributes.get("alt") for tag, attributes in index.found if tag == "img")
    roles = {attributes.get("id"): attributes.get("role") for _, attributes in index.found}
    assert {roles[name] for name in ("status", "task-status")} == {"status"}
    assert {roles[name] for name in ("problem", "task-problem")} == {"alert"}
    ids = index.values("id")
    assert len(ids) == len(set(ids))
    for reference in [*index.values("aria-labelledby"), *index.values("aria-describedby"), *index.values("for")]:
        assert reference in ids
    scripts = "".join(data.decode() for name, data in read_files().items() if name.endswith(".js"))
    asked = set(re.findall(r'byId\("([a-z-]+)"\)', scripts))
    assert asked <= set(ids), "the scripts use only what is on the page"
    assert len(asked) > 10


def test_the_page_is_light() -> None:
    weight = sum(map(len, read_files().values()))
    assert 10_000 < weight < 100_000


def test_the_look_is_that_of_the_reports(server: Running) -> None:
    assert server.request("GET", "/page/style.css")[2].decode() == read_style()
    assert "prefers-color-scheme: dark" in read_style()


def test_heat_maps_have_the_colours_of_explain() -> None:
    (text,) = re.findall(r"const RAMP = (\[\[.*?\]\]);", read_files()["answers.js"].decode())
    assert np.array_equal(np.array([[int(n) for n in re.findall(r"\d+", row)] for row in text.split("],")]), _RAMP)


def test_samples_are_drawn_and_differ(server: Running) -> None:
    images = {name: server.request("GET", f"/page/samples/{name}.png")[2] for name in SAMPLES}
    assert len(set(images.values())) == len(SAMPLES) >= 8
    for name, data in images.items():
        image = Image.open(io.BytesIO(data))
        assert min(image.size) >= 64, name
        assert np.asarray(image).std() > 5, name
        assert len(data) < 20_000
        found = server.predict(data, authorization=f"Bearer {READ}")
        assert len(found["images"][0]["answers"]) == 6
    assert images == {name: server.request("GET", f"/page/samples/{name}.png")[2] for name in SAMPLES}


def test_the_files_are_in_the_package() -> None:
    """Wheels take everything under src/memoro that git does not ignore."""
    folder = Path(str(files("memoro.serve"))) / "static"
    assert {path.name for path in folder.iterdir()} == set(read_files()) - {"style.css"}
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().split()
    assert not any(part.strip("/") in {"static", "serve"} or part.startswith("*.js") for part in ignored)


def test_why_attaching_is_off(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path, backbone)
    with serving(backbone, tmp_path / "tags.safetensors") as server:
        listed = server.request("GET", "/v1/tasks")[2]
        assert (listed["writable"], "--tasks FOLDER" in listed["reason"]) == (False, True)
        assert Preprocessing.from_json(listed["backbone"]["preprocessing"]) == backbone.preprocessing
    with serving(backbone, tmp_path) as server:
        listed = server.request("GET", "/v1/tasks")[2]
        assert (listed["writable"], listed["reason"]) == (True, None)


def test_serve_opens_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself, without a browser and without waiting for Ctrl-C."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("memoro.serve.server.run_server", lambda store, options, started: started("http://127.0.0.1:1"))
    for more, right in ((["--open"], ["http://127.0.0.1:1"]), ([], [])):
        opened.clear()
        found = CliRunner().invoke(app, ["serve", "--tasks", str(tmp_path), *more])
        assert (found.exit_code, opened) == (0, right), found.output
