"""What the command line says: names as they are, figures with their meaning, errors with a way out."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_task
from rich.console import Console
from shell import Shell, save_images, shell

import memoro
from memoro.answer import Answer
from memoro.backbones import Backbone
from memoro.console import bar, format_bytes, plain_console, quiet_libraries
from memoro.data import Augment, load_data
from memoro.engine import verify
from memoro.engine.answers import Prediction
from memoro.errors import BackboneError, DataError
from memoro.evaluation.inspect import inspect_tables, inspect_tasks
from memoro.evaluation.metrics import metrics_tables
from memoro.evaluation.predictions import predictions_table
from memoro.training.checkpoint import compare_identities
from memoro.training.recipe import Recipe
from memoro.training.result import SettingRow, TrainResult, fit_table, sweep_table
from memoro.training.runfolder import ProgressBar

__all__ = ["shell"]  # a fixture

STRANGE = "x[bold]y:cat:"


@pytest.fixture
def pets(backbone: Backbone, tmp_path: Path) -> Path:
    task = random_task(backbone, "pets", labels=["cat", "dog"])
    return memoro.save_task(task, tmp_path / "pets.safetensors")


def rendered(*things: Any, console: Console | None = None) -> str:
    console = console or Console(file=io.StringIO(), width=200)
    for thing in things:
        console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --------------------------------------------------------------------------------------------- names stay as they are


def test_strange_names_are_shown_as_they_are(shell: Shell, backbone: Backbone, tmp_path: Path) -> None:
    name = "t[b]:dog:"
    memoro.save_task(random_task(backbone, name, labels=[STRANGE, ":fish:"]), tmp_path / "t[i]:ox:.safetensors")
    images = save_images(tmp_path / "train", f"{STRANGE}/1.png", f"{STRANGE}/2.png", ":fish:/1.png")
    said = shell("predict", images / STRANGE, "-b", "vit", "-t", "t[i]:ox:.safetensors")
    assert f"{STRANGE}/1.png" in said.out
    assert name in said.out
    measured = shell("eval", images, "-b", "vit", "-t", "t[i]:ox:.safetensors", "--set", "workers=0")
    assert name in measured.out
    assert f"train:train: one pass over 3 images for {name}" in measured.err
    shown = shell("inspect", "t[i]:ox:.safetensors").out
    assert all(part in shown for part in (name, STRANGE, ":fish:", "t[i]:ox:.safetensors"))
    assert "a[red]:cat:.safetensors" in shell("inspect", "a[red]:cat:.safetensors", code=1).err
    composed = shell("compose", "t[i]:ox:.safetensors", "-o", "[b]:ox:").out
    assert composed.startswith(f"[b]:ox:: {name} (")


def test_tables_and_bars_escape_for_every_console(
    backbone: Backbone, pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Answer(label=STRANGE, probability=0.5, probabilities={STRANGE: 0.5})
    assert rendered(predictions_table([Prediction(f"{STRANGE}.jpg", {STRANGE: answer})], 1)).count(STRANGE) == 3
    figures = {"split": "test", "images": 3, "accuracy": 0.5, "worst_classes": {STRANGE: 0.5}}
    assert rendered(*metrics_tables({STRANGE: figures})).count(STRANGE) == 3
    assert STRANGE in rendered(
        sweep_table(STRANGE, [SettingRow(1, 0, 0, 0.1, (0.5,), 1.0, (), 0)], "validation accuracy")
    )
    record = inspect_tasks(pets, [random_task(backbone, STRANGE, labels=[STRANGE, "b"])])
    assert rendered(*inspect_tables(record)).count(STRANGE) == 2
    with bar(f"{STRANGE} a:train:b", 1):
        pass
    shown = ProgressBar(STRANGE, 1, quiet=False)
    with shown:
        pass
    assert "🐱" not in capsys.readouterr().err
    assert rendered(STRANGE, console=plain_console(file=io.StringIO(), width=80)) == f"{STRANGE}\n"
    assert f"{STRANGE} " in rendered(shown.progress.get_renderable())


# ------------------------------------------------------------------------------------------------------------- figures


def test_eval_warns_of_data_without_a_test_split(shell: Shell, pets: Path, tmp_path: Path) -> None:
    common = ("-b", "vit", "-t", pets, "--set", "workers=0")
    save_images(tmp_path / "all", "cat/1.png", "dog/1.png", "dog/2.png")
    notes = [line for line in shell("eval", "all", *common).err.splitlines() if line.startswith("note")]
    assert notes[0] == (
        "note: all has no test split: evaluated on all 3 images. If pets was trained on them, this overestimates "
        "accuracy on new images."
    )
    save_images(tmp_path / "half", "train/cat/1.png", "train/dog/1.png", "val/dog/2.png")
    assert "half has no test split: evaluated on the 1 image of val." in shell("eval", "half", *common).err
    save_images(tmp_path / "cut", "train/cat/1.png", "train/dog/1.png", "test/dog/2.png")
    said = shell("eval", "cut", *common)
    assert "note" not in said.err
    assert "over 1 image for pets" in said.err


def test_verify_says_what_its_number_is(
    shell: Shell, backbone: Backbone, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memoro.save_task(random_task(backbone, "rooms", seed=1), tmp_path / "rooms.safetensors")
    alone = shell("verify", "-b", "vit", "-t", pets).out
    assert "tasks     1 (pets): only one task, so there is nothing to compare" in alone
    both = ("verify", "-b", "vit", "-t", pets, "-t", "rooms.safetensors")
    said = shell(*both).out
    assert "tasks     2; largest logit difference between a task alone and composed: " in said
    assert ", within the rounding bound of " in said
    monkeypatch.setitem(verify.ROUNDING, torch.float32, -1.0)  # so that any difference is too much
    assert "DIFFERENT: above the rounding bound of" in shell(*both, code=1).out
    assert '"tasks_equal": false' in shell(*both, "--json", code=1).out
    help_text = " ".join(shell("verify", "--help").out.split())
    assert "Exits with 1 if the backbone's output differs, or a task's by more than its bound" in help_text


def test_a_task_beyond_its_bound_is_named_before_a_larger_difference() -> None:
    made = verify.Verification(
        True, 0.0, {"a": 1e-3, "b": 2e-4}, {"a": 1e-2, "b": 1e-4}, 2, "x", "f" * 64, "float32", "cpu"
    )
    assert not made.tasks_equal
    assert "0.0002 (b), DIFFERENT" in str(made)


@pytest.mark.parametrize("kind", ["softmax", "regression"])
def test_tables_leave_out_what_is_empty(backbone: Backbone, kind: str) -> None:
    figures = {"split": "test", "images": 2, "loss": 1.0, "r2": None}
    if kind == "softmax":
        figures |= {"accuracy": 1.0, "worst_classes": {"cat": 1.0, "dog": 1.0}}
    text = rendered(*metrics_tables({"pets": figures}))
    assert "worst" not in text
    assert "R²" not in text
    rows = [SettingRow(5, 0, 0, 0.1, (0.5,), 1.0, (), 0)]
    assert "test" not in rendered(sweep_table("pets", rows, "validation accuracy"))
    assert "diverged" not in rendered(sweep_table("pets", rows, "validation accuracy"))
    assert "diverged" in rendered(sweep_table("pets", [*rows, SettingRow(5, 0, 0, 9.0, (), 1.0, (0.5,), 1)], "x"))


def test_the_worst_classes_are_those_with_mistakes(backbone: Backbone, pets: Path) -> None:
    shares = {"g": 0.0, "b": 0.5, "a": 0.75, "e": 0.9, "c": 1.0}
    figures = {"split": "test", "images": 1, "accuracy": 0.5, "worst_classes": shares}
    task = random_task(backbone, "pets")
    task.update_spec(training={"trained_parameters": 3, "best_epoch": 1, "epochs": 2, "seconds": 1.0}, metrics=figures)
    text = rendered(fit_table(TrainResult(task, [], figures, None, (), file=pets)))
    assert "g 0.000, b 0.500, a 0.750, e 0.900 " in text
    assert "1.000" not in text
    assert "(test, 1 image)" in text
    assert "pets, worst classes: g 0.000, b 0.500, a 0.750, e 0.900\n" in rendered(*metrics_tables({"pets": figures}))
    inspected = rendered(*inspect_tables(inspect_tasks(pets, [task])))
    assert "worst classes g 0.000, b 0.500, a 0.750, e 0.900" in inspected
    assert "{" not in inspected


def test_layers_and_sizes_are_counted_right(backbone: Backbone, pets: Path) -> None:
    depth = backbone.depth
    for first, words in (
        (1, f"layers 1 to {depth - 1}"),
        (depth - 1, f"layer {depth - 1} "),
        (depth, "none: a head on"),
    ):
        task = random_task(backbone, "pets", from_layer=first)
        assert words in rendered(*inspect_tables(inspect_tasks(pets, [task])))
    assert [format_bytes(size) for size in (999, 50_800, 2.5e6, 3e9)] == ["1.0 kB", "50.8 kB", "2.5 MB", "3.0 GB"]


def test_predict_without_a_readable_image_fails(shell: Shell, pets: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"junk")
    said = shell("predict", "bad.png", "-b", "vit", "-t", pets, code=1)
    assert "not a readable image (no known format)." in said.out
    assert "bad.png: not a readable image" in said.err


def test_the_bar_ends_on_the_last_validation_and_says_whose() -> None:
    def group(runs: int) -> Any:
        run = SimpleNamespace(history=[], held_out=None)
        return SimpleNamespace(runs=[run] * runs, step=0)

    for runs, title in ((1, "training pets"), (15, "training, best of 15 runs")):
        shown = ProgressBar("pets", 2, quiet=True)
        shown.on_train_begin([group(runs)])
        shown.on_step_end(group(runs), {"epoch": 1, "loss": 0.5})
        shown.on_epoch_end(group(runs), [{"val_accuracy": 0.25}])
        shown.on_step_end(group(runs), {"epoch": 2, "loss": 0.4})
        shown.on_epoch_end(group(runs), [{"val_accuracy": 0.5}, {"val_accuracy": 0.75}, {"val_r2": 0.1}])
        [job] = shown.progress.tasks
        assert (job.description, job.completed) == (title, 2)
        assert job.fields["figures"] == "epoch 2, train loss 0.4, validation accuracy 0.750, validation R² 0.100"
        shown.narrow = True
        shown.on_epoch_end(group(runs), [])
        assert job.fields["figures"] == "validation accuracy 0.750, validation R² 0.100"


# -------------------------------------------------------------------------------------------------------------- errors


def test_tasks_that_do_not_go_together_are_told_for_the_shell(
    shell: Shell, backbone: Backbone, pets: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.safetensors").write_bytes(pets.read_bytes())
    child = random_task(backbone, "child", seed=1, extends=[memoro.load_task(pets)])
    memoro.save_task(child, tmp_path / "child.safetensors")
    save_images(tmp_path / "set", "1.png")
    twice = ("-t", "pets.safetensors", "-t", "other.safetensors")
    for command in (
        ("compose", "pets.safetensors", "other.safetensors", "-o", "x"),
        ("verify", "-b", "vit", *twice),
        ("eval", "nothing", "-b", "vit", *twice),
        ("predict", "set", "-b", "vit", *twice),
    ):
        told = shell(*command, code=1).err
        assert "two tasks are called 'pets', in pets.safetensors and in other.safetensors" in told
        assert "give one of them another name: " in told
        assert "OTHER=other.safetensors" in told
    shell("compose", "pets.safetensors", "cats=other.safetensors", "-o", "both.safetensors")
    assert [task.name for task in memoro.load_tasks("both.safetensors")] == ["pets", "cats"]
    assert "contains 2 tasks" in shell("compose", "cats=both.safetensors", "-o", "x", code=1).err
    assert "give it once" in shell("compose", "pets.safetensors", "pets.safetensors", "-o", "x", code=1).err
    for command, advice in (
        (("compose", "child.safetensors", "-o", "x"), "Add pets.safetensors"),
        (("verify", "-b", "vit", "-t", "child.safetensors"), "Add -t pets.safetensors"),
        (("eval", "nothing", "-b", "vit", "-t", "child.safetensors"), "Add -t pets.safetensors"),
        (("train", "nothing", "-b", "vit", "--extends", "child.safetensors"), "Add --extends pets.safetensors"),
    ):
        assert f"which was not given. {advice}, or the path" in shell(*command, code=1).err


def test_bad_options_are_refused_before_anything_is_read(shell: Shell, tmp_path: Path) -> None:
    for folds in ("1", "-2"):
        assert (
            "choose 2 or more, or 0" in shell("train", "nothing", "-b", "none", "--set", f"folds={folds}", code=1).err
        )
    save_images(tmp_path / "set", "a/1.png", "b/1.png")
    assert (
        shell("train", "set", "-b", "none", "--set", "flip=3", code=1).err
        == "error: flip 3.0: choose a probability from 0 to 1.\n"
    )
    with pytest.raises(DataError, match="padding 2: choose a fraction"):
        Augment(padding=2)


def test_a_table_of_one_class_is_told_of_rows(tmp_path: Path) -> None:
    save_images(tmp_path, "1.png", "2.png")
    (tmp_path / "one.csv").write_text("path,label\n1.png,a\n2.png,a\n")
    with pytest.raises(DataError, match="Add a folder, or rows of a table, for another class"):
        load_data(tmp_path / "one.csv")


def identity(*rates: float, **changes: Any) -> dict[str, Any]:
    recipes = [Recipe(lr=rate, **changes).to_json() for rate in rates]
    return {"recipe": recipes, "task": [{"name": "pets", "cells": 5}] * len(rates), "features": "float16"}


def test_a_refused_resume_names_what_differs() -> None:
    assert compare_identities(identity(0.1), identity(0.1)) == ([], "")
    assert compare_identities(identity(0.1), identity(0.5)) == (["recipe"], "lr 0.1 in the checkpoint, 0.5 now")
    flipped = identity(0.1, augment=Augment(flip=0.0), epochs=3)
    assert compare_identities(identity(0.1), flipped) == (
        ["recipe"],
        "epochs 15 in the checkpoint, 3 now; augment.flip null in the checkpoint, 0.0 now",
    )
    assert compare_identities(identity(0.03, 0.1, 0.3), identity(0.5)) == (
        ["recipe"],
        "3 runs in the checkpoint, 1 now; lr 0.03, 0.1, 0.3 in the checkpoint, 0.5 now",
    )
    assert compare_identities(identity(0.1), identity(0.1, 0.1)) == (["runs"], "1 run in the checkpoint, 2 now")
    kept = {**identity(0.1), "features": None}
    assert compare_identities(identity(0.1), kept) == (["features"], 'features "float16" in the checkpoint, null now')


def test_offline_the_hub_is_quiet_and_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    quiet_libraries()
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.ERROR)

    def fail(source: str, **options: object) -> None:
        raise OSError("no network.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    way_out = r"\(no network\)\..*`hf download owner/name --local-dir FOLDER`, then give FOLDER as `backbone`\.$"
    with pytest.raises(BackboneError, match=way_out):
        memoro.load_backbone("owner/name")
    with pytest.raises(BackboneError, match=r"pass the folder\.$"):
        memoro.load_backbone("./owner")
