"""Killed, interrupted, out of disk, out of bounds: what is saved, and that a resume gives the same weights.

The processes here are forked and really killed: a fork has everything imported, so a killed training costs no more
than its steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from safetensors import safe_open
from squares import save_squares

import memoro
from memoro.backbones import Backbone, load_backbone
from memoro.data import load_data
from memoro.errors import MemoroError, TrainingError
from memoro.regimes import find_regime
from memoro.tasks.task import new_task
from memoro.training import Recipe, Run, Trainer, fit, loop, train_runs
from memoro.training.checkpoint import KEY
from memoro.training.finish import Finisher
from memoro.training.runfolder import RunFolder

LABELS = ["red", "green", "blue"]
STEPS, EPOCH = 20, 5  # in all, and in one epoch
FRESH: dict[str, Any] = {"workers": 0, "cache": False, "quiet": True}
OPTIONS: dict[str, Any] = {"epochs": 4, "batch_size": 4, "lr": 0.05, "val_fraction": 0.25, "image_size": 20}


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    return save_squares(tmp_path / "squares")


class Trial:
    """Trains the same task in the same way, here or in a process of its own."""

    def __init__(self, backbone: Backbone, data: Path, root: Path, **options: Any) -> None:
        self.backbone, self.data, self.root = backbone, data, root
        self.options = {**OPTIONS, "workers": 0, "cache": False, **options}

    def train(self, name: str, *, resume: bool = False, **changes: Any) -> str:
        """The task's content hash."""
        cells = changes.pop("cells", 2)
        data = changes.pop("data", self.data)
        task = new_task(self.backbone, "squares", LABELS, cells=cells, seed=1)
        fit(
            self.backbone, task, data, folder=self.root / name, resume=resume, quiet=True, **{**self.options, **changes}
        )
        memoro.save_task(task, self.root / f"{name}.safetensors")
        return task.content_hash()

    def fork(self, name: str, *, resume: bool = False, slow: int = 999, **changes: Any) -> Any:
        """From step `slow` on it takes its time, so that it cannot be done before it is killed."""
        process = multiprocessing.get_context("fork").Process(
            target=self._child, args=(name, slow), kwargs={"resume": resume, **changes}
        )
        process.start()
        return process

    def _child(self, name: str, slow: int, **options: Any) -> None:
        os.setpgid(0, 0)  # a group, as a terminal's Ctrl-C has it
        step = Trainer.step

        def slowly(trainer: Trial, taken: Any) -> None:
            time.sleep(0.2 if taken[0][0].step >= slow else 0)
            step(trainer, taken)

        Trainer.step = slowly  # type: ignore[method-assign]
        try:
            self.train(name, **options)
        except KeyboardInterrupt as stop:
            (self.root / f"{name}.stopped").write_text(str(stop))
            os._exit(130)

    def killed(self, name: str, *, resume: bool = False) -> None:
        process = self.fork(name, resume=resume)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL

    def finish(self, name: str) -> None:
        """Resumes and compares with the training that nobody disturbed."""
        self.train(name, resume=True)
        self.equal(name)

    def equal(self, name: str, other: str = "calm") -> None:
        mine, wanted = (memoro.load_task(self.root / f"{n}.safetensors") for n in (name, other))
        assert mine.content_hash() == wanted.content_hash()
        for key, value in mine.state_dict().items():
            assert torch.equal(value, wanted.state_dict()[key])
        assert figures(self.root / name) == figures(self.root / other)
        assert not list((self.root / name).glob(".*"))

    def wait_for(self, name: str, lines: int) -> None:
        """Until the training has written so many lines."""
        path, end = self.root / name / "metrics.jsonl", time.monotonic() + 120
        while not path.is_file() or path.read_bytes().count(b"\n") < lines:
            assert time.monotonic() < end
            time.sleep(0.001)


def figures(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl but for the speed; a torn one would not parse."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "images_per_second"} for entry in entries]


def steps_of(folder: Path) -> tuple[list[int], list[int]]:
    entries = figures(folder)
    return [e["step"] for e in entries if "steps" in e], [e["epoch"] for e in entries if "train_loss" in e]


def progress_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says, read by safetensors alone: there is no pickle in it."""
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()[KEY])["progress"][0]
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A training that nobody disturbs."""
    root = tmp_path_factory.mktemp("calm")
    made = Trial(load_backbone(CASES[0].model()), save_squares(root / "squares"), root)
    made.train("calm")
    return made


@pytest.fixture
def trainer(calm: Trial, tmp_path: Path) -> Trial:
    """The same training in a folder of its own, the result of the undisturbed one beside it."""
    shutil.copytree(calm.root, tmp_path, dirs_exist_ok=True)
    return Trial(calm.backbone, tmp_path / "squares", tmp_path)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step."""
    monkeypatch.setattr(Trainer, "checkpoint_seconds", 0.0)


# ------------------------------------------------------------------------------------------------------- kill -9


def test_the_undisturbed_training(trainer: Trial, tmp_path: Path) -> None:
    assert steps_of(tmp_path / "calm") == (list(range(1, 21)), [1, 2, 3, 4])
    assert progress_of(tmp_path / "calm")["step"] == STEPS
    trainer.train("other", lr=0.06)
    with pytest.raises(AssertionError):
        trainer.equal("other")


@pytest.mark.parametrize("lines", [1, *(pytest.param(lines, marks=pytest.mark.slow) for lines in (4, 9)), 17])
def test_killed_at_some_moment(trainer: Trial, tmp_path: Path, lines: int) -> None:
    process = trainer.fork("killed", slow=lines + 2)
    trainer.wait_for("killed", lines)
    time.sleep(random.uniform(0, 0.04))
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    trainer.finish("killed")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_killed_again_and_again(backbone: Backbone, squares: Path, tmp_path: Path, often: None, optimizer: str) -> None:
    trainer = Trial(backbone, squares, tmp_path, optimizer=optimizer, lr=0.01, accumulate=2, patience=3)
    trainer.train("calm")
    for lines in (2, 5, 8):
        process = trainer.fork("killed", resume=True, slow=lines)
        trainer.wait_for("killed", lines)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    assert 0 < progress_of(tmp_path / "killed")["step"] < 12
    trainer.finish("killed")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Dies in place of the call of this number, counted from 1."""
    calls = iter(range(1, 10_000))
    return lambda *arguments: die() if next(calls) == number else function(*arguments)


def half_a_line(self: RunFolder, entry: dict[str, Any]) -> None:
    with self.metrics.open("a") as file:
        file.write(json.dumps(entry)[: 30 if entry["step"] == 8 else None] + ("" if entry["step"] == 8 else "\n"))
    if entry["step"] == 8:
        die()


# In place of which call it dies, and the step of the checkpoint that is left. There is one after every step; the first
# is written before the first step, an epoch's last one after its validation.
MOMENTS: dict[str, tuple[Any, str, int, int]] = {
    "before any checkpoint": (os, "replace", 1, -1),
    "before the first step": (Trainer, "step", 1, 0),
    "within a step": (Trainer, "step", 8, 7),
    "within a line": (RunFolder, "write", 0, 7),
    "between an epoch and its validation": (Trainer, "end_epoch", 2, 2 * EPOCH),
    "between the last step and its validation": (Trainer, "end_epoch", 4, STEPS),
    "between an epoch's figures and its checkpoint": (loop, "save_checkpoint", 1 + EPOCH + 1, EPOCH),
    "after all of it": (Finisher, "answer_held_out", 1, STEPS),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_an_awkward_moment(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None, moment: str
) -> None:
    home, name, number, step = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, at_call(number, getattr(home, name)) if number else half_a_line)
        trainer.killed("killed")
    if step < 0:
        assert not (tmp_path / "killed" / "checkpoint.safetensors").exists()
    else:
        assert progress_of(tmp_path / "killed")["step"] == step
    trainer.finish("killed")


def test_killed_while_a_checkpoint_is_written(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None
) -> None:
    replace = os.replace

    def only_old(source: str, target: Path) -> None:
        known = target.is_file() and target.name.startswith("checkpoint") and progress_of(target.parent)["step"] == 6
        die() if known else replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("memoro.files.os.replace", only_old)
        trainer.killed("killed")
    assert progress_of(tmp_path / "killed")["step"] == 6
    assert list((tmp_path / "killed").glob(".*.part"))
    trainer.finish("killed")


def test_a_new_start_does_not_meet_an_old_checkpoint(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train("killed", lr=0.9, epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr("memoro.training.Trainer.step", at_call(3, Trainer.step))
        trainer.killed("killed")
    trainer.finish("killed")


def test_several_runs_are_resumed_together(backbone: Backbone, squares: Path, tmp_path: Path, often: None) -> None:
    splits = load_data(squares, labels=LABELS, workers=0, quiet=True)

    def train(name: str, resume: bool, stop: int) -> list[memoro.Task]:
        settings = [
            (new_task(backbone, "a", LABELS, cells=2, seed=1), Recipe(lr=0.05, epochs=2, batch_size=5)),
            (new_task(backbone, "b", LABELS, cells=1, seed=2), Recipe(lr=1e30, clip=0, epochs=2, batch_size=5)),
            (new_task(backbone, "c", LABELS, from_layer=3, seed=3), Recipe(lr=0.02, epochs=2, batch_size=5)),
        ]
        with pytest.MonkeyPatch.context() as patch:
            if stop:
                patch.setattr("memoro.training.Trainer.step", at_call(stop, Trainer.step))
            size, regime = backbone.preprocessing.at(20), find_regime("memory")
            specs = [Run(task, recipe, regime, splits, size) for task, recipe in settings]
            found = train_runs(backbone, specs, folder=tmp_path / name, resume=resume, **FRESH)
        assert [bool(result.metrics) for result in found] == [True, False, True]
        return [result.task for result in found]

    calm = train("calm", False, 0)
    process = multiprocessing.get_context("fork").Process(target=train, args=("killed", False, 5))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    for mine, wanted in zip(train("killed", True, 0), calm, strict=True):
        assert mine.name == "b" or mine.content_hash() == wanted.content_hash()
    assert figures(tmp_path / "killed") == figures(tmp_path / "calm")


# ------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_saves(trainer: Trial, tmp_path: Path, workers: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    process = trainer.fork("stopped", workers=workers, slow=5)
    trainer.wait_for("stopped", 2)
    os.killpg(process.pid, signal.SIGINT)  # workers get it too
    process.join(60)
    assert process.exitcode == 130
    step = progress_of(tmp_path / "stopped")["step"]
    assert (tmp_path / "stopped.stopped").read_text() == f"stopped and saved after step {step} of {STEPS}"
    assert 2 <= step < STEPS
    assert steps_of(tmp_path / "stopped")[0] == list(range(1, step + 1))
    trainer.finish("stopped")
    assert signal.getsignal(signal.SIGINT) is before


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_resume_with_other_settings_is_refused(trainer: Trial, squares: Path, tmp_path: Path) -> None:
    held = {path.name: path.read_bytes() for path in (tmp_path / "calm").iterdir()}
    more = save_squares(tmp_path / "more", {"red": 8, "green": 8, "blue": 9})
    for changes, what in (
        ({"lr": 0.06}, "recipe"),
        ({"cells": 3}, "task"),
        ({"data": more}, "data"),
        ({"image_size": 24}, "preprocessing"),
        ({"epochs": 5, "data_seed": 3}, "recipe, data"),
    ):
        with pytest.raises(TrainingError, match=f"cannot resume: {what} differ from those of the checkpoint"):
            trainer.train("calm", resume=True, **changes)
    assert {path.name: path.read_bytes() for path in (tmp_path / "calm").iterdir()} == held
    trainer.train("calm", resume=True, workers=1)  # how images are decoded is no part of it


@pytest.mark.parametrize("data", [b"", b"junk" * 99, "half", "pickle", "task"])
def test_a_damaged_checkpoint_is_refused(trainer: Trial, tmp_path: Path, data: bytes | str) -> None:
    path = tmp_path / "calm" / "checkpoint.safetensors"
    if data == "half":
        data = path.read_bytes()[:-100]
    elif data == "pickle":
        torch.save({"step": 1}, path)
        data = path.read_bytes()
    elif data == "task":
        data = (tmp_path / "calm.safetensors").read_bytes()
    assert isinstance(data, bytes)
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"is damaged, or is not a checkpoint .*: start over without `resume`"):
        trainer.train("calm", resume=True)
    assert path.read_bytes() == data


# ------------------------------------------------------------------------------------------------------- disk and NaN


@pytest.mark.parametrize(("home", "name", "most"), [(os, "fsync", 18), (Path, "open", 9)])  # a file and its folder
def test_a_full_disk_loses_nothing(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: None, home: Any, name: str, most: int
) -> None:
    calls, real = iter(range(1, 1000)), getattr(home, name)

    def full(first: Any, *arguments: Any, **options: Any) -> Any:
        if (name == "fsync" or first.suffix == ".jsonl") and next(calls) > most:
            raise OSError(28, "No space left on device")
        return real(first, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(home, name, full)
        with pytest.raises(TrainingError, match=r"No space left on device.* train again with `resume=True`"):
            trainer.train("full")
    assert 2 < progress_of(tmp_path / "full")["step"] < 10
    assert not list((tmp_path / "full").glob(".*.part"))
    trainer.finish("full")


def test_a_folder_that_cannot_be_written(trainer: Trial, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MemoroError, match="cannot write"):
        trainer.train("file")


def test_a_loss_without_bounds_stops_and_keeps_the_last_good_checkpoint(
    trainer: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = Recipe.rate
    with monkeypatch.context() as patch:
        patch.setattr(Recipe, "rate", lambda self, step, total: 1e30 if step == 12 else rate(self, step, total))
        with pytest.raises(TrainingError, match=r"'squares': diverged at step 14 \(.*\): choose a learning rate"):
            trainer.train("hot")
    assert progress_of(tmp_path / "hot")["step"] == 2 * EPOCH
    trainer.finish("hot")


def test_too_high_a_rate_from_the_start(trainer: Trial, tmp_path: Path) -> None:
    for changes in ({"epochs": 2}, {"batch_size": 99, "epochs": 3}, {"val_fraction": 0}):
        with pytest.raises(TrainingError, match=r"learning rate below 1e\+37.* The last good checkpoint is in .*hot"):
            trainer.train("hot", lr=1e37, clip=0, **changes)
        assert progress_of(tmp_path / "hot")["step"] < 2
        assert not (tmp_path / "hot.safetensors").exists()
