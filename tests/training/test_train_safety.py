"""What must not be lost or believed: interrupted checkpoints, run folders in use, outputs, seeds, dtypes, devices."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_fork
from families import CASES
from run_groups import grid, root, run_spec, sets, sweep
from small_training import FRESH, LABELS, QUICK, distance, double, squares
from test_train_resume import at_call, often
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone, load_backbone
from memoro.backbones.load import own_device
from memoro.cli import app
from memoro.engine.forward import answer_together
from memoro.errors import BackboneError, MemoroError, TaskFileError, TrainingError
from memoro.tasks.task import new_task
from memoro.training import Trainer, fit
from memoro.training.result import SettingRow
from memoro.training.runfolder import lock_folder

__all__ = ["double", "often", "root", "squares"]  # fixtures

SHORT: dict[str, Any] = {"epochs": 2, "batch_size": 5, "lr": 0.05}


# ------------------------------------------------------------------------------------------------------- run folders


def test_an_interrupted_checkpoint_is_kept_aside(
    backbone: Backbone, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    notes: list[str] = []

    def train(**changes: Any) -> str:
        task = new_task(backbone, "t", LABELS, cells=1, seed=1)
        fit(backbone, task, squares, folder=tmp_path / "run", log=notes.append, **{**SHORT, **QUICK, **changes})
        return task.content_hash()

    calm = train()
    assert not any("renamed" in note for note in notes)
    train()  # what is finished is not kept
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint*")) == ["checkpoint.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", at_call(4, Trainer.step))
        process = in_fork(train)
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "checkpoint.safetensors")]
    aside = [file.with_stem(f"{file.stem}-1") for file in files]
    interrupted = [file.read_bytes() for file in files]
    train(lr=0.2)
    assert [file.read_bytes() for file in aside] == interrupted
    assert "renamed to metrics-1.jsonl and checkpoint-1.safetensors: to continue it, rename them back" in notes[-1]
    for file, kept in zip(files, aside, strict=True):
        kept.replace(file)
    assert train(resume=True) == calm
    assert files[0].read_bytes().startswith(interrupted[0])


def test_damaged_lines_of_metrics_are_dropped(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    lines, options = tmp_path / "metrics.jsonl", {**SHORT, **QUICK, "folder": tmp_path}
    fit(backbone, new_task(backbone, "t", LABELS, cells=1, seed=1), squares, **options)
    written = lines.read_bytes()
    damaged = b'3\n[1]\nnull\n{}\n{"step": "x"}\n{"train_loss": 1}\n{"group": [], "step": 1}\n\xff\n'
    lines.write_bytes(damaged + written + b'{"st')
    fit(backbone, new_task(backbone, "t", LABELS, cells=1, seed=1), squares, resume=True, **options)
    assert lines.read_bytes() == written


def test_a_run_folder_takes_one_training_at_a_time(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    def train(**changes: Any) -> None:
        options = {**SHORT, **QUICK, "folder": tmp_path / "run", **changes}
        fit(backbone, new_task(backbone, "t", LABELS, cells=1, seed=1), squares, **options)

    def slowly() -> None:
        step = Trainer.step

        def wait(trainer: Trainer, taken: Any) -> None:
            time.sleep(60 if trainer.groups[0].step == 2 else 0)
            step(trainer, taken)

        Trainer.step = wait  # type: ignore[method-assign]
        train()

    first = in_fork(slowly)
    lines, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not lines.is_file() or lines.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    held = lines.read_bytes()
    for resume in (False, True):
        with pytest.raises(TrainingError, match=r"another training is running in .*run: wait"):
            train(resume=resume)
    assert lines.read_bytes() == held
    train(folder=tmp_path / "other")
    os.kill(first.pid, signal.SIGKILL)
    first.join(60)
    train(resume=True)  # the lock has died with its owner
    steps = [json.loads(line)["step"] for line in lines.read_text().splitlines() if "steps" in json.loads(line)]
    assert steps == list(range(1, len(steps) + 1))
    assert not list((tmp_path / "run").glob(".*"))


def test_a_refused_training_does_not_free_the_lock(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")

    def refused(folder: Path) -> None:
        with pytest.raises(TrainingError, match="another training is running"), lock_folder(folder):
            pass

    with lock_folder(tmp_path / "run"):
        for folder in (tmp_path / "run", tmp_path / "link"):
            refused(folder)  # in this process
            other = in_fork(refused, folder)
            other.join(60)
            assert other.exitcode == 0
    with lock_folder(tmp_path / "link"):
        pass


# ------------------------------------------------------------------------------------------------------- outputs


@pytest.fixture
def shell(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    common = [
        "-b",
        "vit",
        "--image-size",
        "20",
        "--set",
        "batch_size=5",
        "--set",
        "workers=0",
        "--set",
        "cache=false",
        "--epochs",
        "1",
    ]

    def run(command: str, *arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [command, *map(str, arguments), *common])
        assert done.exit_code == code, (done.output, done.exception)
        return f"{done.output} {done.exception}"

    return run


def test_an_output_that_cannot_be_written_is_found_first(
    shell: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").write_text("in the way")
    many = root / "many"
    monkeypatch.setattr(Trainer, "train", lambda self: pytest.fail("it was trained"))
    for out in ("file/t.safetensors", "file/deep/t.safetensors"):
        told = shell("train", many, "--lr", 0.1, "--out", out, code=1)
        assert f"--out {out} cannot be written (Not a directory): choose another place" in told
    told = shell("train", f"a={many}", f"b={root / 'few'}", "--lr", 0.1, "--out", "file/tasks", code=1)
    assert "cannot be written" in told
    assert not Path("runs").exists()


def test_a_file_that_could_not_be_written_is_written_by_a_resume(
    shell: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", root / "many", "--lr", 0.1, "--out", "t.safetensors")

    def full(*given: Any) -> None:
        raise TaskFileError("cannot write t.safetensors (No space left on device).")

    with monkeypatch.context() as patch:
        patch.setattr("memoro.tasks.taskfile.write_whole", full)
        told = shell(*command, code=1)
    assert "The weights are saved in runs/many. Fix the problem, then train again with --resume" in told
    assert not Path("t.safetensors").exists()
    monkeypatch.setattr(Trainer, "step", lambda *given: pytest.fail("it was trained again"))
    shell(*command, "--resume")
    assert memoro.load_task("t.safetensors").name == "many"


def test_what_a_killed_write_left_beside_the_output_is_removed(shell: Any, root: Path) -> None:
    parts = [Path(f".{name}.safetensors.{'0a' * 16}.part") for name in ("t", "other")]
    for part in parts:
        part.write_bytes(b"half a task")
    shell("train", root / "many", "--lr", 0.1, "--out", "t.safetensors")
    assert [part.exists() for part in parts] == [False, True]


# ------------------------------------------------------------------------------------------------------- honest records


def test_a_float16_backbone_is_trained_on(vit: Any, squares: Path, root: Path, shell: Any) -> None:
    half = load_backbone(vit, dtype=torch.float16)
    result = fit(half, new_task(half, "t", LABELS, seed=1), squares, **SHORT, **QUICK)
    assert all(math.isfinite(entry["train_loss"]) for entry in result.history)
    copy.deepcopy(vit).half().save_pretrained("vit")
    shell("train", root / "many", "--lr", 0.1, "--precision", "float16")


def test_a_seed_is_recorded_only_where_it_made_the_weights(backbone: Backbone, squares: Path) -> None:
    task = new_task(backbone, "t", LABELS, cells=1, seed=3)
    with pytest.raises(TrainingError, match=r"seed is for initial weights, .* pass it to new_task"):
        fit(backbone, task, squares, seed=5, **SHORT, **QUICK)
    assert "seed" not in fit(backbone, task, squares, **SHORT, **QUICK).task.spec.training
    options = {"backbone": backbone, "cells": 1, **SHORT, **QUICK}
    first, second = (memoro.train(squares, seed=seed, **options).task for seed in (3, 5))
    assert (first.spec.training["seed"], second.spec.training["seed"]) == (3, 5)
    assert first.content_hash() != second.content_hash()
    again = fit(backbone, first, squares, **SHORT, **QUICK).task
    assert again.spec.training["seed"] == 3  # still where its weights began


def test_a_task_is_trained_further_at_its_own_size(backbone: Backbone, squares: Path) -> None:
    task = new_task(backbone, "t", LABELS, cells=1, seed=1)
    fit(backbone, task, squares, **{**SHORT, **QUICK, "image_size": 28})
    sizes = {**SHORT, **FRESH}
    fit(backbone, task, squares, **sizes)
    assert task.spec.preprocessing == backbone.preprocessing.at(28)
    fit(backbone, task, squares, **{**sizes, "image_size": 20})
    assert task.spec.preprocessing == backbone.preprocessing.at(20)
    new = new_task(backbone, "new", LABELS, cells=1)
    fit(backbone, new, squares, **sizes)
    assert new.spec.preprocessing == backbone.preprocessing


def test_fit_keeps_features_by_default_like_the_command(backbone: Backbone, squares: Path, own_cache: Path) -> None:
    options = {**SHORT, "image_size": 20, "workers": 0, "quiet": True}
    tasks = [new_task(backbone, "squares", LABELS, cells=5, seed=0) for _ in range(2)]
    fit(backbone, tasks[0], squares, **options)
    assert list(own_cache.iterdir())
    fit(backbone, tasks[1], squares, cache=False, views=None, **options)
    data = memoro.load_data(squares, labels=LABELS, workers=0, quiet=True)
    wanted = memoro.train(data, backbone=backbone, recipe="paper", **options)
    assert distance(tasks[0], wanted.task) == 0
    assert distance(tasks[1], wanted.task) > 1e-6


def test_a_setting_that_diverged_with_some_seeds_is_ranked_last(
    double: Backbone, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lucky = SettingRow(5, 0, 0, 3.0, val=(0.99,), val_loss=0.1, test=(), diverged=2)
    steady = SettingRow(5, 0, 0, 0.1, val=(0.5, 0.6, 0.7), val_loss=0.9, test=(), diverged=0)
    lost = SettingRow(5, 0, 0, 9.0, val=(), val_loss=float("inf"), test=(), diverged=3)
    assert sorted([lost, lucky, steady], key=lambda row: row.order, reverse=True) == [steady, lucky, lost]
    real = Trainer.train

    def spoil(self: Trainer) -> float:
        for run in self.runs:
            if run.recipe.lr == 0.1 and run.recipe.seed > 0:
                run.task.class_token.data[0] = float("nan")
        return real(self)

    monkeypatch.setattr(Trainer, "train", spoil)
    notes: list[str] = []
    found = sweep(double, sets(root)[0], grid((1,), (0,), (1e-9, 0.1), 3), log=notes.append, epochs=4)
    assert [row.diverged for row in found.rows] == [0, 2]
    assert found.rows[1].val > (found.rows[0].val[0],)  # it did win on the seed that was left
    assert found.task.spec.training["lr"] == 1e-9
    text = "note: t: 1 cells, rank 0, from layer 0, lr 0.1 diverged with 2 of 3 seeds and is ranked last."
    assert text in notes


# ------------------------------------------------------------------------------------------------------- devices


def test_devices_are_chosen_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert own_device() == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert own_device() == torch.device("mps")
    assert own_device("cpu") == torch.device("cpu")
    assert own_device("meta") == torch.device("meta")
    for wrong in ("gpu", "cuda:99", ""):
        with pytest.raises(BackboneError, match=f"device '{wrong}' cannot be used .*choose cpu"):
            own_device(wrong)


def test_every_command_that_runs_a_backbone_takes_a_device(
    shell: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell("train", root / "many", "--lr", 0.1, "--device", "cpu", "--out", "t.safetensors")
    image = str(next((root / "many").rglob("*.png")))
    loaded: list[Any] = []
    real = memoro.backbones.load_backbone

    def load(*given: Any, **options: Any) -> Any:
        loaded.append(options["device"])
        return real(*given, **options)

    monkeypatch.setattr("memoro.backbones.load_backbone", load)
    runner = CliRunner()
    commands = {
        "eval": [str(root / "many"), "-t", "t.safetensors", "--set", "workers=0"],
        "predict": [image, "-t", "t.safetensors"],
        "verify": [image, "-t", "t.safetensors"],
    }
    for command, arguments in commands.items():
        done = runner.invoke(app, [command, *arguments, "-b", "vit", "--device", "cpu"])
        assert done.exit_code == 0, (done.output, done.exception)
        assert loaded.pop() == torch.device("cpu")
        done = runner.invoke(app, [command, *arguments, "-b", "vit", "--device", "abacus"])
        assert "device 'abacus' cannot be used" in str(done.exception)
    done = runner.invoke(app, ["train", str(root / "many"), "-b", "vit", "--device", "abacus"])
    assert isinstance(done.exception, MemoroError)
    assert "device 'abacus' cannot be used" in str(done.exception)


def test_tasks_reach_the_backbones_device(vit: Any, root: Path) -> None:
    """On torch's meta device, which computes nothing but refuses to mix devices."""
    here, there = load_backbone(vit), load_backbone(vit, device="meta")
    parent = new_task(here, "parent", LABELS, cells=1)
    spec = run_spec(here, "child", sets(root)[0], extends=[parent])
    spec.task.prepare_training(there)
    trainer = Trainer(there, [spec])
    assert {parameter.device.type for parameter in spec.task.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in parent.parameters()} == {"cpu"}  # not asked to move
    pixels = torch.empty(2, 3, 20, 20, device="meta")
    [[logits]] = answer_together([trainer.groups[0].forward(there)], [pixels])
    assert logits.device.type == "meta"


def test_a_folder_with_files_of_others_is_left_alone(backbone: Backbone, squares: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SHORT, "image_size": 20, "workers": 0, "quiet": True, "folder": tmp_path / "mine"}
    for name in ("config.json", "report.html", "metrics.jsonl"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("{}")
        with pytest.raises(TrainingError, match=f"has a {name} that is not from a training: choose another `folder`"):
            fit(backbone, new_task(backbone, "squares", LABELS), squares, **options)
        assert (tmp_path / "mine" / name).read_text() == "{}"
        (tmp_path / "mine" / name).unlink()
    for _ in range(2):  # its own it replaces
        fit(backbone, new_task(backbone, "squares", LABELS), squares, **options)


def test_a_task_that_diverged_can_be_trained_again(backbone: Backbone, squares: Path) -> None:
    options: dict[str, Any] = {**SHORT, "image_size": 20, "workers": 0, "quiet": True, "cache": False}
    task, same = (new_task(backbone, "squares", LABELS, seed=3) for _ in range(2))
    with pytest.raises(TrainingError, match="choose a learning rate below"):
        fit(backbone, task, squares, **{**options, "lr": 1e300})
    assert distance(task, same) == 0
    fit(backbone, task, squares, **options)
    fit(backbone, same, squares, **options)
    assert distance(task, same) == 0
