"""A real browser: Debian's Chromium, at the widths of a desktop and of a phone, light and dark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from rich.console import Console

from memoro.demo import run_demo

torch.set_num_threads(1)
expect.set_options(timeout=60_000)  # on a busy machine; what is expected comes at once on an idle one

SCREENS = {"desktop": (1280, 900), "phone": (360, 740)}
KEPT = (360, 390, 430, 768)
"""Widths of phones and of a tablet."""
PICTURES = Path(__file__).parent / "screenshots"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "chromium is not on the PATH: make test-browser says how to install it"
    with sync_playwright() as driver:
        # Containers run as root, where Chromium's sandbox cannot start; the pages are our own.
        running = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo: that of MEMORO_DEMO, which `memoro demo` has written, or one with little training."""
    if folder := os.environ.get("MEMORO_DEMO"):
        return Path(folder)
    path = tmp_path_factory.mktemp("demo")
    run_demo(Console(quiet=True), path, letters=80, digits=80, epochs=1)
    return path


OVERLAPS = """() => {
    // Boxes of what is seen of each text, without what its surroundings cut off.
    const boxes = [], problems = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    while (walker.nextNode()) {
        const node = walker.currentNode, owner = node.parentElement;
        if (!node.data.trim() || owner.closest('script, title, style, noscript') || !owner.checkVisibility()) continue;
        let [left, top, right, bottom] = [-Infinity, -Infinity, Infinity, Infinity];
        for (let one = owner; one; one = one.parentElement) {
            if (one === document.body || getComputedStyle(one).overflowX === 'visible') continue;
            const box = one.getBoundingClientRect();
            [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
            [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
        }
        range.selectNodeContents(node);
        for (const box of range.getClientRects()) {
            const [x, y] = [Math.max(left, box.left), Math.max(top, box.top)];
            const own = [x, y, Math.min(right, box.right), Math.min(bottom, box.bottom)];
            if (own[2] - x > 1 && own[3] - y > 1) boxes.push([own, node]);
        }
        if (owner.closest('svg')) continue;
        for (const word of node.data.matchAll(/(?<![^\\s])[\\p{L}\\d]{1,16}[.,:;]?(?![^\\s])/gu)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
            if (lines.size > 1) problems.push(`broken: ${word[0]}`);
        }
    }
    boxes.sort((one, other) => one[0][1] - other[0][1]);
    boxes.forEach(([box, node], at) => {
        for (const [other, second] of boxes.slice(at + 1)) {
            if (other[1] > box[3] - 2) break;
            const wide = Math.min(box[2], other[2]) - Math.max(box[0], other[0]);
            const high = Math.min(box[3], other[3]) - Math.max(box[1], other[1]);
            if (node !== second && wide > 2 && high > 4) problems.push([node.data.trim(), second.data.trim()]);
        }
    });
    return problems;
}"""
"""Texts that lie over each other, and short words that are broken in two."""


@dataclass
class Shown:
    """A page in the browser, and what went wrong since it was opened."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)

    def keep(self, name: str, *, whole: bool = True) -> Path:
        """Takes a screenshot."""
        PICTURES.mkdir(exist_ok=True)
        path = PICTURES / f"{name}.png"
        self.page.screenshot(path=path, full_page=whole)
        return path

    def check_layout(self) -> None:
        """Nothing is wider than the screen, and no text of a drawing is cut."""
        outside = self.run(
            """[...document.querySelectorAll('main *')].filter(one => {
                const box = one.getBoundingClientRect();
                const inside = one.closest('.scroll') || one.closest('details:not([open])') || one.closest('.seen');
                return !inside && box.width && (box.left < 0 || box.right > document.documentElement.clientWidth + 1);
            }).map(one => one.outerHTML.slice(0, 120))"""
        )
        assert outside == []
        assert self.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        cut = self.run(
            """[...document.querySelectorAll('svg text')].filter(one => {
                const own = one.getBoundingClientRect(), svg = one.ownerSVGElement.getBoundingClientRect();
                return own.left < svg.left - 1 || own.right > svg.right + 1 || own.top < svg.top - 1
                    || own.bottom > svg.bottom + 1;
            }).map(one => one.textContent)"""
        )
        assert cut == []
        assert self.run(f"({OVERLAPS})()") == []

    def check_widths(self, name: str) -> None:
        """The layout at every width of a screen, and a screenshot at those of phones and of a tablet."""
        for width in sorted({*range(320, 1601, 8), *KEPT}):
            self.page.set_viewport_size({"width": width, "height": 900})
            try:
                self.check_layout()
            except AssertionError:
                self.keep(f"{name}-broken-{width}")
                raise
            if width in KEPT:
                self.keep(f"{name}-{width}")

    def check_contrast(self, dark: bool) -> None:
        """All text can be read: WCAG's AA on the page's own ground."""
        back = luminance(self.run("getComputedStyle(document.body).backgroundColor"))
        assert (back < 0.1) is dark
        colors = self.run(
            """[...document.querySelectorAll('main *')].filter(one => one.innerText && !one.children.length
                && !one.closest('.main')).map(one => getComputedStyle(one).color)"""
        )
        for color in set(colors):
            light, low = sorted((back, luminance(color)), reverse=True)
            assert (light + 0.05) / (low + 0.05) >= 4.5, f"{color}: less contrast than WCAG's AA"


def luminance(color: str) -> float:
    """Relative luminance of `rgb(…)`, as WCAG defines it."""
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def watch(context: BrowserContext, own: tuple[str, ...]) -> Shown:
    """A new page. Requests to addresses that do not begin with one of `own` are problems."""
    shown = Shown(context.new_page())
    told = shown.problems.append
    shown.page.on("console", lambda message: told(f"console: {message.text}"))
    shown.page.on("pageerror", lambda error: told(f"error: {error}"))
    shown.page.on("requestfailed", lambda asked: told(f"failed: {asked.url[:80]}"))
    shown.page.on("dialog", lambda dialog: (told(f"dialog: {dialog.message}"), dialog.dismiss()))
    shown.page.on("request", lambda asked: None if asked.url.startswith(own) else told(f"outside: {asked.url}"))
    return shown


def screen_context(browser: Browser, screen: str, scheme: str) -> BrowserContext:
    width, height = SCREENS[screen]
    phone = screen == "phone"
    how: dict[str, Any] = {"color_scheme": scheme, "is_mobile": phone, "has_touch": phone}
    return browser.new_context(viewport={"width": width, "height": height}, **how)


@pytest.fixture(params=[(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")], ids="-".join)
def show(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that opens a file, or the page of a server, and keeps a screenshot of all of it."""
    screen, scheme = request.param
    context = screen_context(browser, screen, scheme)

    def opened(place: Path | str, name: str) -> Shown:
        own = ("file:", "data:") if isinstance(place, Path) else (place, "blob:")
        shown = watch(context, own)
        shown.page.goto(place.resolve().as_uri() if isinstance(place, Path) else place)
        shown.keep(f"{name}-{screen}-{scheme}")
        return shown

    yield opened
    context.close()
