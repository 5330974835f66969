"""Reports and the demo's page in a real browser: nothing is cut, everything is loaded, nothing runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import screen_context, watch
from PIL import Image, ImageDraw
from playwright.sync_api import Browser

import memoro

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
LABELS = {
    HOSTILE.replace("/", "∕"): (200, 40, 40),
    "green & a name that goes on and on " * 3: (60, 170, 60),
    "common WWW": (40, 60, 200),
}


def draw(rng: np.random.Generator, color: tuple[int, int, int], radius: int) -> Image.Image:
    image = Image.fromarray(rng.integers(90, 160, (15, 20, 3), dtype=np.uint8)).resize((120, 90))
    x, y = (int(rng.integers(radius, edge - radius)) for edge in image.size)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> dict[str, Path]:
    """A page of every kind, each of a real training."""
    root, rng = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)
    rows: list[tuple[str, str, int]] = []
    (root / "table").mkdir()
    for number in range(48):
        label, color = list(LABELS.items())[number % 3]
        radius = int(rng.integers(8, 35))
        image = draw(rng, color, radius)
        image.save(root / "table" / f"{number}.png")
        rows.append((f"{number}.png", label, radius))
        folder = root / "classes" / ("test" if number % 4 == 0 else "train") / label[:60]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
        if number == 4:  # in train under another name and at another size
            image.resize((100, 75)).save(root / "classes" / "train" / label[:60] / "copy.png")
    (folder / f"{HOSTILE.replace('/', '')}.jpg").write_bytes(b"no image")
    for name, column in (("labels", 1), ("number", 2)):
        with (root / "table" / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("path", name), *((row[0], row[column]) for row in rows)])
    how: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "cache": False}
    classes = {HOSTILE[:40].replace("/", ""): root / "classes"}
    token: dict[str, Any] = {**how, "regime": "side"}  # alone, it makes mistakes, which the page shows
    memoro.train(classes, folder=root / "a", lr=[0.1, 0.3], folds=0, **token)
    memoro.train(root / "table" / "labels.csv", folder=root / "b", lr=0.1, **how)
    memoro.train(root / "table" / "number.csv", folder=root / "c", lr=0.1, regime="head", **how)
    found = {
        name: root / folder / "report.html" for name, folder in (("classes", "a"), ("labels", "b"), ("numbers", "c"))
    }
    return {**found, "demo": demo / "report.html"}


@pytest.mark.parametrize("name", ["classes", "labels", "numbers", "demo"])
def test_a_page_is_whole(pages: dict[str, Path], show: Any, name: str) -> None:
    shown = show(pages[name], name)
    assert shown.problems == []
    shown.check_layout()
    images = shown.run("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt])")
    assert len(images) >= 6
    assert all(complete and width > 0 and alt for complete, width, alt in images)
    scrolling = shown.run(
        """[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)
            .map(one => one.innerText.slice(0, 80))"""
    )
    assert scrolling == [], "three classes and a few columns fit a phone"


@pytest.mark.parametrize("name", ["classes", "labels", "numbers", "demo"])
def test_nothing_overlaps_at_any_width(pages: dict[str, Path], browser: Browser, name: str) -> None:
    context = screen_context(browser, "desktop", "light")
    shown = watch(context, ("file:", "data:"))
    shown.page.goto(pages[name].resolve().as_uri())
    shown.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    shown.check_widths(f"width-{name}")
    context.close()


def test_the_check_for_overlaps_can_fail(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    over, narrow = "<p style='margin-top: -1.2em'>over</p>", "<p style='width: 1em; overflow-wrap: anywhere'>narrow</p>"
    context = screen_context(browser, "desktop", "light")
    for part, message in ((over, "over"), (narrow, "broken: narrow"), ("", None)):
        page.write_text(f"<main><p style='margin: 0'>under</p>{part}</main>")
        shown = watch(context, ("file:",))
        shown.page.goto(page.as_uri())
        if message is None:
            shown.check_layout()
        else:
            with pytest.raises(AssertionError, match=message):
                shown.check_layout()
    context.close()


def test_the_check_for_cut_parts_can_fail(show: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<main><div style='width: 3000px'>wide</div><img src='missing.png' alt=''></main>")
    shown = show(page, "broken")
    assert shown.problems
    with pytest.raises(AssertionError, match="wide"):
        shown.check_layout()


def test_labels_and_file_names_stay_text(pages: dict[str, Path], show: Any) -> None:
    shown = show(pages["classes"], "classes")
    assert shown.run("document.scripts.length") == 0
    assert shown.run("document.querySelectorAll('[onerror], img:not([src^=\"data:\"])').length") == 0
    assert "onerror=" in shown.run("document.body.innerText")


def test_the_policy_of_a_page_keeps_scripts_out(pages: dict[str, Path], show: Any, tmp_path: Path) -> None:
    """Even if a label got through as HTML: the page's own policy allows no script and no other host."""
    page = tmp_path / "page.html"
    page.write_text(pages["classes"].read_text().replace("</main>", f"{HOSTILE}</main>"))
    shown = show(page, "attacked")
    assert any("Content Security Policy" in problem for problem in shown.problems)
    assert not any(problem.startswith("dialog") for problem in shown.problems)


def test_both_colour_schemes_can_be_read(pages: dict[str, Path], show: Any, request: pytest.FixtureRequest) -> None:
    shown = show(pages["classes"], "classes")
    shown.check_contrast(dark=request.node.name.endswith("-dark]"))
