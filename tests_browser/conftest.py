"""A real browser: Debian's Chromium, at the widths of a desktop and of a phone, light and dark."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "tests"))
torch.set_num_threads(1)

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


@dataclass
class Shown:
    """A page in the browser, and what went wrong while it was loaded."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture(params=[(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")], ids="-".join)
def show(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that opens a file and keeps a screenshot of all of it."""
    screen, scheme = request.param
    width, height = SCREENS[screen]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, is_mobile=screen == "phone"
    )

    def opened(path: Path, name: str) -> Shown:
        shown = Shown(context.new_page())
        told = shown.problems.append
        shown.page.on("console", lambda message: told(f"console: {message.text}"))
        shown.page.on("pageerror", lambda error: told(f"error: {error}"))
        shown.page.on("requestfailed", lambda asked: told(f"failed: {asked.url[:80]}"))
        shown.page.on("dialog", lambda dialog: (told(f"dialog: {dialog.message}"), dialog.dismiss()))
        shown.page.on(
            "request",
            lambda asked: None if asked.url.startswith(("file:", "data:")) else told(f"outside: {asked.url}"),
        )
        shown.page.goto(path.resolve().as_uri())
        PICTURES.mkdir(exist_ok=True)
        shown.page.screenshot(path=PICTURES / f"{name}-{screen}-{scheme}.png", full_page=True)
        return shown

    yield opened
    context.close()
