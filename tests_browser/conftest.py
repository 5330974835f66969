"""A real browser: Debian's Chromium, at the widths of a desktop and of a phone, light and dark."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from rich.console import Console

from memoro.demo import run_demo

sys.path.append(str(Path(__file__).parents[1] / "tests"))
torch.set_num_threads(1)
expect.set_options(timeout=60_000)  # on a busy machine; what is expected comes at once on an idle one

SCREENS = {"desktop": (1280, 900), "phone": (360, 740)}
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
        assert self.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        outside = self.run(
            """[...document.querySelectorAll('main *')].filter(one => {
                const box = one.getBoundingClientRect();
                const inside = one.closest('.scroll') || one.closest('details:not([open])') || one.closest('.seen');
                return !inside && box.width && (box.left < 0 || box.right > document.documentElement.clientWidth + 1);
            }).map(one => one.outerHTML.slice(0, 120))"""
        )
        assert outside == []
        cut = self.run(
            """[...document.querySelectorAll('svg text')].filter(one => {
                const own = one.getBoundingClientRect(), svg = one.ownerSVGElement.getBoundingClientRect();
                return own.left < svg.left - 1 || own.right > svg.right + 1 || own.top < svg.top - 1
                    || own.bottom > svg.bottom + 1;
            }).map(one => one.textContent)"""
        )
        assert cut == []

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
