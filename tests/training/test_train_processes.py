"""Two processes with gloo train as one does with the same global batch, to the rounding of other sums.

This file is also the script that `torchrun` and `accelerate launch` start: `learn` is what both sides do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone, load_backbone
from memoro.cli import app
from memoro.data import Splits, load_data
from memoro.errors import TrainingError
from memoro.lab.baselines import REGIMES
from memoro.processes import find_processes
from memoro.regimes import TaskPlan
from memoro.training import Cache, Plan, Recipe, Run, Trainer, TrainResult, combine, fit, train_plans, train_runs

LABELS = ["blue", "green", "red"]
RECIPE = Recipe(epochs=3, batch_size=5, lr=0.05, warmup=2)
COMMAND = ("train", "--image-size", 20, "--set", "workers=0", "--set", "batch_size=5", "--epochs", 2, "--json")
FRESH: dict[str, Any] = {"workers": 0, "cache": False, "quiet": True}
RANK = int(os.environ.get("RANK", 0))


def model(regime: str, backbone: Backbone, **options: Any) -> Any:
    # Every process starts elsewhere: all must go on from where the main one is.
    return REGIMES[regime].build(backbone, TaskPlan("t", LABELS, seed=1 + RANK, **options))


def train(regime: str, backbone: Backbone, splits: Splits, **options: Any) -> list[TrainResult]:
    task = model(regime, backbone, cells=2)
    return [fit(backbone, task, splits, regime=REGIMES[regime], recipe=RECIPE, image_size=20, **FRESH, **options)]


def frozen(backbone: Backbone, splits: Splits, root: Path) -> list[TrainResult]:
    """Token and memory are not trained, and every process has others to begin with; so are the facts of the past."""
    task = memoro.new_task(backbone, "t", LABELS, cells=2, init="normal", seed=1 + RANK)
    task.update_spec(training={"seed": 1 + RANK})
    found = fit(backbone, task, splits, regime="head", recipe=RECIPE, image_size=20, **FRESH)
    assert task.spec.training["seed"] == 1
    return [found]


def sweep(backbone: Backbone, splits: Splits, root: Path) -> list[TrainResult]:
    """Two rates, two forks and the folds of each, in one pass."""
    settings = combine((0.02, 0.1), cells=(1,), from_layer=(0, 3))
    recipe, preprocessing = replace(RECIPE, epochs=2), backbone.preprocessing.at(20)
    plan = Plan("t", REGIMES["memory"], splits, preprocessing, recipe, settings, folds=2)
    return train_plans(backbone, [plan], **FRESH)


def mixed(backbone: Backbone, splits: Splits, root: Path) -> list[TrainResult]:
    """A task and a baseline side by side; the task's features are kept."""
    made = {regime: model(regime, backbone, cells=1) for regime in ("memory", "memory-full")}
    recipe, preprocessing = replace(RECIPE, views=2), backbone.preprocessing.at(20)
    specs = [Run(made[name], recipe, REGIMES[name], splits, preprocessing) for name in made]
    cache = Cache(root / "features", dtype="float32", required=False)
    return train_runs(backbone, specs, cache=cache, workers=0, quiet=True)


def interrupted(backbone: Backbone, splits: Splits, root: Path) -> list[TrainResult]:
    """The last process hears Ctrl-C at step 4: all stop there, and go on from the checkpoint."""
    step, calls = Trainer.step, iter(range(1, 100))

    def stop(*given: Any) -> None:
        step(*given)
        if next(calls) == 4 and find_processes(backbone.device).world - 1 == RANK:
            os.kill(os.getpid(), signal.SIGINT)

    Trainer.step = stop  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped and saved after step 4 of"):
            train("memory", backbone, splits, folder=root / "run")
    finally:
        Trainer.step = step  # type: ignore[method-assign]
    return train("memory", backbone, splits, folder=root / "run", resume=True)


WAYS: dict[str, Callable[[Backbone, Splits, Path], list[TrainResult]]] = {
    "head": lambda backbone, splits, root: train("head", backbone, splits),
    "readout": lambda backbone, splits, root: train("readout", backbone, splits),
    "joint": lambda backbone, splits, root: train("joint", backbone, splits),
    "memory": lambda backbone, splits, root: train("memory", backbone, splits),
    "full": lambda backbone, splits, root: train("full", backbone, splits),
    "frozen": frozen,
    "sweep": sweep,
    "mixed": mixed,
    "interrupted": interrupted,
}


def read(root: Path) -> tuple[Backbone, Splits]:
    splits = load_data(root / "set", labels=LABELS, workers=0, quiet=True)
    assert splits.train is not None
    assert len(splits.train) % RECIPE.batch_size == 1  # the second process has nothing of the last batch
    return load_backbone(root / "vit", dtype=torch.float64), splits


def learn(root: Path, place: Path, ways: list[str]) -> None:
    """Trains in some ways and writes down how each of their runs went; all ways: on the command line too."""
    backbone, splits = read(root)
    found: dict[str, Any] = {"world": find_processes(backbone.device).world}
    for way in ways:
        found[way] = [
            {
                "train": [entry["train_loss"] for entry in result.history],
                "val": [entry.get("val_loss", 0.0) for entry in result.history],
                "metrics": [result.metrics["loss"], result.metrics["images"]],
                "weights": {name: value.detach().clone() for name, value in result.task.named_parameters()},
            }
            for result in WAYS[way](backbone, splits, place)
        ]
    if "head" in ways and found["world"] > 1:
        with pytest.raises(TrainingError, match="process 1 and process 0 have different recipe"):
            fit(backbone, model("head", backbone), splits, lr=0.1 + RANK, workers=0, quiet=True)
    if ways == list(WAYS):
        options = [
            "-b",
            root / "vit",
            "-o",
            place / "c",
            "--folder",
            place / "c.run",
            "--set",
            f"cache_folder={place / 'kept'}",
        ]
        said = CliRunner().invoke(app, [str(part) for part in (*COMMAND, *options, root / "set")])
        found |= {"stdout": said.stdout, "stderr": said.stderr}
        assert said.exit_code == 0, said.output
    torch.save(found, place / f"{RANK}.pt")


# ------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from families import CASES  # not above: the processes that this file starts have no use for them
    from squares import save_squares

    root = tmp_path_factory.mktemp("processes")
    CASES[0].model().save_pretrained(root / "vit")
    save_squares(root / "set", {"blue": 9, "green": 8, "red": 8})
    return root


def alone(root: Path, *ways: str) -> dict[str, Any]:
    """The same in one process."""
    place = root / "-".join(("alone", *ways))
    place.mkdir()
    learn(root, place, list(ways))
    return dict(torch.load(place / "0.pt"))


def launch(launcher: list[str], *arguments: object, cwd: Path) -> str:
    """What the processes print to stdout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *launcher, "--num_processes=2", f"--main_process_port={port}"]
    if launcher == TORCHRUN:
        command[-2:] = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


TORCHRUN = ["torch.distributed.run"]
ACCELERATE = [
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
]


def close(left: dict[str, Any], right: dict[str, Any]) -> None:
    for key in ("train", "val", "metrics"):
        # Validation is measured in float32.
        assert left[key] == pytest.approx(right[key], abs=1e-6 if key != "train" else 1e-10), key
    for name, value in left["weights"].items():
        torch.testing.assert_close(value, right["weights"][name], rtol=0, atol=1e-10)


def test_two_processes_are_as_good_as_one(root: Path) -> None:
    (root / "two").mkdir()
    launch(TORCHRUN, __file__, root, root / "two", *WAYS, cwd=root)  # one launch: starting takes longest
    together = [torch.load(root / "two" / f"{rank}.pt") for rank in range(2)]
    assert [found["world"] for found in together] == [2, 2]
    wanted = alone(root, *WAYS)
    assert wanted["world"] == 1
    for way in WAYS:
        assert len(wanted[way]) == len(together[0][way]) == {"mixed": 2}.get(way, 1)
        for number, run in enumerate(wanted[way]):
            first, second = (found[way][number] for found in together)
            close(first, run)
            for name, value in first["weights"].items():
                assert torch.equal(value, second["weights"][name])  # to the bit: they take the same steps
            assert first["metrics"] == second["metrics"]
            assert way == "readout" or run["train"][0] != pytest.approx(run["train"][-1], abs=1e-4)
    tokens = [run["weights"]["class_token"] for run in (wanted["memory"][0], wanted["mixed"][0], wanted["sweep"][0])]
    assert float((tokens[0] - tokens[1]).abs().max()) > 1e-4
    assert float((tokens[0] - tokens[2]).abs().max()) > 1e-4
    assert wanted["readout"][0]["weights"]["readout.weight"].any()
    kept = [len([*(root / place / "features").glob("*/*.features")]) for place in ("two", "-".join(("alone", *WAYS)))]
    assert 0 < kept[1] < kept[0]  # both compute features, and write files of their own
    check_interrupted(root / "two" / "run", together)
    check_command(together, json.loads(wanted["stdout"]))


def check_interrupted(folder: Path, together: list[dict[str, Any]]) -> None:
    """It came out as the calm one, and every line was written once."""
    for found in together:
        close(found["interrupted"][0], found["memory"][0])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train_loss" not in line] == list(range(1, 16))
    assert len(lines) == 15 + 3
    assert (folder / "report.html").is_file()


def check_command(together: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """The command line speaks once."""
    first, second = together
    record = json.loads(first["stdout"])
    assert "the task is measured by 4-fold cross-validation" in first["stderr"]
    assert (second["stdout"], second["stderr"]) == ("", "")
    assert record["metrics"]["loss"] == pytest.approx(wanted["metrics"]["loss"], abs=1e-5)  # in float32
    mine, other = (memoro.load_task(found["file"]) for found in (record, wanted))
    assert ("runs" in record, mine.spec.training["steps"]) == (False, 10)  # one learning rate
    torch.testing.assert_close(mine.class_token, other.class_token, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_accelerate_launches_them_too(root: Path) -> None:
    (root / "launched").mkdir()
    launch(ACCELERATE, __file__, root, root / "launched", "head", cwd=root)
    [wanted] = alone(root, "head")["head"]
    for rank in range(2):
        found = torch.load(root / "launched" / f"{rank}.pt")
        assert found["world"] == 2
        close(found["head"][0], wanted)


@pytest.mark.slow
def test_reproduce_runs_on_two_processes(root: Path, tmp_path: Path) -> None:
    """Both processes take the same jobs, and one of them records."""
    from squares import save_squares

    from memoro.lab.reproduce.records import Records

    for split in ("train", "test"):
        save_squares(tmp_path / "squares" / split, {"blue": 9, "green": 8, "red": 8})
    command = (
        "lab",
        "reproduce",
        "table2",
        "-d",
        tmp_path / "squares",
        "-b",
        root / "vit",
        "--epochs",
        1,
        "--steps",
        2,
    )
    command += ("--epochs", 1, "--steps", 2, "--workers", 0, "--image-size", 20, "--seeds", 1)
    command += ("--method", "head", "--method", "memory-full 1")
    said = launch(TORCHRUN, "-m", "memoro", *command, "--out", tmp_path / "two", cwd=root)
    assert said.count("jobs to run") == 1
    single = CliRunner().invoke(app, [str(word) for word in (*command, "--out", tmp_path / "one")])
    assert single.exit_code == 0, single.output
    two, one = (Records.read(tmp_path / name).entries for name in ("two", "one"))
    assert [record.key for record in two] == [record.key for record in one]
    assert [record.method for record in two] == ["head", "memory-full 1", "head"]
    for first, second in zip(two, one, strict=True):
        assert first.result["test"] == pytest.approx(second.result["test"], abs=0.05)  # an image at a rounding's edge
    assert not (tmp_path / "two" / "runs").exists()


if __name__ == "__main__":
    torch.set_num_threads(1)
    learn(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
