"""The site that `make docs` builds, opened as files: no other host, readable on a phone and by a screen reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Shown, screen_context, watch
from playwright.sync_api import Browser, expect

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
KEPT = ("index", "start", "how", "tagging", "reference/training", "reference/commands", "measurements")
"""Pages with screenshots."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "cat.semantics", "cat.structure", "best-practice"]
OFF = ["landmark-unique"]  # the theme has its navigation twice, once for phones
SMALLEST = 9.5
"""Pixels of the smallest text of a drawing on a phone."""


def test_the_site_is_there_and_small() -> None:
    assert len(PAGES) > 40, "the site is not there: run `make docs`"
    assert {"index.html", "start.html", "reference/commands.html", "reference/training.html"} <= set(PAGES)
    assert sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file()) < 15e6


@pytest.fixture(scope="module", params=[("desktop", "light"), ("phone", "dark")], ids="-".join)
def show(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Any]:
    screen, scheme = request.param
    context = screen_context(browser, screen, scheme)

    def opened(place: Path, name: str | None = None) -> Shown:
        shown = watch(context, ("file:", "data:", "blob:"))
        shown.page.goto(place.as_uri())
        if name is not None:
            shown.keep(f"site-{name.replace('/', '-')}-{screen}-{scheme}")
        return shown

    yield opened
    context.close()


def faults(shown: Shown) -> list[str]:
    """What axe-core finds, with the elements."""
    assert AXE.is_file(), "axe-core is not there: make test-browser installs it"
    shown.page.add_script_tag(path=AXE)
    found = shown.page.evaluate(
        """([tags, off]) => axe.run({runOnly: {type: 'tag', values: tags}, resultTypes: ['violations'], preload: false,
            rules: Object.fromEntries(off.map(name => [name, {enabled: false}]))})""",
        [RULES, OFF],
    )
    return [
        f"{fault['id']}: {node['html'][:150]} {node['failureSummary'][:200]}"
        for fault in found["violations"]
        for node in fault["nodes"][:3]
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_read(show: Any, page: str) -> None:
    name = page.removesuffix(".html")
    shown = show(SITE / page, name if name in KEPT else None)
    try:
        assert shown.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        sizes = shown.run(
            """[...document.querySelectorAll('article svg text')].map(one =>
                parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a)"""
        )
        assert all(size >= SMALLEST for size in sizes)
        images = shown.run("[...document.images].map(one => [one.complete, one.naturalWidth, one.alt])")
        assert all(complete and width > 0 and alt for complete, width, alt in images)
        assert faults(shown) == []
        assert shown.problems == []
    finally:
        shown.page.close()


def test_search_works_from_files(show: Any) -> None:
    shown = show(SITE / "how.html")
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("low-rank weights")
    expect(shown.page.locator(".md-search-result__item").first).to_be_visible()
    assert shown.problems == []
    shown.page.close()


def test_the_colours_can_be_switched(show: Any) -> None:
    shown = show(SITE / "how.html")
    seen = "getComputedStyle(document.querySelector('.drawing rect')).stroke"
    before = shown.run(seen)
    shown.page.locator("label.md-header__button[for^=__palette]:visible").click()
    assert shown.run(seen) != before, "drawings follow the colours of the page"
    shown.page.close()


def test_the_checks_can_fail(show: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><html lang=en><title>a</title><main><h1>a</h1>"
        "<h4 style='color: #999; background: #fff'>pale words</h4>"
        "<img src='https://example.org/a.png' alt='c'></main>"
    )
    shown = show(page)
    assert any(problem.startswith("outside: https://example.org") for problem in shown.problems)
    assert {fault.split(":")[0] for fault in faults(shown)} >= {"color-contrast", "heading-order"}
    shown.page.close()
