"""Labelling in a real browser, on a real `memoro teach`: from a folder of drawn images to a served task."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PICTURES, Shown, screen_context, watch
from PIL import Image, ImageFont
from playwright.sync_api import Browser, BrowserContext, Page, expect

from memoro.pages.drawing import draw_apple, draw_letter

LETTERS = "ADEM"
DOCS = Path(__file__).parents[1] / "docs"
MANY = int(os.environ.get("MEMORO_TEACH_IMAGES", "80"))
"""Images of the test that prints how fast the page is: 1000 for the figures of results/teach.md."""
FIRST = "#teach-grid .shot >> nth=0"


def fill(folder: Path, count: int) -> Path:
    """Drawn letters, whose names say which ones, and a file that is no image."""
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for at in range(count):
        letter = LETTERS[int(generator.integers(len(LETTERS)))]
        draw_letter(letter, ImageFont.load_default, generator).save(folder / f"{at:05}-{letter}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n junk")
    return folder


@dataclass
class Teaching:
    """A process of `memoro teach`."""

    folder: Path
    options: tuple[str, ...] = ()
    url: str = ""
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def start(self) -> Teaching:
        port = self.url.rpartition(":")[2] or "0"
        tasks = str(self.folder.parent / "tasks")
        command = [sys.executable, "-m", "memoro", "teach", str(self.folder), "--tasks", tasks, "--port", port]
        self.process = subprocess.Popen([*command, *self.options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                self.url = found[1]
                return self
        raise AssertionError("memoro teach did not start")

    def stop(self, how: int = signal.SIGTERM) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(how)
        self.process.wait(60)
        self.process.stderr.close()

    def labels(self) -> dict[str, str]:
        """What the table says last of each image."""
        with (self.folder / "labels.csv").open() as file:
            return {row["path"]: row[next(iter(row.keys() - {"path", "decision"}))] for row in csv.DictReader(file)}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that starts `memoro teach` on so many drawn images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    started: list[Teaching] = []

    def start(*options: str, count: int = 48) -> Teaching:
        started.append(Teaching(fill(tmp_path / "letters", count), options).start())
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    found = screen_context(browser, "desktop", "light")
    yield found
    found.close()


def visit(context: BrowserContext, url: str, read: bool = True) -> Shown:
    """The page, once it shows images, and has read all of them."""
    shown = watch(context, (url, "blob:"))
    shown.page.goto(url)
    expect(shown.page.locator(FIRST)).to_be_visible()
    if read:
        expect(shown.page.locator("#teach-progress")).to_be_hidden()
        shown.page.reload()  # which ends requests
        shown.problems[:] = [problem for problem in shown.problems if not problem.startswith("failed:")]
        expect(shown.page.locator(FIRST)).to_be_visible()
        look = "[...document.querySelectorAll('.shot:not(.broken) img')].every(one => one.src && one.complete)"
        wait_until(shown.page, f"() => {look}")
    return shown


def focused(page: Page) -> str:
    """The path of the image that has the focus."""
    return str(page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")).partition(",")[0]


def letter_of(path: str) -> str:
    return Path(path).stem.rpartition("-")[2]


def press_label(page: Page) -> None:
    """Labels the image that has the focus by the key of its letter."""
    page.keyboard.press(str(LETTERS.index(letter_of(focused(page))) + 1))


def to_open(page: Page) -> None:
    """Goes to the first image that has not been decided."""
    page.keyboard.press("Home")
    while not page.evaluate("document.activeElement.classList.contains('open-shot')"):
        page.keyboard.press("ArrowRight")


def tab_to(page: Page, test: str) -> None:
    """Presses Tab until the focused element passes a test in JavaScript."""
    for _ in range(60):
        if page.evaluate(f"(one => {test})(document.activeElement)"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the keyboard does not reach {test}")


def wait_until(page: Page, test: str, given: str | None = None) -> None:
    """Waits until a function in JavaScript is true. The page's own rules forbid what `wait_for_function` does."""
    page.evaluate(
        f"""async given => {{
            const end = Date.now() + 60_000;
            while (!await ({test})(given)) {{
                if (Date.now() > end) throw new Error('waited for a minute');
                await new Promise(done => setTimeout(done, 10));
            }}
        }}""",
        given,
    )


def settled(page: Page) -> None:
    """Waits until there are guesses from all labels."""
    wait_until(page, "() => fetch('v1/teach').then(one => one.json()).then(now => now.solved === now.version)")


def test_the_whole_way_by_keyboard_alone(context: BrowserContext, run: Any) -> None:
    teaching = run()
    shown = visit(context, teaching.url)
    page, frames = shown.page, [shown.keep("teach-start", whole=False)]
    tab_to(page, "one.getAttribute('role') === 'option'")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "dashed", "the focus can be seen"
    for letter in LETTERS:  # the first image of each letter: its name is typed
        while letter_of(focused(page)) != letter:
            page.keyboard.press("ArrowRight")
        page.keyboard.press("/")
        page.keyboard.type(letter)
        page.keyboard.press("Enter")
        expect(page.locator("#teach-status")).to_have_text(f"1 image: labelled {letter}.")
        expect(page.locator("#teach-keys button")).to_have_count(LETTERS.index(letter) + 1)
        page.keyboard.press("Home")
    frames.append(shown.keep("teach-first", whole=False))
    open_ones = page.locator(".open-shot")
    to_open(page)
    while (left := open_ones.count()) > 4:  # the others by digits, as fast as the keyboard
        press_label(page)
        expect(open_ones).to_have_count(left - 1)
        if left % 6 == 0:
            settled(page)
            frames.append(shown.keep(f"teach-way-{left}", whole=False))
    settled(page)
    expect(page.locator("#teach-figure")).to_contain_text("right")
    expect(page.locator("#teach-heard")).to_contain_text("New guesses from 20 labels")
    shown.run("window.scrollTo(0, 0)")
    shown.keep("teach-labelled", whole=False)
    wrong = focused(page)  # a slip, undone
    page.keyboard.press(str(4 - LETTERS.index(letter_of(wrong))))
    expect(open_ones).to_have_count(3)
    page.keyboard.press("u")
    expect(page.locator("#teach-status")).to_contain_text("Undone: 1 image.")
    assert teaching.labels()[wrong] == ""
    for _ in range(4):
        to_open(page)
        press_label(page)
        page.wait_for_timeout(100)
    expect(open_ones).to_have_count(24)  # the next ones came by themselves
    settled(page)
    page.keyboard.press("Enter")
    expect(page.locator("#teach-large")).to_be_visible()
    frames.append(shown.keep("teach-large", whole=False))
    name = page.locator("#teach-large p").inner_text().partition(",")[0]
    page.keyboard.press(str(LETTERS.index(letter_of(name)) + 1))
    expect(page.locator("#teach-large p")).not_to_contain_text(name)
    page.keyboard.press("Escape")
    wait_until(page, "name => document.activeElement.matches('.shot:not([aria-label^=\"' + name + '\"])')", name)
    assert teaching.labels()[name] == letter_of(name)

    tab_to(page, "one === document.body")
    tab_to(page, "one.dataset?.view === 'sure'")
    page.keyboard.press("Enter")
    expect(page.locator("#teach-accept")).to_be_visible()
    seen = "one => one.naturalWidth || one.getBoundingClientRect().top > innerHeight"
    wait_until(page, f"() => [...document.querySelectorAll('.shot img')].every({seen})")
    frames.append(shown.keep("teach-sure", whole=False))
    tab_to(page, "one.id === 'teach-accept'")
    page.keyboard.press("Enter")
    expect(page.locator("#teach-status")).to_have_text(re.compile(r"\d+ images: accepted\."))
    settled(page)
    table = {path: label for path, label in teaching.labels().items() if label}
    assert len(table) > 25
    assert sum(label != letter_of(path) for path, label in table.items()) <= len(table) // 10

    tab_to(page, "one.id === 'teach-train'")
    page.keyboard.press("Enter")
    expect(page.locator("#teach-stop")).to_be_visible()
    expect(page.locator("#teach-training")).to_contain_text("Done: accuracy", timeout=300_000)
    expect(page.locator('.task[data-task="letters"]')).to_be_visible()
    frames.append(shown.keep("teach-done", whole=False))
    with page.expect_download() as saved:
        page.locator("#teach-table").press("Enter")
    assert saved.value.path().read_text().splitlines()[0] == "path,label"
    with page.expect_download() as saved:
        page.locator("#teach-report").press("Enter")
    assert "letters" in saved.value.path().read_text()
    with page.expect_download() as saved:
        page.locator("#teach-file").press("Enter")
    assert saved.value.suggested_filename == "letters.safetensors"
    page.locator('[data-sample="letter-M"]').press("Enter")
    expect(page.locator('.answer[data-task="letters"] .best')).to_have_text("M")
    shown.run("document.getElementById('answers-part').scrollIntoView()")
    frames.append(shown.keep("teach-answer", whole=False))
    with page.expect_response("**/v1/predict?*"):
        page.locator('[data-sample="letter-e"]').press("Enter")
    expect(page.locator("#answers:not([aria-busy]) .answer")).to_have_count(1)
    page.get_by_role("button", name="This is wrong").press("Enter")
    page.keyboard.type("E")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_contain_text("with the label E")
    shown.keep("teach-wrong", whole=False)
    assert any(path.startswith("corrections/") and label == "E" for path, label in teaching.labels().items())
    page.get_by_role("button", name="Unreadable (1)").press("Enter")
    expect(page.locator(".broken")).to_contain_text("not a readable image")
    assert shown.problems == []
    if "MEMORO_DEMO" in os.environ:
        write_film(frames)


def write_film(frames: list[Path]) -> None:
    """The pictures of docs/teaching.md, and the film of the README."""
    for name in ("teach-labelled", "teach-sure", "teach-answer"):
        shutil.copy(PICTURES / f"{name}.png", DOCS / f"{name}.png")
    pictures = [Image.open(path).convert("RGB").resize((896, 630), Image.Resampling.LANCZOS) for path in frames]
    film = [picture.quantize(128, dither=Image.Dither.NONE) for picture in pictures]
    film[0].save(DOCS / "teach.gif", save_all=True, append_images=film[1:], duration=1400, loop=0, optimize=True)
    assert (DOCS / "teach.gif").stat().st_size <= 2_000_000


def test_two_windows_do_not_overwrite_each_other(context: BrowserContext, run: Any) -> None:
    teaching = run("--labels", ",".join(LETTERS))
    one, other = visit(context, teaching.url), visit(context, teaching.url)
    path = one.page.locator(FIRST).get_attribute("aria-label").partition(",")[0]
    assert other.page.locator(FIRST).get_attribute("aria-label").startswith(path)
    other.page.route(
        "**/v1/teach**", lambda route: route.abort() if route.request.method == "GET" else route.fallback()
    )
    one.page.locator(FIRST).press("1")
    expect(one.page.locator(FIRST)).to_contain_text("✓ A")
    other.page.locator(FIRST).press("2")  # it has not heard of the first window's decision
    expect(other.page.locator("#teach-status")).to_contain_text("1 image changed in another window since")
    assert teaching.labels()[path] == "A"
    other.page.unroute("**/v1/teach**")
    expect(other.page.locator(FIRST)).to_contain_text("✓ A")
    other.page.locator(FIRST).press("2")
    expect(one.page.locator(FIRST)).to_contain_text("✓ D")
    one.page.keyboard.press("u")
    expect(one.page.locator("#teach-status")).to_contain_text("Undone: 0 images. 1 image changed in another window")
    assert teaching.labels()[path] == "D"


def test_a_server_that_is_killed_and_started_again(context: BrowserContext, run: Any) -> None:
    teaching = run("--labels", ",".join(LETTERS))
    shown = visit(context, teaching.url)
    page = shown.page
    page.locator(FIRST).press("1")
    page.keyboard.press("2")
    expect(page.locator(".decided")).to_have_count(2)
    before = teaching.labels()
    teaching.stop(signal.SIGKILL)
    expect(page.locator("#teach-gone")).to_contain_text("The server does not answer")
    page.locator(".open-shot").first.press("3")
    page.keyboard.press("4")
    expect(page.locator("#teach-problem")).to_contain_text("2 decisions not kept yet")
    shown.check_layout()
    shown.keep("teach-gone")
    assert teaching.labels() == before
    teaching.start()
    expect(page.locator("#teach-gone")).to_be_hidden()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".decided")).to_have_count(4)
    expect(page.locator("#teach-problem")).to_be_hidden()
    assert list(teaching.labels().values()) == ["A", "D", "E", "M"]


def test_touch_on_a_phone(browser: Browser, run: Any) -> None:
    teaching = run("--labels", ",".join(LETTERS))
    context = screen_context(browser, "phone", "dark")
    shown = visit(context, teaching.url)
    page = shown.page
    for at in (0, 2):
        page.locator(".shot").nth(at).tap()
    expect(page.locator("#teach-chosen")).to_have_text("2 chosen")
    page.get_by_role("button", name="2 D").tap()
    expect(page.locator(".decided")).to_have_count(2)
    assert list(teaching.labels().values()) == ["D", "D"]
    page.locator(".shot").nth(20).tap()
    page.get_by_role("button", name="4 M").tap()  # still on the screen
    expect(page.locator(".decided")).to_have_count(3)
    page.get_by_role("button", name="undo").tap()
    expect(page.locator(".decided")).to_have_count(2)
    shown.keep("teach-phone", whole=False)
    shown.run("window.scrollTo(0, 0)")
    shown.check_layout()
    shown.check_contrast(dark=True)
    assert shown.problems == []
    context.close()


def test_clicks_rectangles_and_widths(context: BrowserContext, run: Any) -> None:
    shown = visit(context, run("--labels", ",".join(LETTERS)).url)
    page, shots = shown.page, shown.page.locator(".shot")
    shots.nth(1).click()
    shots.nth(4).click(modifiers=["Shift"])
    expect(page.locator("#teach-chosen")).to_have_text("4 chosen")
    shots.nth(8).click(modifiers=["Control"])
    expect(page.locator("#teach-chosen")).to_have_text("5 chosen")
    page.keyboard.press("Escape")
    expect(page.locator("#teach-chosen")).to_have_text("")
    first, last = shots.nth(0).bounding_box(), shots.nth(8).bounding_box()
    assert first is not None
    assert last is not None
    page.mouse.move(first["x"] - 3, first["y"] - 3)
    page.mouse.down()
    page.mouse.move(last["x"] + 20, last["y"] + 20, steps=4)
    page.mouse.up()
    expect(page.locator("#teach-chosen")).to_have_text("6 chosen")
    page.keyboard.press("s")
    expect(page.locator("#teach-status")).to_have_text("6 images: skipped.")
    page.get_by_role("button", name="Labelled (6)").click()
    expect(shots).to_have_count(6)
    page.get_by_role("button", name="What to look at next").click()
    expect(page.locator(".open-shot").first).to_be_visible()
    shown.check_widths("teach-width")


def test_several_labels(context: BrowserContext, run: Any) -> None:
    teaching = run("--kind", "labels", "--labels", "round,straight")
    page = visit(context, teaching.url).page
    page.locator(FIRST).press("1")
    page.keyboard.press("2")  # of the same image
    expect(page.locator(FIRST)).to_contain_text("round, straight")
    page.keyboard.press("1")
    expect(page.locator(FIRST)).to_contain_text("✓ straight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("n")
    expect(page.locator(".shot").nth(1)).to_contain_text("none of the labels")
    assert list(teaching.labels().values()) == ["straight", ""]


def test_numbers(context: BrowserContext, run: Any) -> None:
    teaching = run("--kind", "number")
    page = visit(context, teaching.url).page
    for number in ("4.5", "-1", "10"):
        page.locator(".open-shot").first.focus()
        page.keyboard.type(number)
        page.keyboard.press("Enter")
        expect(page.locator("#teach-status")).to_have_text(f"1 image: labelled {number}.")
    assert list(teaching.labels().values()) == ["4.5", "-1.0", "10.0"]
    settled(page)
    expect(page.locator("#teach-figure")).to_contain_text("mean error")


def test_how_fast_it_is(context: BrowserContext, run: Any) -> None:
    """Prints how long a decision takes until it is on disk and on the screen, and new guesses after five."""
    teaching = run("--labels", ",".join(LETTERS), count=MANY)
    shown = visit(context, teaching.url, read=False)
    page = shown.page
    expect(page.locator("#teach-progress")).to_be_hidden(timeout=3_000_000)
    times, guesses = [], []
    for _ in range(min(200, MANY // 2)):
        page.locator(".open-shot").first.focus()
        path, start = focused(page), time.perf_counter()
        press_label(page)
        wait_until(
            page,
            "path => ![...document.querySelectorAll('.open-shot')].some(one => one.ariaLabel.startsWith(path))",
            path,
        )
        times.append(time.perf_counter() - start)
        if len(times) % 5 == 0:
            start = time.perf_counter()
            settled(page)
            guesses.append(time.perf_counter() - start)
    assert len([label for label in teaching.labels().values() if label]) == len(times)
    p95 = [statistics.quantiles(some, n=20)[-1] * 1000 for some in (times, guesses)]
    resident = Path(f"/proc/{teaching.process.pid}/status").read_text()
    memory = int(re.search(r"VmHWM:\s+(\d+)", resident)[1]) / 1e6  # type: ignore[index]
    print(  # noqa: T201
        f"\n{MANY} images, {len(times)} labels: decision p95 {p95[0]:.0f} ms, guesses p95 {p95[1]:.0f} ms,"
        f" at most {memory:.2f} GB, {page.locator('.shot').count()} images on the page"
    )
    page.get_by_role("button", name="All", exact=True).click()
    expect(page.locator(".shot")).to_have_count(60)
    page.locator("#teach-more").click()
    expect(page.locator("#teach-where")).to_contain_text("61 to")
    assert shown.problems == []


def test_a_correction_is_kept_once(context: BrowserContext, run: Any) -> None:
    """An image from elsewhere that a task answers wrongly becomes an image of the folder."""
    teaching = run("--labels", ",".join(LETTERS))
    page = visit(context, teaching.url).page
    image = io.BytesIO()
    draw_apple().save(image, "PNG")
    for _ in range(2):
        found = page.evaluate(
            """async bytes => {
                const asked = {method: 'POST', body: new Uint8Array(bytes)};
                return (await fetch('v1/teach/images?label=A', asked)).json();
            }""",
            list(image.getvalue()),
        )
    assert [path for path in teaching.labels() if path.startswith("corrections/")] == [found["path"]]
    assert (teaching.folder / found["path"]).read_bytes() == image.getvalue()
