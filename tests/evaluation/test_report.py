"""The page about a training or an evaluation."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CASES
from PIL import Image, ImageFont
from shell import Shell, shell
from squares import save_square, save_squares

import memoro
from memoro.data.screening import near_duplicates
from memoro.evaluation.metrics import decide
from memoro.heads import HEADS
from memoro.images import open_image
from memoro.pages.charts import histogram_chart, line_chart, matrix_chart, scatter_chart, shorten, text_width
from memoro.pages.elements import Html, render_page, tag
from memoro.tasks.calibration import Calibration, decide_unseen

__all__ = ["shell"]  # a fixture

HOSTILE = '<script>alert("x")<|script>'
HOW: dict[str, Any] = {"epochs": 1, "image_size": 20, "workers": 0, "quiet": True, "cache": False}


@pytest.fixture
def tiny() -> memoro.Backbone:
    return memoro.load_backbone(CASES[0].model())


def check_page(path: Path) -> str:
    """The page's text, after checks that hold for all of them."""
    page = path.read_text()
    assert path.stat().st_size < 3e6
    assert "<script" not in page
    assert " style=" not in page
    assert not re.findall(r'(?:src|href)="(?!data:image/|#)', page)
    assert "url(" not in page
    assert "default-src 'none'" in page
    assert page.count("<section") == page.count("</section>") > 0
    return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S))


def test_every_training_has_a_report(shell: Shell, tmp_path: Path) -> None:
    save_squares(tmp_path / "set" / "train", {"red": 8, "green": 8, HOSTILE: 0})
    for number in range(8):
        save_square(tmp_path / "blue" / f"{number}.png", "blue", 90 + number)
    (tmp_path / "blue").rename(tmp_path / "set" / "train" / HOSTILE)
    save_squares(tmp_path / "set" / "test", {"red": 3, "green": 3}, first=500)
    same = open_image(tmp_path / "set" / "train" / "red" / "000.png")
    same.resize((40, 40)).save(tmp_path / "set" / "test" / "red" / "larger.png")
    save_square(tmp_path / "set" / "test" / "red" / "odd.png", "green", 503)  # as green/503.png: one answer is wrong
    (tmp_path / "set" / "train" / "red" / "broken<b>.png").write_bytes(b"no image")
    how = ("--image-size", 20, "--epochs", 2, "--lr", 0.1, "--set", "workers=0")
    said = shell("train", "set", "-b", "vit", "--task", "colour", *how).out
    assert "report: runs/colour/report.html" in said.splitlines()
    text = check_page(tmp_path / "runs" / "colour" / "report.html")
    for part in (
        "Measured on the test split (8 images)", "Confusion matrix", "Each class", "recall",
        "where the task looked", "Familiar images", "Images left out", "broken<b>.png",
        "1 pair of images in different splits look the same", "larger.png", "set/train/red/000.png",
        "trained parameters", "Time", "memoro predict photo.jpg -t colour.safetensors", HOSTILE,
    ):  # fmt: skip
        assert part in text, part
    page = (tmp_path / "runs" / "colour" / "report.html").read_text()
    assert page.count("<svg") >= 4, "loss, accuracy, confusion, time"
    shell("eval", "set", "-b", "vit", "-t", "colour.safetensors", "--report", "--set", "workers=0")
    text = check_page(tmp_path / "report.html")
    assert "Evaluated on the test split of set (8 images)" in text
    assert "Each class" in text
    assert "Settings tried" not in text


def test_arguments_in_notes_are_code(tiny: memoro.Backbone, tmp_path: Path) -> None:
    data = save_squares(tmp_path / "set", {"red": 24, "green": 2}, first=0)
    memoro.train(data, backbone=tiny, folds=2, folder=tmp_path / "run", **HOW)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<code>balance=True</code> gives rare classes more weight" in page
    assert "`" not in check_page(tmp_path / "run" / "report.html")


def test_reports_of_labels_and_numbers(tiny: memoro.Backbone, tmp_path: Path) -> None:
    for number in range(12):
        save_square(tmp_path / f"{number}.png", ("red", "blue")[number % 2], number)
    labels = [f"{number}.png,{'|'.join(['red', 'small'][number % 2 : 1 + number % 3])}" for number in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,labels", *labels]) + "\n")
    numbers = [f"{number}.png,{number % 2}.5" for number in range(12)]
    (tmp_path / "numbers.csv").write_text("\n".join(["path,number", *numbers]) + "\n")
    sets = {"tags": tmp_path / "labels.csv", "warmth": tmp_path / "numbers.csv"}
    memoro.train(sets, backbone=tiny, lr=[0.01, 0.1], folds=0, folder=tmp_path / "run", **HOW)
    text = check_page(tmp_path / "run" / "report.html")
    for part in ("false alarms", "F1", "The largest errors", "Predicted and true numbers", "Settings tried"):
        assert part in text, part
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<section") == 2
    assert 'href="#task-1"' in page


def test_curves_of_folds_are_of_what_they_held_out(tiny: memoro.Backbone, tmp_path: Path) -> None:
    data, how = save_squares(tmp_path / "set", {"red": 9, "green": 8, "blue": 8}), {**HOW, "epochs": 3}
    options = {"regime": "side", "lr": [0.01, 0.05], "folder": tmp_path / "run", **how}
    found = memoro.train(data, backbone=tiny, folds=3, **options)
    assert found.metrics["split"] == "3 folds"
    assert all(entry.keys() >= {"train_loss", "fold_loss", "fold_accuracy"} for entry in found.history)
    last = found.history[-1]  # its weights are those that are measured
    assert last["fold_accuracy"] == pytest.approx(found.metrics["accuracy"])
    assert last["fold_loss"] == pytest.approx(found.metrics["loss"], rel=1e-5) != last["train_loss"]
    text, page = check_page(tmp_path / "run" / "report.html"), (tmp_path / "run" / "report.html").read_text()
    assert "Dashed: training images. Solid: images that a fold held out (mean over the folds)." in text
    curves = page.partition("Training</h2>")[2].partition("</div>")[0]
    assert re.findall(r'<polyline[^>]*class="([^"]*)"', curves) == ["line dashed", "line"] * 2  # loss, accuracy
    plain = memoro.train(data, backbone=tiny, lr=0.05, folds=0, folder=tmp_path / "plain", **how)
    assert not any("fold_loss" in entry for entry in plain.history)
    assert "Solid: validation images." in check_page(tmp_path / "plain" / "report.html")


def test_fit_reports_a_head(tiny: memoro.Backbone, tmp_path: Path) -> None:
    data = save_squares(tmp_path / "set")
    head = memoro.new_task(tiny, "head", ["blue", "green", "red"], from_layer=tiny.depth)
    memoro.fit(tiny, head, data, folder=tmp_path / "head", lr=1e-6, **HOW)
    assert "this is the attention of the base's class token" in check_page(tmp_path / "head" / "report.html")


def test_a_training_survives_its_report(tiny: memoro.Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise ValueError("no page today")

    monkeypatch.setattr("memoro.training.result.write_report", fail)
    told: list[str] = []
    data = save_squares(tmp_path / "set")
    done = memoro.train(data, backbone=tiny, lr=0.1, folder=tmp_path / "run", **{**HOW, "log": told.append})
    assert done.metrics
    assert any("report.html could not be written: no page today" in text for text in told)


def test_answers_of_folds_belong_to_their_images(tiny: memoro.Backbone, tmp_path: Path) -> None:
    data = save_squares(tmp_path / "set")
    done = memoro.train(data, backbone=tiny, lr=[0.01, 0.1], folds=3, **HOW)
    assert done.metrics["split"] == "3 folds"
    names = [Path(done.images.where(at)).parent.name for at in range(24)]
    assert [done.task.labels[int(target)] for target in done.targets] == names
    assert sorted(names) != names, "in the order of the folds"


def mistakes(kind: Any, labels: Any, logits: Any, targets: Any, most: int, calibration: Any = None) -> Any:
    return HEADS[kind].mistakes(labels, *decide(kind, logits, calibration), targets, most)


def figures(kind: Any, labels: Any, logits: Any, targets: Any, calibration: Any = None) -> Any:
    return HEADS[kind].figures(labels, *decide(kind, logits, calibration), targets)


def test_the_most_confident_mistakes() -> None:
    labels = ["cat", "dog", "cow"]
    logits = torch.tensor([[5.0, 0, 0], [0, 9.0, 0], [0, 1.0, 0], [0, 0, 4.0]])
    count, found = mistakes("softmax", labels, logits, torch.tensor([0, 0, 2, 2]), 5)
    assert count == 2
    assert [(one.index, one.predicted, one.true) for one in found] == [
        (1, "dog 100%", "cat 0%"),
        (2, "dog 58%", "cow 21%"),
    ]
    truth = torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    count, found = mistakes("multilabel", labels, torch.tensor([[4.0, -4, -4], [3, 4, -2]]), truth, 5)
    assert count == 1
    assert (found[0].index, found[0].predicted, found[0].true) == (1, "cat 95%, not cow 12%", "dog, cow")
    count, found = mistakes("regression", ["m"], torch.tensor([[1.0], [5.0]]), torch.tensor([[1.0], [2.0]]), 1)
    assert [(one.index, one.predicted, one.true) for one in found] == [(1, "5", "2")]


def test_mistakes_and_figures_are_calibrated() -> None:
    softmax = Calibration((4.0,), (), (), 30, "validation")
    logits = torch.tensor([[0.0, 4.0], [8.0, 0.0]])
    count, found = mistakes("softmax", ["cat", "dog"], logits, torch.tensor([0, 0]), 5, softmax)
    assert (count, found[0].predicted, found[0].true) == (1, "dog 73%", "cat 27%")
    labels = Calibration((2.0, 1.0), (0.3, 0.8), (), 30, "validation")
    logits, truth = torch.tensor([[-1.0, 1.0], [-4.0, 2.0]]), torch.tensor([[1.0, 1.0], [0, 1.0]])
    count, found = mistakes("multilabel", ["cat", "dog"], logits, truth, 5, labels)
    assert (count, found[0].index, found[0].predicted) == (1, 0, "not dog 73%")  # 38 % are enough for a cat
    _, rows = figures("multilabel", ["cat", "dog"], logits, truth, labels)
    assert rows == [["dog", "2", "1", "1", "0", "0.667"], ["cat", "1", "1", "0", "0", "1.000"]]
    _, raw = figures("multilabel", ["cat", "dog"], logits, truth)
    assert raw == [["cat", "1", "0", "1", "0", "0.000"], ["dog", "2", "2", "0", "0", "1.000"]]


def test_the_page_names_the_thresholds(tiny: memoro.Backbone, tmp_path: Path) -> None:
    save_squares(tmp_path, {"red": 4})
    (tmp_path / "tags.csv").write_text("path,labels\n" + "".join(f"red/{n:03}.png,{'ab'[n % 2]}\n" for n in range(4)))
    task = memoro.new_task(tiny, "tags", ["a", "b"], head="multilabel", seed=0)
    for calibration, words in (
        (None, "A label is predicted if its probability is at least 0.50."),
        (Calibration((1.0, 1.0), (0.3, 0.8), (), 30, "validation"), "at least its threshold, from 0.30 to 0.80."),
    ):
        task.update_spec(calibration=calibration)
        page = tmp_path / "page.html"
        memoro.evaluate(tiny, [task], tmp_path / "tags.csv", workers=0, report=page)
        assert words in check_page(page)


@pytest.mark.parametrize("facts", [{"seconds": "12"}, {"phases": ["a"]}, {"phases": {"a": "b", "c": None}}])
def test_odd_facts_do_not_stop_the_page(tiny: memoro.Backbone, tmp_path: Path, facts: dict[str, Any]) -> None:
    task = memoro.new_task(tiny, "t", ["blue", "green", "red"], seed=0)
    task.update_spec(training=facts)
    data = save_squares(tmp_path / "set")
    memoro.evaluate(tiny, [task], data, workers=0, report=tmp_path / "page.html")
    assert "Evaluation settings" in check_page(tmp_path / "page.html")


def test_labels_are_judged_by_thresholds_of_other_images(tiny: memoro.Backbone, tmp_path: Path) -> None:
    """The table agrees with the F1 of the training, whose thresholds were fitted on the same images."""
    generator = torch.Generator().manual_seed(0)
    yes = torch.rand(80, 2, generator=generator) < 0.5
    for number in range(80):
        save_square(tmp_path / f"{number}.png", "red", number)
    rows = [f"{at}.png,{'|'.join(name for name, one in zip('ab', row, strict=True) if one)}" for at, row in
            enumerate(yes.tolist())]  # fmt: skip
    (tmp_path / "tags.csv").write_text("\n".join(["path,labels", *rows]) + "\n")
    run = tmp_path / "run"
    done = memoro.train(tmp_path / "tags.csv", backbone=tiny, lr=[0.01, 0.1], folds=2, folder=run, **HOW)
    assert done.logits is not None
    assert done.targets is not None
    answers = (done.task.kind, done.task.labels, done.logits, done.targets)
    seen, unseen = (
        figures(*answers, done.task.spec.calibration)[1],
        figures(*answers[:2], decide_unseen("multilabel", *answers[2:]), done.targets)[1],
    )
    assert seen != unseen
    assert sum(float(row[-1]) for row in unseen) / 2 == pytest.approx(done.metrics["f1"], abs=1e-3)
    page = check_page(run / "report.html")
    for row in unseen:
        assert " ".join(row) in " ".join(page.split())


def test_figures_of_each_class() -> None:
    logits = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
    columns, rows = figures("softmax", ["cat", "dog", "cow"], logits, torch.tensor([0, 0, 1]))
    assert columns == ["class", "most often confused with", "images", "recall", "precision"]
    assert rows == [
        ["cat", "dog (1)", "2", "0.500", "1.000"],
        ["dog", "", "1", "1.000", "0.500"],
        ["cow", "", "0", "-", "-"],
    ]


def test_near_duplicates_are_found_and_others_not(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(20):
        small = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        image = small.resize((240, 180), Image.Resampling.BICUBIC)
        for split in ("train", "test") if number < 5 else ("train",) if number < 12 else ("test",):
            folder = tmp_path / "set" / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            if split == "train":
                image.save(folder / f"{number}.png")
            else:
                image.resize((120, 90)).save(folder / f"{number}.jpg", quality=40)
    splits = memoro.load_data(tmp_path / "set", val_fraction=0, workers=0, quiet=True)
    assert splits.test is not None
    assert splits.train is not None
    pairs = near_duplicates(splits.test, splits.train)
    assert pairs is not None
    found = {(Path(splits.test.where(a)).stem, Path(splits.train.where(b)).stem) for a, b, _ in pairs}
    assert found == {(str(number), str(number)) for number in range(5)}
    unscreened = memoro.load_data(tmp_path / "set", val_fraction=0, screen=False, quiet=True)
    assert unscreened.test is not None
    assert near_duplicates(unscreened.test, splits.train) is None


def test_elements_escape_what_is_not_html() -> None:
    hostile = "\"><script>alert('x')</script>\x1b[2J\u202e"
    page = render_page(hostile, tag("p", hostile, title=hostile), tag("b", Html("<i>ours</i>")))
    assert "<script" not in page
    assert "<b><i>ours</i></b>" in page
    assert not set(page) & set("\x1b\u202e")


def test_a_small_matrix_has_room_for_its_heading() -> None:
    chart = matrix_chart([[3, 1], [0, 2]], ["a", "b"])
    width = float(re.findall(r'<svg width="(\d+)"', chart)[0])
    start = float(re.findall(r'<text x="([\d.]+)" y="12"', chart)[0])
    assert width - start >= text_width("predicted →")
    assert "b, predicted a" not in chart
    assert "a, predicted b: 1 of 4" in chart


def test_no_label_is_cut() -> None:
    """Text is at most as wide as it is taken for: a label of wide letters began outside of the chart."""
    matplotlib = pytest.importorskip("matplotlib")
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 110)
    labels = [
        "common",
        "mummy WWW",
        "Mammoth",
        "illicit",
        "hadamard",
        "KÄFER",
        "Жужжащий",
        "0123456789",
        "a_b-c (d) [e]",
    ]
    for label in labels:
        assert font.getlength(label) / 10 <= text_width(label) < 3 * len(label) + font.getlength(label) / 10, label
    for label in labels:
        shown = shorten(label * 5, 104)
        assert shown.endswith("…")
        assert text_width(shown) <= 104
        assert shorten(label, text_width(label)) == label


@pytest.mark.parametrize("values", [[], [2.0], [3.0, 3.0], [0.0, 1e-9], [-1e6, 1e6], [1e-12, 2e-12]])
def test_charts_take_any_numbers(values: list[float]) -> None:
    points = [(float(at), value) for at, value in enumerate(values)]
    for chart in (
        line_chart([("", points)], "epoch", "loss"),
        scatter_chart(points, "true", "predicted"),
        histogram_chart(values, 1.0, "distance"),
    ):
        assert "nan" not in chart
        assert "inf" not in chart
