"""The server's page in a real browser, on a real server: every state has words, and nothing overlaps."""

from __future__ import annotations

import io
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Shown, screen_context, watch
from families import CASES
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, expect
from playwright.sync_api import Error as PlaywrightError
from random_tasks import random_task
from serving import Running, fill, know, picture, serving

import memoro
from memoro.backbones import Backbone
from memoro.console import format_bytes
from memoro.tasks.taskfile import load_tasks

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)<'
TOKEN, READ = "write-secret", "read-secret"
DOCS = Path(__file__).parents[1] / "docs"
TASKS = {"pets", "breeds", "tags", "weight", "top", "large"}


def file(data: bytes, name: str = "photo.png", kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": data}


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return memoro.load_backbone(CASES[0].model())


@pytest.fixture
def folder(backbone: Backbone, tmp_path: Path) -> Path:
    """Tasks of every kind; `breeds` extends `pets`, and `top` is a head."""
    fill(tmp_path / "tasks", backbone)
    return tmp_path / "tasks"


@pytest.fixture
def server(backbone: Backbone, folder: Path) -> Iterator[Running]:
    with serving(backbone, folder) as running:
        yield running


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    found = screen_context(browser, "desktop", "light")
    yield found
    found.close()


def visit(context: BrowserContext, url: str) -> Shown:
    """The page, once it has listed the tasks."""
    shown = watch(context, (url, "blob:"))
    shown.page.goto(url)
    expect(shown.page.locator("#tasks-about")).not_to_contain_text("Loading")
    return shown


def ask(shown: Shown, data: bytes = picture(), name: str = "photo.png") -> None:
    shown.page.set_input_files("#pick", file(data, name))


def answered(shown: Shown) -> set[str]:
    return set(shown.run("[...document.querySelectorAll('.answer')].map(one => one.dataset.task)"))


def listed(shown: Shown) -> set[str]:
    return set(shown.run("[...document.querySelectorAll('.task')].map(one => one.dataset.task)"))


def drop(shown: Shown, name: str, data: bytes) -> None:
    """Drops a file on the page."""
    transfer = shown.page.evaluate_handle(
        """([name, bytes]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], name));
            return transfer;
        }""",
        [name, list(data)],
    )
    shown.page.dispatch_event("body", "drop", {"dataTransfer": transfer})


# ------------------------------------------------------------------------------------------------------ answers


def test_upload_answers_all_tasks(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    expect(page.locator("#status")).to_have_text("Choose an image to see what every task answers.")
    image = picture(3)
    ask(shown, image)
    expect(page.locator(".answer")).to_have_count(6)
    assert answered(shown) == TASKS
    (right,) = server.store.current.model.predict([image])
    for name in ("pets", "breeds", "top", "large"):
        expect(page.locator(f'.answer[data-task="{name}"] .best')).to_have_text(right[name]["label"])
    first = page.locator('.answer[data-task="pets"] .bars li').first
    share = right["pets"]["probability"]
    shown_share = float(first.locator(".share").inner_text().rstrip(" %").lstrip("<"))
    assert shown_share / 100 == pytest.approx(share, abs=0.006)
    drawn, whole = (first.locator("rect").nth(at).bounding_box() for at in (1, 0))
    assert drawn is not None
    assert whole is not None
    assert drawn["width"] / whole["width"] == pytest.approx(share, abs=0.02)
    expect(page.locator('.answer[data-task="weight"]')).to_contain_text(f"kg {right['weight']['values']['kg']:.4g}"[:6])
    cost = page.locator("#cost").inner_text()
    assert "2 passes, 6 tasks" in cost
    assert "6 separate models" in cost
    assert "about" in cost
    expect(page.locator("#status")).to_contain_text("6 tasks answered.")
    expect(page.locator("#image")).to_be_visible()
    assert shown.problems == []


def test_paste_and_drop(context: BrowserContext, server: Running) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    shown = visit(context, server.url)
    page = shown.page
    page.evaluate(
        """async (bytes) => navigator.clipboard.write([new ClipboardItem({
            "image/png": new Blob([new Uint8Array(bytes)], {type: "image/png"})})])""",
        list(picture(1)),
    )
    page.keyboard.press("Control+V")
    expect(page.locator(".answer")).to_have_count(6)
    page.evaluate("navigator.clipboard.writeText('no image')")
    page.keyboard.press("Control+V")
    expect(page.locator("#problem")).to_contain_text("There is no image in the clipboard")
    page.reload()
    expect(page.locator(".task")).to_have_count(6)
    drop(shown, "photo.png", picture(2))
    expect(page.locator(".answer")).to_have_count(6)
    expect(page.locator("#problem")).to_be_hidden()


def test_a_sample_by_keyboard_alone(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    for _ in range(30):
        page.keyboard.press("Tab")
        if shown.run("document.activeElement.dataset.sample") == "landscape":
            break
    assert shown.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus can be seen"
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_count(6)
    for _ in range(30):
        page.keyboard.press("Tab")
        if shown.run("document.activeElement.getAttribute('aria-label')") == "Where pets looked":
            break
    page.keyboard.press("Enter")
    expect(page.locator('.answer[data-task="pets"] canvas')).to_be_visible()
    assert shown.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.keyboard.press("Enter")
    expect(page.locator('.answer[data-task="pets"] .looked')).to_be_hidden()
    assert shown.problems == []


def test_a_subset(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    ask(shown)
    expect(page.locator(".answer")).to_have_count(6)
    before = server.metric('memoro_task_answers_total{task="pets"}')
    page.get_by_role("checkbox", name="pets", exact=True).uncheck()
    page.get_by_role("checkbox", name="large", exact=True).uncheck()
    expect(page.locator(".answer")).to_have_count(4)
    assert answered(shown) == TASKS - {"pets", "large"}
    assert server.metric('memoro_task_answers_total{task="pets"}') == before, "it was not asked"
    expect(page.locator("#cost")).to_contain_text("1 pass, 4 tasks")
    page.get_by_role("button", name="None").click()
    expect(page.locator("#status")).to_have_text("Select at least one task.")
    expect(page.locator(".answer")).to_have_count(0)
    page.get_by_role("checkbox", name="weight", exact=True).check()
    expect(page.locator("#status")).to_contain_text("1 task answered.")
    assert answered(shown) == {"weight"}
    page.get_by_role("button", name="All").click()
    expect(page.locator(".answer")).to_have_count(6)


def test_unfamiliar_images(context: BrowserContext, backbone: Backbone, tmp_path: Path) -> None:
    for seed, name, far in ((1, "rooms", 0.0), (2, "pets", 1e6)):
        memoro.save_task(know(random_task(backbone, name, seed=seed), far), tmp_path / f"{name}.safetensors")
    memoro.save_task(random_task(backbone, "plain", seed=3), tmp_path / "plain.safetensors")
    with serving(backbone, tmp_path) as server:
        shown = visit(context, server.url)
        ask(shown)
        page = shown.page
        expect(page.locator(".answer")).to_have_count(3)
        rooms, pets = (page.locator(f'.answer[data-task="{name}"]') for name in ("rooms", "pets"))
        expect(rooms.locator("h3")).to_contain_text("unfamiliar")
        expect(rooms.locator(".why")).to_contain_text("unlike those that rooms was trained on: none of its own images")
        expect(pets).to_contain_text("Familiar: 100 % of its own images")
        expect(pets.locator("h3")).to_have_text("pets")
        expect(page.locator('.answer[data-task="plain"]')).to_contain_text("has no familiarity")
        grey, normal = (one.locator(".best").evaluate("one => getComputedStyle(one).color") for one in (rooms, pets))
        soft = shown.run("getComputedStyle(document.querySelector('.soft')).color")
        assert (grey == soft, normal == soft) == (True, False)
        bars = [one.locator("rect").nth(1).get_attribute("class") for one in (rooms, pets)]
        assert bars == ["other", "bar"]
        order = shown.run("[...document.querySelectorAll('.answer')].map(one => one.dataset.task)")
        assert order[-1] == "rooms"
        expect(page.locator("#status")).to_contain_text("Unfamiliar to 1 of 3.")
        page.get_by_role("button", name="None").click()
        page.get_by_role("checkbox", name="rooms", exact=True).check()
        expect(page.locator("#status")).to_contain_text("This image is unfamiliar to all of these tasks.")


# ------------------------------------------------------------------------------------------------------ overlay


def test_the_overlay_shows_what_the_api_says(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    image = picture(4, (60, 30))
    ask(shown, image)
    page = shown.page
    box = page.locator('.answer[data-task="breeds"]')
    box.get_by_role("button", name="Where breeds looked").click()
    expect(box.locator("canvas")).to_be_visible()
    _, _, found = server.request("POST", "/v1/explain?tasks=breeds", image)
    attention = found["images"][0]["answers"]["breeds"]["attention"]
    heat = torch.tensor(attention["heatmap"])
    size, pixels = box.locator("canvas").evaluate(
        """one => [[one.height, one.width], [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]]"""
    )
    assert tuple(size) == tuple(heat.shape)
    colors = torch.tensor(pixels).reshape(-1, 4)
    assert colors[heat.flatten().argmax()].tolist() == [255, 240, 140, 255]
    assert colors[heat.flatten().argmin()].tolist() == [20, 30, 80, 255]
    rows = box.locator(".layers tbody tr")
    expect(rows).to_have_count(5)
    heads = box.locator(".layers thead th").all_inner_texts()
    assert heads == ["layer", "attention", "memory", "pets"]
    for layer in range(5):
        cells = rows.nth(layer).locator("td").all_inner_texts()
        for text, value in zip(
            cells[1:], (attention["memory"][layer], attention["parents"]["pets"][layer]), strict=True
        ):
            assert float(text.rstrip(" %").lstrip("<")) / 100 == pytest.approx(value, abs=0.006)
        label = rows.nth(layer).locator("svg").get_attribute("aria-label")
        assert label is not None
        assert "image " in label
    widths = rows.nth(2).locator("rect").evaluate_all("all => all.map(one => parseFloat(one.getAttribute('width')))")
    assert sum(widths) == pytest.approx(100, abs=0.1)
    head = page.locator('.answer[data-task="top"]')
    head.get_by_role("button", name="Where top looked").click()
    expect(head.locator("figcaption")).to_contain_text("A head has no attention of its own")
    assert shown.problems == []


def test_the_overlay_lies_over_what_the_task_saw(context: BrowserContext, backbone: Backbone, tmp_path: Path) -> None:
    """A task that resizes the shorter edge to 24 and crops 20: of an image of 80 x 40, a square of 33 in its centre."""
    task = random_task(backbone, "cut", seed=1)
    steps = memoro.Preprocessing(resize=24, crop=(20, 20))
    task.update_spec(preprocessing=steps)
    memoro.save_task(task, tmp_path / "cut.safetensors")
    with serving(backbone, tmp_path) as server:
        shown = visit(context, server.url)
        ask(shown, picture(1, (80, 40)))
        shown.page.get_by_role("button", name="Where cut looked").click()
        canvas = shown.page.locator(".seen canvas")
        expect(canvas).to_be_visible()
        frame, over = shown.page.locator(".seen").bounding_box(), canvas.bounding_box()
        assert frame is not None
        assert over is not None
        scale = frame["width"] / 80
        assert over["width"] / scale == pytest.approx(40 * 20 / 24, abs=0.5)
        assert over["height"] / scale == pytest.approx(40 * 20 / 24, abs=0.5)
        assert (over["x"] - frame["x"]) / scale == pytest.approx((80 - 40 * 20 / 24) / 2, abs=0.5)
        assert (over["y"] - frame["y"]) / scale == pytest.approx((40 - 40 * 20 / 24) / 2, abs=0.5)
        expect(shown.page.locator("figcaption").first).to_contain_text("cropped away")


# ------------------------------------------------------------------------------------------------------ tasks


def test_the_list_of_tasks(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    assert listed(shown) == TASKS
    expect(page.locator("#tasks-about")).to_contain_text("6 tasks on ViTForImageClassification")
    pets = page.locator('.task[data-task="pets"]')
    expect(pets).to_contain_text("2 labels: cat, dog")
    expect(pets).to_contain_text("kB")
    expect(page.locator('.task[data-task="breeds"]')).to_contain_text("extends pets")
    pets.locator("summary").click()
    expect(pets.locator("details")).to_contain_text(server.store.current.info["pets"]["content"][:12])
    graph = page.locator(".graph")
    label = graph.get_attribute("aria-label")
    assert label is not None
    assert "breeds extends pets" in label
    across = {
        name: graph.locator(".node", has=page.locator("title", has_text=name)).evaluate(
            "one => one.getBoundingClientRect().x"
        )
        for name in ("ViTForImage", "pets", "breeds")
    }
    assert across["ViTForImage"] < across["pets"] < across["breeds"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Download tags").click()
    assert download.value.suggested_filename == "tags.safetensors"
    assert memoro.load_task(download.value.path().rename(folder_of(server) / "copy.bin")).name == "tags"


def folder_of(server: Running) -> Path:
    """A folder beside the server's own."""
    assert server.store._folder is not None
    return server.store._folder.parent


def contents(folder: Path) -> dict[str, str]:
    return {task.name: task.content_hash() for path in folder.glob("*.safetensors") for task in load_tasks(path)}


def test_attach_detach_and_undo(context: BrowserContext, backbone: Backbone, server: Running, folder: Path) -> None:
    new = memoro.save_task(random_task(backbone, "new one", seed=9), folder.parent / "new.safetensors")
    before = contents(folder)
    shown = visit(context, server.url)
    page = shown.page
    ask(shown)
    expect(page.locator(".answer")).to_have_count(6)
    page.set_input_files("#task-file", new)
    expect(page.locator("#task-status")).to_contain_text("new one attached.")
    expect(page.locator(".answer")).to_have_count(7)
    assert listed(shown) == TASKS | {"new one"}
    after = contents(folder)
    assert set(after) == set(before) | {"new one"}
    page.get_by_role("button", name="Detach new one").click()
    expect(page.locator("#task-status")).to_contain_text("new one detached.")
    expect(page.locator(".answer")).to_have_count(6)
    assert contents(folder) == before
    shown.keep("state-detached")
    assert shown.run("document.activeElement.textContent") == "Undo: attach new one again", "the keyboard goes on there"
    page.keyboard.press("Enter")
    expect(page.locator("#task-status")).to_have_text("new one attached.")
    expect(page.locator(".answer")).to_have_count(7)
    assert contents(folder) == after
    expect(page.locator("#problem")).to_be_hidden()
    assert shown.problems == []
    page.get_by_role("button", name="Detach pets").click()
    expect(page.locator("#task-problem")).to_contain_text("Cannot detach 'pets', because 'breeds' extends it")
    assert contents(folder) == after
    drop(shown, "new.safetensors", new.read_bytes())
    expect(page.locator("#task-status")).to_contain_text("new one was attached already.")


def test_sizes_are_those_of_the_command_line(
    context: BrowserContext, backbone: Backbone, server: Running, folder: Path
) -> None:
    """Those of the files, in the same digits."""
    for number, letters in enumerate((1, 40, 77, 300)):
        task = know(random_task(backbone, f"own {number}", seed=number), 1.0)
        task.update_spec(training={"note": "x" * letters})
        memoro.save_task(task, folder.parent / "one.safetensors")
        with memoro.Client(server.url) as client:
            client.attach(folder.parent / "one.safetensors")
        shown = visit(context, server.url)
        for file in (folder.parent / "one.safetensors", folder / "tags.safetensors"):
            size = format_bytes(file.stat().st_size).replace(" ", "\u00a0")
            name = memoro.load_task(file).name
            expect(shown.page.locator(f'.task[data-task="{name}"]')).to_contain_text(f" {size}")
    formatted = shown.page.evaluate(
        "async sizes => { const { size } = await import('/page/parts.js'); return sizes.map(size); }", SIZES
    )
    assert [text.replace("\u00a0", " ") for text in formatted] == [format_bytes(size) for size in SIZES]


SIZES = [0, 1, 49, 50, 51, 149, 150, 250, 350, 403_250, 403_408, 403_750, 752_920, 999_949, 999_950, 10**6, 1_250_000,
         1_349_999, 26_735_992, 10**9, 2_350_000_000, 5 * 10**12]  # fmt: skip


def test_what_others_attach_appears(context: BrowserContext, backbone: Backbone, server: Running, folder: Path) -> None:
    shown = visit(context, server.url)
    new = memoro.save_task(random_task(backbone, "later", seed=9), folder.parent / "later.safetensors")
    with memoro.Client(server.url) as client:
        client.attach(new)
    ask(shown)
    expect(shown.page.locator(".answer")).to_have_count(7)
    expect(shown.page.locator('.task[data-task="later"]')).to_be_visible()


def test_what_others_detach_is_not_asked_again(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    page.get_by_role("checkbox", name="pets", exact=True).uncheck()
    with memoro.Client(server.url) as client:
        client.detach("tags")
    ask(shown)
    expect(page.locator(".answer")).to_have_count(4)
    assert answered(shown) == TASKS - {"pets", "tags"}
    assert listed(shown) == TASKS - {"tags"}
    expect(page.locator("#problem")).to_be_hidden()


def test_what_could_not_be_attached_again_is_not_detached(
    context: BrowserContext, backbone: Backbone, folder: Path
) -> None:
    size = (folder / "tags.safetensors").stat().st_size
    with serving(backbone, folder, max_body=size - 1) as server:
        shown = visit(context, server.url)
        shown.page.get_by_role("button", name="Detach tags").click()
        expect(shown.page.locator("#task-problem")).to_contain_text("tags was not detached")
        expect(shown.page.locator("#task-problem")).to_contain_text("--max-body-mb")
        assert listed(shown) == TASKS
    with serving(backbone, folder, max_body=size) as server:
        shown = visit(context, server.url)
        shown.page.get_by_role("button", name="Detach tags").click()
        expect(shown.page.locator("#task-status")).to_contain_text("tags detached.")


def test_files_that_are_not_served_are_listed(context: BrowserContext, backbone: Backbone, folder: Path) -> None:
    (folder / "broken.safetensors").write_bytes(b"GIF89a")
    (folder / f"{HOSTILE.replace('/', '')[:40]}.safetensors").write_bytes(b"")
    with serving(backbone, folder) as server:
        shown = visit(context, server.url)
        assert listed(shown) == TASKS
        expect(shown.page.locator("#skipped")).to_contain_text("2 files in the server's folder cannot be served")
        expect(shown.page.locator("#skipped")).to_contain_text("broken.safetensors: broken.safetensors is not a safe")
        assert shown.run("document.querySelectorAll('[onerror], main script').length") == 0
        shown.check_layout()
        shown.keep("state-skipped")
    (folder / "broken.safetensors").unlink()
    (folder / f"{HOSTILE.replace('/', '')[:40]}.safetensors").unlink()
    with serving(backbone, folder) as server:
        expect(visit(context, server.url).page.locator("#skipped")).to_be_hidden()


def test_no_tasks_at_all(context: BrowserContext, backbone: Backbone, tmp_path: Path, folder: Path) -> None:
    with serving(backbone, tmp_path / "empty") as server:
        shown = visit(context, server.url)
        page = shown.page
        expect(page.locator("#status")).to_contain_text("There is no task yet")
        expect(page.locator("#tasks-about")).to_contain_text("memoro train photos/pets")
        ask(shown)
        expect(page.locator("#image")).to_be_visible()
        expect(page.locator("#status")).to_contain_text("There is no task yet")
        drop(shown, "both.safetensors", (folder / "both.safetensors").read_bytes())
        expect(page.locator(".answer")).to_have_count(2)


def test_where_attaching_is_off(context: BrowserContext, backbone: Backbone, folder: Path) -> None:
    with serving(backbone, folder / "tags.safetensors") as server:
        shown = visit(context, server.url)
        page = shown.page
        expect(page.locator("#attaching")).to_contain_text("Attaching is off: start the server with --tasks FOLDER")
        expect(page.locator("#task-file")).to_be_disabled()
        expect(page.get_by_role("button", name="Detach tags")).to_be_disabled()
        drop(shown, "top.safetensors", (folder / "top.safetensors").read_bytes())
        expect(page.locator("#task-problem")).to_contain_text("top.safetensors was not attached: attaching is off")
        shown.keep("state-off")
    with serving(backbone, folder, allowed_hosts=("photos.example",)) as server:
        shown = visit(context, server.url)
        expect(shown.page.locator("#attaching")).to_contain_text("start the server with --token")


def test_tokens(context: BrowserContext, backbone: Backbone, folder: Path) -> None:
    with serving(backbone, folder, token=TOKEN, read_token=READ) as server:
        shown = watch(context, (server.url, "blob:"))
        page = shown.page
        page.goto(server.url)
        expect(page.locator("#task-problem")).to_have_text("This server needs a token. Enter it below.")
        shown.keep("state-token")
        page.get_by_label("Token", exact=True).fill("wrong-secret")
        page.get_by_role("button", name="Use this token").click()
        expect(page.locator("#task-problem")).to_contain_text("does not accept this token")
        page.get_by_label("Token", exact=True).fill(READ)
        page.keyboard.press("Enter")
        expect(page.locator(".task")).to_have_count(6)
        expect(page.locator("#attaching")).to_contain_text("need the server's token")
        ask(shown)
        expect(page.locator(".answer")).to_have_count(6)
        page.get_by_role("button", name="Detach top").click()
        expect(page.locator("#task-problem")).to_contain_text("token")
        assert len(listed(shown)) == 6
        page.get_by_label("Token", exact=True).fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#task-problem")).to_be_hidden()
        page.get_by_role("button", name="Detach top").click()
        expect(page.locator(".answer")).to_have_count(5)
        kept = shown.run("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 1, ""], "the token leaves with the tab"
        assert TOKEN not in page.content()


# ------------------------------------------------------------------------------------------------------ errors


def test_a_corrupt_image(context: BrowserContext, server: Running) -> None:
    shown = visit(context, server.url)
    page = shown.page
    ask(shown)
    expect(page.locator(".answer")).to_have_count(6)
    for data in (b"not an image", picture(size=(400, 300), form="JPEG")[:300], b""):
        ask(shown, data, "broken.jpg")
        expect(page.locator("#problem")).to_contain_text("not a readable image" if data else "broken.jpg is empty")
        expect(page.locator(".answer")).to_have_count(0)
    expect(page.locator("#image-note")).to_have_text("This browser cannot show the image.")
    shown.keep("state-corrupt")
    ask(shown, picture(5, form="TIFF"), "photo.tiff")  # which Chromium cannot show, but the server reads
    expect(page.locator(".answer")).to_have_count(6)
    expect(page.locator("#problem")).to_be_hidden()
    page.get_by_role("button", name="Where pets looked").click()
    expect(page.locator("figcaption").first).to_contain_text("cannot show the image itself")
    assert not any(problem.startswith(("error", "outside", "dialog")) for problem in shown.problems)


def test_a_hostile_task_file(context: BrowserContext, backbone: Backbone, server: Running, folder: Path) -> None:
    shown = visit(context, server.url)
    page = shown.page
    before = contents(folder)
    whole = (folder / "tags.safetensors").read_bytes()
    for data in (b"\x80\x04cos\nsystem\n", b"\xff" * 8 + whole[8:], whole[:-40], b""):
        drop(shown, "evil.safetensors", data)
        expect(page.locator("#task-problem")).to_contain_text("evil.safetensors was not attached")
        page.evaluate("document.getElementById('task-problem').hidden = true")
    assert contents(folder) == before
    assert listed(shown) == TASKS
    name = HOSTILE.replace("/", "")
    task = random_task(backbone, name, seed=8, labels=[HOSTILE, "</script><h1>x", "c"])
    task.update_spec(
        training={"data": HOSTILE, "note": "x" * 5000, "deep": [[[HOSTILE]]]}, metrics={"accuracy": HOSTILE}
    )
    drop(shown, f"{HOSTILE}.safetensors", memoro.save_task(task, folder.parent / "h.safetensors").read_bytes())
    expect(page.locator(".task")).to_have_count(7)
    ask(shown)
    expect(page.locator(".answer")).to_have_count(7)
    page.locator(".task").last.locator("summary").click()
    shown.keep("state-hostile")
    assert shown.run("document.querySelectorAll('[onerror], main h1, main script').length") == 0
    assert "onerror=" in shown.run("document.body.innerText")
    shown.check_layout()
    with pytest.raises(PlaywrightError, match="TrustedScript"):  # the policy of the page, if all else fails
        shown.run("document.body.setAttribute('onclick', 'alert(3)')")
    with pytest.raises(PlaywrightError, match="TrustedHTML"):
        shown.run("document.body.innerHTML = '<b>x'")
    assert not any(problem.startswith(("error", "outside", "dialog")) for problem in shown.problems)


def test_a_server_that_is_gone(context: BrowserContext, backbone: Backbone, folder: Path) -> None:
    with serving(backbone, folder) as server:
        shown = visit(context, server.url)
        page = shown.page
        ask(shown)
        expect(page.locator(".answer")).to_have_count(6)
    gone = "The server does not answer. Is it still running?"
    page.get_by_role("button", name="Where pets looked").click()
    expect(page.locator(".looked .problem")).to_contain_text(gone)
    page.get_by_role("button", name="Detach tags").click()
    expect(page.locator("#task-problem")).to_contain_text(gone)
    ask(shown, picture(2))
    expect(page.locator("#problem")).to_contain_text(gone)
    page.get_by_role("button", name="the letter M").click()
    expect(page.locator("#problem")).to_contain_text(gone)
    shown.check_layout()
    shown.keep("state-gone")
    port = int(server.url.rpartition(":")[2])
    with serving(backbone, folder, port=port):
        page.locator("#problem").get_by_role("button", name="Try again").click()
        expect(page.locator(".answer")).to_have_count(6)
        expect(page.locator("#problem")).to_be_hidden()


# ------------------------------------------------------------------------------------------------------ look and speed


@pytest.fixture(scope="module")
def trained(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the demo's five tasks."""
    place = tmp_path_factory.mktemp("trained")
    for path in demo.glob("*.safetensors"):
        shutil.copy(path, place)
    with serving(memoro.load_backbone("memoro-tiny"), place) as running:
        yield running


# By screen: the sample, the task whose attention is shown, and where in docs/ the picture is kept.
SHOWN = {
    "desktop-light": ("the letter M", "case", "page.png"),
    "desktop-dark": ("the digit 3", "parity", "page-dark.png"),
    "phone-light": ("the digit 3", "parity", "page-phone.png"),
    "phone-dark": ("a landscape", "style", None),
}


def test_the_page_on_every_screen(show: Any, trained: Running, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    sample, task, kept = SHOWN[name]
    shown: Shown = show(trained.url, "page-start")
    page = shown.page
    expect(page.locator(".task")).to_have_count(5)
    shown.check_layout()
    assert page.get_by_text("Take a photo").is_visible() is name.startswith("phone")
    for _ in range(3):  # the first passes of a process are slow
        with page.expect_response("**/v1/predict?*"):
            page.get_by_role("button", name=sample).click()
        expect(page.locator("#answers:not([aria-busy]) .answer")).to_have_count(5)
    page.get_by_role("button", name=f"Where {task} looked").click()
    expect(page.locator(".looked canvas")).to_be_visible()
    page.locator(".task summary").first.click()
    shown.check_layout()
    shown.check_contrast(dark=name.endswith("dark"))
    images = shown.run("[...document.images].filter(one => !one.hidden).map(one => [one.complete, one.naturalWidth])")
    assert all(complete and width > 0 for complete, width in images)
    page.mouse.move(0, 0)
    shown.run("document.activeElement.blur(), window.scrollTo(0, 0)")
    taken = shown.keep(f"page-{name}")
    assert shown.problems == []
    if "MEMORO_DEMO" in os.environ and kept is not None:
        shutil.copy(taken, DOCS / kept)
        if kept == "page.png":  # opens the README: without the list of tasks
            bottom = shown.run("document.querySelector('.columns').getBoundingClientRect().bottom")
            clip = {"x": 0, "y": 0, "width": 1280, "height": bottom + 20}
            page.screenshot(path=DOCS / kept, full_page=True, clip=clip)  # type: ignore[arg-type]


@pytest.mark.parametrize("screen", ["desktop", "phone"])
def test_nothing_overlaps_at_any_width(browser: Browser, trained: Running, screen: str) -> None:
    context = screen_context(browser, screen, "light")
    shown = visit(context, trained.url)
    page = shown.page
    shown.check_widths(f"width-start-{screen}")
    page.get_by_role("button", name="the digit 3").click()
    expect(page.locator("#answers:not([aria-busy]) .answer")).to_have_count(5)
    page.get_by_role("button", name="Where parity looked").click()
    expect(page.locator(".looked canvas")).to_be_visible()
    page.locator(".task summary").first.click()
    shown.check_widths(f"width-{screen}")
    page.get_by_role("button", name="Detach parity").click()
    expect(page.locator(".answer")).to_have_count(4)
    shown.check_layout()
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".answer")).to_have_count(5)
    context.close()


def test_the_first_answer_comes_soon(context: BrowserContext, trained: Running) -> None:
    """Prints how long an answer takes on the page, in units of a bare request to the API from the same browser."""
    shown = visit(context, trained.url)
    image = io.BytesIO()
    Image.effect_noise((320, 240), 60).convert("RGB").save(image, "JPEG")
    found = shown.page.evaluate(
        """async (bytes) => {
            const file = new File([new Uint8Array(bytes)], "photo.jpg", {type: "image/jpeg"});
            const times = {api: [], page: []};
            for (let round = 0; round < 12; round++) {
                let start = performance.now();
                await (await fetch("v1/predict", {method: "POST", body: file})).json();
                times.api.push(performance.now() - start);
                const transfer = new DataTransfer();
                transfer.items.add(file);
                const seen = new Promise(done => new MutationObserver((_, own) => {
                    if (document.querySelectorAll(".answer").length === 5) { own.disconnect(); done(); }
                }).observe(document.getElementById("answers"), {childList: true}));
                start = performance.now();
                document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
                await seen;
                times.page.push(performance.now() - start);
            }
            return times;
        }""",
        list(image.getvalue()),
    )
    page, api = (statistics.median(found[name][2:]) for name in ("page", "api"))
    print(f"\nfirst answer on the page: {page:.1f} ms, bare API call: {api:.1f} ms, ratio {page / api:.2f}")  # noqa: T201
    assert page > 0
