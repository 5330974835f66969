"""More classes and more images, later: --start-from, and eval on classes that a task does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from squares import save_squares
from typer.testing import CliRunner

import memoro
from memoro.cli import app

TRAIN = ("--image-size", 20, "--set", "batch_size=8", "--lr", 0.05, "--set", "workers=0")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    save_squares(tmp_path / "two", {"red": 8, "green": 8})
    save_squares(tmp_path / "three", {"red": 8, "green": 8, "blue": 8}, first=100)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [str(one) for one in (*arguments, "-b", "vit")])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return run


def test_a_task_gains_a_class_and_keeps_what_it_knows(shell: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ("--regime", "side", "--rank", 2, "--cells", 2)
    shell("train", "two", *TRAIN, "--task", "my colours", "--epochs", 4, *sizes)
    old = memoro.load_task("my colours.safetensors")
    before = Path("my colours.safetensors").read_bytes()

    still = ("--start-from", "my colours.safetensors", "--lr", 1e-9, "--epochs", 1, "--json")
    done = shell("train", "three", *TRAIN, *still)
    record = json.loads(done.stdout)
    assert "2 labels kept, 1 new (blue)" in done.stderr
    assert record["task"] == "my colours"
    new = memoro.load_task(record["file"])
    assert new.labels == ["blue", "green", "red"]
    assert (new.cells, new.rank) == (2, 2), "its own sizes, not the defaults"
    assert record["training"]["regime"] == "side"
    torch.testing.assert_close(new.head.weight[1:], old.head.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(new.memory, old.memory, rtol=0, atol=1e-6)
    assert not torch.allclose(new.head.weight[0], old.head.weight[0])

    # The file that was there before is kept, and still holds the old task.
    assert record["previous"] == "my colours.safetensors.1"
    assert "the old file is kept as my colours.safetensors.1" in done.stderr
    assert Path(record["previous"]).read_bytes() == before

    [entry] = new.spec.training["history"]
    assert (entry["task"], entry["labels"], entry["content"]) == ("my colours", 2, old.content_hash())
    assert "started from my colours" in " ".join(shell("inspect", record["file"]).stdout.split())

    done = shell("train", "two", *TRAIN, *still)
    assert "dropped (blue)" in done.stderr
    assert [one["labels"] for one in memoro.load_task("my colours.safetensors").spec.training["history"]] == [2, 3]


def test_starting_from_a_task_beats_starting_afresh(shell: Callable[..., Any]) -> None:
    """After a single short epoch, what was learned before still shows."""
    shell("train", "two", *TRAIN, "--task", "colours", "--epochs", 8)
    common = ("train", "two", *TRAIN, "--lr", 0.001, "--epochs", 1, "--json")
    further = json.loads(shell(*common, "--start-from", "colours.safetensors", "-o", "further.safetensors").stdout)
    afresh = json.loads(shell(*common, "-o", "afresh.safetensors").stdout)
    assert further["metrics"]["loss"] < 0.7 * afresh["metrics"]["loss"]


def test_what_cannot_be_started_from(shell: Callable[..., Any], tmp_path: Path) -> None:
    shell("train", "two", *TRAIN, "--task", "colours", "--epochs", 1)
    start = ("--start-from", "colours.safetensors", "--epochs", 1)
    save_squares(tmp_path / "others", {"blue": 4, "grey": 4})
    (tmp_path / "two" / "table.csv").write_text("path,number\nred/000.png,1.5\nred/001.png,2.5\n")

    def refused(*arguments: object) -> str:
        return str(shell("train", *arguments, *TRAIN, *start, code=1).exception)

    assert "has other labels (blue, grey) than 'colours'" in refused("others")
    assert "continues one task" in refused("a=two", "b=three")
    assert "unknown regime" in refused("two", "--regime", "full")
    assert "keeps its cells, rank and layers" in refused("two", "--cells", 3)
    assert "has a softmax head" in refused("two/table.csv", "--kind", "number")
    a, b = memoro.load_task("colours.safetensors"), memoro.load_task("colours.safetensors")
    b.update_spec(name="b")
    memoro.save_tasks([a, b], "bundle.safetensors")
    start = ("--start-from", "bundle.safetensors", "--epochs", 1)
    assert "choose one of colours, b with --task" in refused("two")
    shell("train", "two", *TRAIN, *start, "--task", "b")


def test_eval_measures_known_classes_and_lists_the_rest(shell: Callable[..., Any], tmp_path: Path) -> None:
    shell("train", "two", *TRAIN, "--task", "colours", "--epochs", 2)
    done = shell("eval", "three", "-t", "colours.safetensors", "--set", "workers=0", "--json")
    found = json.loads(done.stdout)["colours"]
    assert (found["images"], found["unknown_classes"]) == (16, {"blue": 8})
    assert "1 class that colours cannot predict: blue (8)" in done.stderr
    known = json.loads(shell("eval", "two", "-t", "colours.safetensors", "--set", "workers=0", "--json").stdout)[
        "colours"
    ]
    assert "unknown_classes" not in known
    save_squares(tmp_path / "none", {"blue": 4, "grey": 4})
    assert "labels that the task does not have" in str(
        shell("eval", "none", "-t", "colours.safetensors", code=1).exception
    )


def test_eval_of_several_labels_ignores_unknown_ones(shell: Callable[..., Any], tmp_path: Path) -> None:
    def table(name: str, *cells: str) -> Path:
        lines = [f"red/{number:03}.png,{cell}" for number, cell in enumerate(cells)]
        (tmp_path / "two" / name).write_text("\n".join(["path,labels", *lines]) + "\n")
        return tmp_path / "two" / name

    shell("train", table("tags.csv", "a|b", "a", "b", "", "a", "b|a", "b", "a"), *TRAIN, "--epochs", 1)
    backbone = memoro.load_backbone("vit")
    said: list[str] = []
    data = table("new.csv", "a|c", "c", "b|c|d", "a")
    found = memoro.evaluate(backbone, [memoro.load_task("tags.safetensors")], data, workers=0, log=said.append)["tags"]
    assert (found["images"], found["unknown_classes"]) == (4, {"c": 3, "d": 1})
    assert "2 labels that tags cannot predict: c (3), d (1)" in " ".join(said)


@pytest.mark.parametrize("regime", ["side", "joint"])
def test_images_that_may_have_been_seen_do_not_calibrate(
    shell: Callable[..., Any], tmp_path: Path, regime: str
) -> None:
    save_squares(tmp_path / "more", {"red": 40, "green": 40}, first=200)
    shell("train", "more", *TRAIN, "--task", "colours", "--epochs", 1, "--regime", regime)
    first = memoro.load_task("colours.safetensors")
    assert (first.spec.calibration is None) == (regime == "side"), "12 validation images are too few, all are enough"
    backbone, how = memoro.load_backbone("vit"), {"epochs": 1, "image_size": 20, "workers": 0, "quiet": True}
    common: dict[str, Any] = {"backbone": backbone, "val_fraction": 0.4, **how}
    fresh = memoro.train("more", lr=0.05, regime=regime, **common).task
    assert fresh.spec.calibration is not None
    for rates in (0.05, [0.05, 0.1]):  # side: a validation split, then folds
        said: list[str] = []
        done = memoro.train("more", lr=rates, start_from=fresh, log=said.append, **common)
        assert done.task.spec.calibration is None
        assert "an earlier training may have seen these images" in done.task.spec.training["calibration"]
        assert any("scores may be optimistic" in text for text in said)
        assert any("scores may be optimistic" in text for text in done.notes)
    again = memoro.fit(backbone, fresh, "more", val_fraction=0.4, **how).task
    assert again.spec.calibration is None, "it was trained before, on other splits perhaps"


def test_the_images_of_all_trainings_are_recognised(shell: Callable[..., Any]) -> None:
    shell("train", "two", *TRAIN, "--task", "colours", "--epochs", 1)
    old = memoro.load_task("colours.safetensors").spec.training["image_sketch"]
    shell("train", "three", *TRAIN, "--start-from", "colours.safetensors", "--epochs", 1)
    new = memoro.load_task("colours.safetensors").spec.training["image_sketch"]
    assert len(old) == 16
    assert len(new) == 16 + 24
    assert set(old) < set(new)
    assert "image sketch" not in shell("inspect", "colours.safetensors").stdout
    task = memoro.load_task("colours.safetensors")
    task.update_spec(training={"data": "two"})  # as of an older version, which did not record the images
    memoro.save_task(task, "colours.safetensors")
    shell("train", "three", *TRAIN, "--start-from", "colours.safetensors", "--epochs", 1)
    assert "image_sketch" not in memoro.load_task("colours.safetensors").spec.training


def test_the_start_decides_recipe_and_rates(shell: Callable[..., Any]) -> None:
    quick = [word for word in TRAIN if word not in ("--lr", 0.05)]
    shell("train", "two", *TRAIN, "--task", "colours", "--regime", "head", "--epochs", 1)
    done = shell("train", "two", *quick, "--start-from", "colours.safetensors", "--epochs", 1, "--json")
    record = json.loads(done.stdout)
    assert (record["training"]["regime"], record["training"]["optimizer"]) == ("head", "sgd")
    assert [row["lr"] for row in record["runs"]] == [0.03, 0.1, 0.3]


def test_a_sweep_may_start_from_a_task(shell: Callable[..., Any]) -> None:
    shell("train", "two", *TRAIN, "--task", "colours", "--epochs", 1, "--rank", 2)
    words = ("--start-from", "colours.safetensors", "--lr", "0.001,0.01", "--epochs", 1, "--json")
    record = json.loads(shell("train", "two", *TRAIN, *words).stdout)
    assert [(row["rank"], row["lr"]) for row in record["runs"]] == [(2, 0.001), (2, 0.01)]


def test_a_resume_starts_from_the_same_task(shell: Callable[..., Any]) -> None:
    for name, seed in (("old", 0), ("older", 1)):
        shell("train", "two", *TRAIN, "--task", name, "--epochs", 1, "--seed", seed)
    again = ("train", "two", *TRAIN, "--epochs", 1, "--task", "new")
    shell(*again, "--start-from", "old.safetensors")
    shell(*again, "--start-from", "old.safetensors", "--resume")
    for other in ((), ("--start-from", "older.safetensors")):
        problem = str(shell(*again, *other, "--resume", code=1).exception)
        assert problem.startswith("cannot resume: task differ")
        assert "(start_from " in problem
