"""Metrics, predictions of files, and what is shown of odd names and records."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_task
from PIL import Image
from shell import Shell, shell
from squares import save_squares

import memoro
from memoro.backbones import Backbone
from memoro.console import bar, make_table, plain_console, printable
from memoro.demo.demo import Cost, DemoResult, write_page
from memoro.errors import ImageError
from memoro.evaluation.metrics import decide, measure, warn_of
from memoro.heads import HEADS
from memoro.images import open_image

__all__ = ["shell"]  # a fixture


def test_r2_is_the_mean_over_outputs() -> None:
    """Pooled, the output with the larger values would decide alone."""
    targets = torch.tensor([[0.0, 0.0], [100.0, 1.0], [200.0, 2.0]])
    values = torch.tensor([[0.0, 2.0], [100.0, 1.0], [200.0, 0.0]])
    assert measure("regression", ["large", "small"], values, targets)["r2"] == pytest.approx((1 - 3) / 2)
    targets[:, 1] = 5.0
    found = measure("regression", ["large", "constant"], values, targets)["r2"]
    assert found == pytest.approx(1), "an output without variation is left out"
    same = torch.full((1000, 1), 0.1)  # their mean in float32 is another number
    assert measure("regression", ["constant"], same + 1, same)["r2"] is None
    assert HEADS["regression"].figures(["constant"], *decide("regression", same + 1), same)[1][0][-1] == "-"


def test_the_shell_predicts_what_python_predicts(shell: Shell, backbone: Backbone, tmp_path: Path) -> None:
    task = random_task(backbone, "pets", labels=["cat", "dog"])
    other = random_task(backbone, "wide", seed=1)
    memoro.save_task(task, tmp_path / "pets.safetensors")
    memoro.save_task(other, tmp_path / "wide.safetensors")
    generator = np.random.default_rng(0)
    for number in range(3):  # large enough to be decoded at a fraction of its size
        image = Image.fromarray(generator.integers(0, 256, (300, 400, 3), dtype=np.uint8))
        image.save(tmp_path / f"{number}.jpg", quality=95)
    names = [f"{number}.jpg" for number in range(3)]
    files = ("-t", "pets.safetensors", "-t", "wide.safetensors")
    found = json.loads(shell("predict", *names, "-b", "vit", *files, "--format", "json").out)
    expected = memoro.compose(backbone, [task, other]).predict(names)
    renamed = json.loads(
        shell("predict", names[0], "-b", "vit", "-t", "other=wide.safetensors", "--format", "json").out
    )
    [single] = memoro.compose(backbone, [other]).predict(names[:1])  # another batch size may round differently
    wanted = single["wide"]["probabilities"]
    assert renamed[names[0]]["other"]["probabilities"] == pytest.approx(wanted, abs=1e-5)  # float32
    assert found[names[0]]["pets"]["probabilities"] != pytest.approx(wanted, abs=1e-2)
    assert list(found) == names
    for answers, wanted in zip(found.values(), expected, strict=True):
        for name in ("pets", "wide"):
            assert answers[name]["probabilities"] == pytest.approx(wanted[name]["probabilities"], abs=1e-5)  # float32
    assert len({json.dumps(answers) for answers in found.values()}) == 3
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    said = shell("predict", "bad.jpg", *names, "-b", "vit", *files, "--format", "json")
    assert "1 of 4 images could not be read, such as bad.jpg: not a readable image" in said.err
    assert json.loads(said.out) == {"bad.jpg": {"error": "not a readable image (no known format)."}, **found}


def test_file_that_fails_only_as_a_draft_has_a_row_with_the_error(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(4)]
    for path in paths:
        Image.new("RGB", (30, 30)).save(path)

    def open_draft(source: Any, *, draft: Any = None, **options: Any) -> Image.Image:
        if source == paths[2] and draft is not None:
            raise ImageError(f"{source}: not a readable image.")
        return open_image(source, draft=draft, **options)

    monkeypatch.setattr("memoro.images.decoding.open_image", open_draft)
    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    rows = list(model.predict_stream(paths, batch_size=3))
    assert [row.image for row in rows] == [str(path) for path in paths]
    assert [row.error for row in rows] == [None, None, "not a readable image.", None]
    assert [list(row.answers) for row in rows] == [["pets"], ["pets"], [], ["pets"]]


# ------------------------------------------------------------------------------------------- control characters

FORGED = "cat\n\x1b[2J\x9b31m\u202egod\u2028\x7f\x00"
ESCAPED = r"cat\n\x1b[2J\x9b31m\u202egod\u2028\x7f\x00"


def test_control_characters_are_escaped_and_other_text_stays() -> None:
    assert printable(FORGED) == ESCAPED
    for name in ("猫 :cat: [b]", "می\u200cخواهم", "👩\u200d🔬", "é e\u0301", "C:\\new", ""):
        assert printable(name) == name
    assert printable("a\udc80b") == r"a\udc80b", "part of a file name that is not UTF-8"
    console = plain_console(file=io.StringIO(), width=200)
    console.print(FORGED, make_table([FORGED], [[FORGED], [[FORGED, "second line"]]], FORGED))
    with bar(FORGED, 1, quiet=True):
        pass
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(ESCAPED) == 5
    assert "second line" in shown
    assert not set(shown) & set("\x1b\x9b\u202e\u2028\x7f\x00")


def test_the_shell_escapes_labels_names_and_paths(
    shell: Shell,
    backbone: Backbone,
    tmp_path: Path,
) -> None:
    name = FORGED.replace("\x00", "")  # what a file may be called
    escaped = printable(name)
    task = random_task(backbone, "pets", labels=[FORGED, "dog"])
    task.update_spec(training={FORGED: FORGED}, metrics={"worst_classes": {FORGED: 0.5}})
    memoro.save_task(task, tmp_path / f"{name}.safetensors")
    Image.new("RGB", (20, 20)).save(tmp_path / f"{name}.png")
    (tmp_path / f"{name}.jpg").write_bytes(b"junk")
    outputs = [
        shell("inspect", f"{name}.safetensors").out,
        shell("predict", f"{name}.png", f"{name}.jpg", "-b", "vit", "-t", f"{name}.safetensors").out,
        shell("predict", f"{name}.png", f"{name}.jpg", "-b", "vit", "-t", f"{name}.safetensors").err,
        shell("inspect", f"{name}.missing", code=1).err,
        shell("compose", f"{name}.safetensors", "-o", f"{name}.bundle").out,
        shell("cache", "--folder", tmp_path / name).out,
    ]
    for text in outputs:
        assert escaped in text
        assert not set(text) & set("\x1b\x9b\u202e\u2028\x7f\x00"), text


class Images(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.targets)


def test_the_demo_page_escapes_names(backbone: Backbone, tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 20))
    (tmp_path / "file").write_bytes(b"")
    results: dict[str, Any] = {}
    for name in ("letter", "style", "case", "digit", "parity"):
        task = random_task(backbone, name, labels=[FORGED + "<b>", "dog"])
        task.update_spec(training={"lr": 0.1})
        test = Images(labels=task.labels, targets=[0, 1], key=str, open=lambda at: image)
        result = SimpleNamespace(task=task, metrics={"accuracy": 0.5}, history=[{"epoch": 1, "val_accuracy": 0.5}])
        results[name] = DemoResult(tmp_path / "file", SimpleNamespace(test=test), result, 0.5, 0.5, 0.5)  # type: ignore[arg-type]
    model = memoro.compose(backbone, [found.result.task for found in results.values()])
    text = write_page(tmp_path / "page.html", model, results, Cost(1.0, 2.0), "equal").read_text()
    assert ESCAPED + "&lt;b&gt;" in text
    assert not set(text) & set("\x1b\x9b\u202e\u2028\x7f\x00")


def test_metrics_are_those_of_torchmetrics() -> None:
    """Which is too slow to import for two functions."""
    from torchmetrics.functional.classification import binary_average_precision, multiclass_calibration_error

    generator = torch.Generator().manual_seed(0)
    for classes in (2, 5, 40):
        logits = 3 * torch.randn(300, classes, generator=generator)
        targets = torch.randint(classes, (300,), generator=generator)
        found = measure("softmax", [str(at) for at in range(classes)], logits, targets)
        wanted = multiclass_calibration_error(logits.softmax(dim=-1), targets, classes, n_bins=15)
        assert found["calibration_error"] == pytest.approx(float(wanted), abs=1e-6)
    logits = torch.randn(200, 3, generator=generator).mul(2).round()  # many of them equal
    truth = torch.randint(2, (200, 3), generator=generator)
    each = [float(binary_average_precision(logits[:, at].sigmoid(), truth[:, at])) for at in range(3)]
    found = measure("multilabel", ["a", "b", "c"], logits, truth.float())
    assert found["mean_average_precision"] == pytest.approx(sum(each) / 3, abs=1e-6)


def test_a_model_that_answers_one_class_is_warned_of() -> None:
    targets = torch.tensor([0, 0, 0, 1])
    lazy = {"split": "test", **measure("softmax", ["a", "b"], torch.tensor([[1.0, 0.0]] * 4), targets)}
    assert warn_of(lazy) == "accuracy is 0.750 (test): no better than always predicting the most frequent class."
    good = {"split": "test", **measure("softmax", ["a", "b"], F.one_hot(targets, 2).float(), targets)}
    assert warn_of(good) is None
    one_class = {
        "split": "all",
        **measure("softmax", ["a", "b"], torch.tensor([[1.0, 0.0]] * 4), torch.zeros(4).long()),
    }
    assert warn_of(one_class) is None


def test_evaluate_says_what_it_left_out_and_what_was_learned(
    backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_squares(tmp_path / "set" / "train", dict.fromkeys(("red", "blue"), 8))
    shutil.copytree(tmp_path / "set" / "train", tmp_path / "set" / "test")
    (tmp_path / "set" / "test" / "red" / "broken.png").write_bytes(b"no image")
    quick: dict[str, Any] = {"epochs": 1, "lr": 0.1, "image_size": 20, "workers": 0, "quiet": True}
    task = memoro.train(tmp_path / "set", backbone=backbone, regime="side", task="squares", **quick).task
    capsys.readouterr()
    said: list[str] = []
    [found] = memoro.evaluate(backbone, task, tmp_path / "set", workers=0, log=said.append).values()
    assert found["skipped"] == 1
    assert any(text.startswith("note: 1 unreadable image was left out") for text in said)
    assert any("warning: squares: 14 images of set:test" in text for text in said)
    assert (found["images"], found["learned_images"]) == (2, 14), "two were held out"
    shutil.rmtree(tmp_path / "set" / "test")
    memoro.evaluate(backbone, task, tmp_path / "set", workers=0)
    said_there = capsys.readouterr().err
    assert "squares was trained on some of these images, so this overestimates accuracy on new images" in said_there


@pytest.mark.parametrize("how", ["csv", "object", "saved", "metadata"])
def test_tasks_with_the_same_labels_have_columns_of_their_own(backbone: Backbone, tmp_path: Path, how: str) -> None:
    """Both say yes to every image: what differs is what their columns say."""
    names, answers = ["no", "yes"], {"left": [1, 1, 1, 0] * 3, "right": [0, 0, 0, 1] * 3}
    tasks = [memoro.new_task(backbone, name, names, cells=0) for name in answers]
    for task in tasks:
        torch.nn.init.zeros_(task.head.weight)
        task.head.bias.data = torch.tensor([0.0, 5.0])
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(12)]
    columns = {name: datasets.ClassLabel(names=names) for name in answers}
    rows = {"image": [open_image(file) for file in files], **answers}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), **columns}))
    lines = [f"{at}.png,{names[answers['left'][at]]},{names[answers['right'][at]]}\n" for at in range(12)]
    source: Any = table
    if how == "saved":
        source = tmp_path / "saved"
        table.save_to_disk(source)
    if how in {"csv", "metadata"}:
        file = tmp_path / ("set.csv" if how == "csv" else "metadata.csv")
        file.write_text("".join(["file_name,left,right\n", *lines]))
        source = file if how == "csv" else tmp_path
    found = memoro.evaluate(backbone, tasks, source, workers=0)
    assert {name: one["accuracy"] for name, one in found.items()} == {"left": 0.75, "right": 0.25}
