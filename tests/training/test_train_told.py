"""What a training says while it runs and when it ends: progress, time, what it left out, kept and replaced."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from families import CASES
from rich.console import Console
from squares import save_squares
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.clock import Phases
from memoro.console import bar
from memoro.errors import CompositionError, TaskFileError
from memoro.evaluation.inspect import inspect_tables, inspect_tasks
from memoro.evaluation.metrics import metrics_tables
from memoro.files import keep_copy, write_whole
from memoro.training import Cache
from memoro.training.cached import GIGABYTE, what_is_kept
from memoro.training.result import SettingRow, sweep_table

TRAIN = ("-b", "vit", "--image-size", 20, "--set", "batch_size=8", "--set", "workers=0", "--epochs", 2)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    save_squares(tmp_path / "set" / "train", {"red": 20, "green": 20})
    save_squares(tmp_path / "set" / "test", {"red": 4, "green": 4}, first=900)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [str(one) for one in arguments])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return run


def test_progress_is_text_where_there_is_no_terminal_and_time_is_told(
    shell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.console.LINE_SECONDS", 0.0)
    done = shell("train", "set", *TRAIN, "--regime", "side", "--lr", 0.05, "--json")
    record = json.loads(done.stdout)
    lines = done.stderr.splitlines()
    for phase in ("checking set:train: 40 of 40", "features (", "training set: ", "evaluating: "):
        assert any(line.startswith(phase) for line in lines), phase
    last = [line for line in lines if line.startswith("evaluating: ")][-1]
    assert last.split()[1] == last.split()[3].rstrip(",")  # all of them
    steps = [line for line in lines if line.startswith("training set: ")]
    assert len(steps) > 8
    assert "epoch 1, train loss" in steps[3]
    best = max(entry["val_accuracy"] for entry in metrics_of(record) if "val_accuracy" in entry)
    assert f"validation accuracy {best:.3f}" in steps[-1]
    assert "\x1b" not in done.stderr

    facts = record["training"]
    assert set(facts["phases"]) <= {"start-up", "reading", "checking", "base passes", "training", "evaluation", "plots"}
    assert {"base passes", "training"} <= set(facts["phases"])
    assert sum(facts["phases"].values()) == pytest.approx(facts["seconds"], abs=0.5)
    assert memoro.load_task("set.safetensors").spec.training["phases"] == facts["phases"]
    assert (
        "checking" in shell("eval", "set", "-b", "vit", "-t", "set.safetensors", "--json", "--set", "workers=0").stderr
    )


def test_the_read_out_is_told_before_the_training(shell: Callable[..., Any]) -> None:
    lines = shell("train", "set", *TRAIN).stderr.splitlines()
    told = [at for at, line in enumerate(lines) if line.startswith("note: set: read-out: accuracy 1.000 on images")]
    trained = [at for at, line in enumerate(lines) if line.startswith("training, best of 5 runs: ")]
    assert len(told) == 1
    assert told[0] < trained[0]
    assert "mean fold accuracy" in lines[trained[-1]]


def metrics_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(record["folder"]) / "metrics.jsonl").read_text().splitlines()]


def test_lines_come_every_ten_seconds(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("memoro.console.time.monotonic", lambda: now[0])
    with bar("copying", 100) as tick:
        for _ in range(100):
            now[0] += 0.7
            tick()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "copying: 0 of 100"
    assert lines[-1] == "copying: 100 of 100, 70 s"
    assert len(lines) == 2 + 6
    with bar("silently", 1, quiet=True) as tick:
        tick()
    assert capfd.readouterr().err == ""


def test_phases_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("memoro.clock.time.monotonic", lambda: now[0])
    phases = Phases("reading")
    now[0] = 2.0
    with phases.during("checking"):
        now[0] = 5.0
    now[0] = 6.0
    phases.switch("training")
    phases.add("training", 100.0)
    now[0] = 16.0
    assert phases.seconds == {"reading": 3.0, "checking": 3.0, "training": 110.0}


def test_only_the_chosen_setting_has_a_test_figure(shell: Callable[..., Any]) -> None:
    done = shell("train", "set", *TRAIN, "--regime", "memory", "--json")
    runs = json.loads(done.stdout)["runs"]
    chosen = [run for run in runs if run["chosen"]]
    assert (len(runs), len(chosen)) == (3, 1)
    assert [bool(run["test"]) for run in runs] == [run["chosen"] for run in runs]
    rows = [SettingRow(5, 0, 0, 0.1, (0.5,), 1.0, (), 0), SettingRow(5, 0, 0, 0.3, (0.9,), 1.0, (0.7,), 0, chosen=True)]
    text = rendered(sweep_table("set", rows, "validation accuracy"))
    assert text.count("0.700") == 1
    assert text.index("0.900") < text.index("0.500")
    assert "validation" in text


def test_what_was_left_out_kept_and_replaced_is_told(
    shell: Callable[..., Any], tmp_path: Path, own_cache: Path
) -> None:
    (tmp_path / "set" / "train" / "red" / "broken, old.png").write_bytes(b"no image")
    (tmp_path / "set" / "train" / "red" / "empty.png").write_bytes(b"")
    done = shell("train", "set", *TRAIN, "--regime", "side", "--lr", 0.05)
    assert "listed in runs/set/skipped.csv" in done.stderr
    with (tmp_path / "runs" / "set" / "skipped.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(Path(row["image"]).name for row in rows) == ["broken, old.png", "empty.png"]
    assert all(row["reason"] for row in rows)
    assert f"of features are cached in {own_cache} for later trainings" in done.stderr
    assert "memoro cache --clear\n" in done.stderr
    assert "probabilities are not calibrated (fewer than 20 images were held out)." in done.stderr

    for name in ("broken, old.png", "empty.png"):
        (tmp_path / "set" / "train" / "red" / name).unlink()
    done = shell("train", "set", *TRAIN, "--lr", 0.1, "--set", "cache=false")
    assert not (tmp_path / "runs" / "set" / "skipped.csv").exists()
    assert "features" not in done.stderr
    assert "set.safetensors was there already: the old file is kept as set.safetensors.1" in done.stderr
    rates = [memoro.load_task(f"set.safetensors{number}").spec.training["lr"] for number in (".1", "")]
    assert rates == [0.05, 0.1]


def test_resume_says_where_it_goes_on(shell: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from memoro.training.loop import Trainer

    step, steps = Trainer.step, []

    def interrupted(self: Trainer, taken: Any) -> None:
        step(self, taken)
        steps.append(1)
        if len(steps) == 7:
            self.save()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        done = shell("train", "set", *TRAIN, "--lr", 0.05, code=130)
    assert "--resume" in done.stderr
    done = shell("train", "set", *TRAIN, "--lr", 0.05, "--resume")
    assert "resuming in runs/set at step 8 of 10 (epoch 2), after" in done.stderr
    before = Path("set.safetensors").read_bytes()
    done = shell("train", "set", *TRAIN, "--lr", 0.05, "--resume")
    assert "is already finished: only evaluating it again" in done.stderr
    assert not Path("set.safetensors.1").exists(), "the same task needs no second file"
    assert memoro.load_task("set.safetensors").content_hash() in str(before)


def test_replaced_files_never_replace_each_other(tmp_path: Path) -> None:
    file = tmp_path / "pets.safetensors"
    for text in (b"a", b"b", b"c"):
        if file.exists():
            keep_copy(file)
        write_whole(file, text)
    assert [(tmp_path / f"pets.safetensors.{number}").read_text() for number in (1, 2)] == ["a", "b"]
    file.unlink()
    with pytest.raises(TaskFileError, match=r"cannot keep .* so it is not replaced"):
        keep_copy(file)


def test_the_command_that_clears_a_folder_can_be_pasted(tmp_path: Path) -> None:
    place = tmp_path / "my features"
    place.mkdir()
    assert what_is_kept(Cache(place)).endswith(f"memoro cache --clear --folder '{place}'")


def test_the_default_budget_is_a_share_of_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "features" / "a" / "b.features"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(1000))
    usage = shutil.disk_usage(tmp_path)
    for free, limit in ((50 * GIGABYTE, 5 * GIGABYTE + 100), (900 * GIGABYTE, 20 * GIGABYTE)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: usage._replace(free=free))
        assert Cache(tmp_path / "features").limit == limit
        assert Cache(tmp_path / "features", budget=3.0).limit == 3 * GIGABYTE
    assert Cache(tmp_path / "not" / "there").limit == 20 * GIGABYTE


def rendered(*shown: Any, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as found:
        for one in shown:
            console.print(one)
    return found.get()


def test_tables_fit_80_columns_without_cutting_words(backbone: Backbone, tmp_path: Path) -> None:
    softmax = {"accuracy": 0.9, "balanced_accuracy": 0.8, "calibration_error": 0.1, "loss": 0.3, "images": 12345}
    softmax |= {"worst_classes": {"mediterranean": 0.25, "architecture": 0.5, "photographs": 0.6}, "split": "val"}
    several = {"mean_average_precision": 0.5, "f1": 0.4, "exact_match": 0.1, "label_accuracy": 0.9, "loss": 0.2}
    numbers = {"r2": 0.5, "mean_absolute_error": 1234.5, "loss": 2.5}
    common = {"images": 400, "split": "test"}
    results = {"photographs": softmax, "keywords": {**several, **common}, "construction": {**numbers, **common}}
    text = rendered(*metrics_tables(results))
    words = "photographs keywords construction validation accuracy balanced calib. exact label absolute mediterranean"
    rows = [SettingRow(5, 8, 0, 0.003, (0.5, 0.6, 0.7), 1.0, (0.5, 0.6, 0.7), 1, chosen=True)] * 2
    text += rendered(sweep_table("construction", rows, "validation accuracy"))
    tasks = [
        random_task(backbone, f"photographs-{number}", labels=["mediterranean", "architecture"]) for number in range(5)
    ]
    file = memoro.save_tasks(tasks, tmp_path / "bundle.safetensors")
    text += rendered(*inspect_tables(inspect_tasks(file, tasks)))
    words += " fingerprint parameters mediterranean, architecture diverged " + " ".join(task.name for task in tasks)
    assert max(map(len, text.splitlines())) <= 80
    for word in words.split():
        assert word in text, word


def test_suggested_commands_can_be_pasted(backbone: Backbone) -> None:
    other = memoro.load_backbone(CASES[1].model())
    with pytest.raises(CompositionError, match=r"'my fruits' was trained for .* train the task again on this one"):
        memoro.compose(other, [random_task(backbone, "my fruits")])


def test_parents_are_suggested_in_quotes(shell: Callable[..., Any], backbone: Backbone, tmp_path: Path) -> None:
    parent = random_task(backbone, "my fruits")
    memoro.save_task(memoro.new_task(backbone, "ripe", ["yes", "no"], extends=[parent]), tmp_path / "ripe.safetensors")
    done = shell("predict", "set", "-b", "vit", "-t", "ripe.safetensors", code=1)
    assert "Add -t 'my fruits.safetensors'" in str(done.exception)


def test_help_warns_of_flips(shell: Callable[..., Any]) -> None:
    text = " ".join(shell("train", "--help").stdout.replace("│", " ").split())
    assert "images show text, add --set flip=0" in text
    assert "--kind" in text
    assert "--start-from" in text
