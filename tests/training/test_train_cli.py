"""`memoro train`, `eval` and `predict`, as a user runs them."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from families import CASES
from PIL import Image
from squares import save_square, save_squares
from typer.testing import CliRunner

import memoro
from memoro.cli import app, main

LABELS = ["blue", "green", "red"]


class Done(NamedTuple):
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


def _child(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.argv = ["memoro", *arguments]
    try:
        main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def start(folder: Path, *arguments: object) -> Any:
    """The command in a forked process: it has everything imported already."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(folder, [str(a) for a in arguments]))
    process.start()
    return process


def run(folder: Path, *arguments: object, code: int = 0) -> Done:
    process = start(folder, *arguments)
    process.join(240)
    done = Done((folder / ".stdout").read_text(), (folder / ".stderr").read_text())
    assert process.exitcode == code, done
    assert "Traceback" not in done.stderr
    return done


TRAIN = ("--backbone", "vit", "--image-size", 20, "--set", "batch_size=8", "--lr", 0.05, "--set", "workers=0")


def make_root(root: Path) -> Path:
    CASES[0].model().save_pretrained(root / "vit")
    save_squares(root / "set" / "train", dict.fromkeys(LABELS, 8))
    save_squares(root / "set" / "test", dict.fromkeys(LABELS, 3), first=500)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, a set, a task trained on it, and one of numbers."""
    root = make_root(tmp_path_factory.mktemp("cli"))
    for number, colour in enumerate([*["red"] * 6, *["blue"] * 6, *["grey"] * 6]):
        save_square(root / "numbers" / f"{number}.png", colour, number)
    rows = [f"{number}.png,{number // 6}.5" for number in range(18)]
    (root / "numbers" / "warmth.csv").write_text("\n".join(["path,number", *rows]) + "\n")
    commands = [
        ["train", "set", *TRAIN, "--task", "colour", "--epochs", 6, "--cells", 2],
        ["train", "numbers/warmth.csv", *TRAIN, "--lr", 0.01, "--epochs", 2, "--from-layer", 3],
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for arguments in commands:  # in this process, so that forks have everything imported
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
            assert done.exit_code == 0, done.output
    return root


def is_png(path: Path) -> bool:
    with Image.open(path) as image:
        colours = image.convert("RGB").getcolors(1 << 20)
        return image.format == "PNG" and min(image.size) > 300 and colours is not None and len(colours) > 20


def test_train_prints_one_json_document(tmp_path: Path) -> None:
    make_root(tmp_path)
    arguments = ["train", "set", "--backbone", "vit", "--task", "colour", "--epochs", "2", "--image-size", "20"]
    done = subprocess.run(
        [sys.executable, "-m", "memoro", *arguments, "--out", "out/c.safetensors", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    record = json.loads(done.stdout)
    assert "Traceback" not in done.stderr
    assert (record["task"], record["file"]) == ("colour", "out/c.safetensors")
    task = memoro.load_task(tmp_path / record["file"])
    assert task.labels == LABELS
    assert task.spec.preprocessing is not None
    assert task.spec.preprocessing.size == (20, 20)
    assert record["bytes"] == (tmp_path / record["file"]).stat().st_size
    assert (task.from_layer, task.cells, task.rank) == (3, 0, 4), "side, in the last two of five layers"
    assert task.spec.readout is not None
    assert (task.spec.readout.from_layer, task.spec.readout.statistics) == (1, 3), "three vectors of the last four"
    assert task.spec.widths is not None
    side = 4 * (24 + 24) + 2 * (24 + task.spec.widths.hidden)
    assert task.members == 1
    head, readout = 3 * 24 + 3, 3 * 4 * 3 * 24 + 3
    assert record["training"]["trained_parameters"] == 24 + 2 * 4 * side + head + readout
    assert record["metrics"]["split"] == "test"
    assert record["metrics"]["images"] == 9
    assert {"accuracy", "balanced_accuracy", "calibration_error", "worst_classes", "loss"} < set(record["metrics"])
    folder = tmp_path / record["folder"]
    assert folder == tmp_path / "runs" / "colour"
    config = json.loads((folder / "config.json").read_text())
    assert (config["recipe"][0]["epochs"], config["set"]) == (2, "set")
    assert {recipe["lr"] for recipe in config["recipe"]} == {0.001}
    assert (record["training"]["lr"], record["training"]["regime"]) == (0.001, "joint")
    assert not {"runs", "chosen"} & set(record), "there is nothing to choose from"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["epoch"] for line in lines if "val_accuracy" in line} == {1, 2}
    assert (folder / "report.html").is_file()
    assert not list(folder.glob("*.png"))


def test_train_shows_a_table_and_notes(root: Path, tmp_path: Path) -> None:
    done = run(
        root, "train", "set", *TRAIN, "--regime", "head", "--epochs", 1, "--folder", tmp_path, "-o", tmp_path / "s"
    )
    for row in (
        "accuracy (test, 9 images)",
        "balanced accuracy",
        "worst classes",
        "calibration error",
        "file",
        "75",
        "time",
    ):
        assert row in done.stdout
    assert "note: 15% of train" in done.stderr
    assert [task.name for task in memoro.load_tasks(tmp_path / "s")] == ["set"]


def test_eval_of_one_set_and_of_one_for_each(root: Path) -> None:
    both = ["--tasks", "colour.safetensors", "--tasks", "warmth.safetensors", "--set", "workers=0"]
    alone = run(root, "eval", "set", "-b", "vit", "-t", "colour.safetensors", "--set", "workers=0", "--json").json
    assert set(alone) == {"colour"}
    assert alone["colour"]["split"] == "test"
    trained = memoro.load_task(root / "colour.safetensors").spec.metrics
    assert alone["colour"]["accuracy"] == trained["accuracy"] > 0.8
    each = run(root, "eval", "colour=set", "warmth=numbers/warmth.csv", "-b", "vit", *both, "--json").json
    assert each["colour"]["loss"] == pytest.approx(alone["colour"]["loss"], abs=1e-5)
    assert (each["warmth"]["split"], each["warmth"]["images"]) == ("all", 18)
    assert "mean_absolute_error" in each["warmth"]
    table = run(root, "eval", "colour=set", "-b", "vit", *both)
    assert "colour" in table.stdout
    assert "one pass over 9 images for colour" in table.stderr
    assert (
        run(root, "eval", "set", "-b", "vit", "-t", "colour.safetensor[s]", "--set", "workers=0", "--json").json
        == alone
    )
    own = run(root, "eval", "set/train", "-b", "vit", "-t", "colour.safetensors", "--set", "workers=0")
    assert "colour was trained on some of these images, so this overestimates accuracy on new images" in own.stderr
    new = run(root, "eval", "set/test", "-b", "vit", "-t", "colour.safetensors", "--set", "workers=0")
    assert "None of them is among the recorded training images" in new.stderr
    for data in (["set", "numbers"], ["colour=a", "colour=b"]):
        assert "give NAME=DATA for each" in run(root, "eval", *data, "-b", "vit", *both, code=1).stderr
    assert "no task 'other' among colour, warmth" in run(root, "eval", "other=set", "-b", "vit", *both, code=1).stderr
    assert "for several labels or numbers, write a CSV" in run(root, "eval", "set", "-b", "vit", *both, code=1).stderr


def test_predict_in_every_form(root: Path, tmp_path: Path) -> None:
    tasks = ["-b", "vit", "-t", "colour.safetensors", "-t", "warmth.safetensors"]
    (tmp_path / "broken.png").write_bytes(b"no image")
    red = root / "set" / "test" / "red"
    done = run(root, "predict", red, "set/test/blue/*.png", tmp_path / "broken.png", *tasks, "--format", "json")
    said = done.json
    assert len(said) == 7
    assert "not a readable image" in said.pop(str(tmp_path / "broken.png"))["error"]
    assert "1 of 7 images could not be read" in done.stderr
    assert "broken.png" in done.stderr
    right = [Path(path).parent.name == answers["colour"]["label"] for path, answers in said.items()]
    assert sum(right) >= 5
    assert all(isinstance(answers["warmth"]["values"]["number"], float) for answers in said.values())

    rows = list(csv.DictReader(io.StringIO(run(root, "predict", red, *tasks, "--format", "csv").stdout)))
    assert [row["task"] for row in rows] == ["colour", "warmth"] * 3
    assert not any(row["error"] for row in rows)
    first = said[rows[0]["image"]]["colour"]
    assert (rows[0]["label"], float(rows[0]["probability"])) == (first["label"], pytest.approx(first["probability"]))
    assert (rows[1]["label"], rows[1]["probability"]) == ("number", "")
    assert float(rows[1]["value"]) == pytest.approx(said[rows[1]["image"]]["warmth"]["values"]["number"])

    out = tmp_path / "new" / "predictions.parquet"
    assert run(root, "predict", red, *tasks, "-f", "parquet", "-o", out).stdout == ""
    from pyarrow import parquet

    assert parquet.read_table(out).column("label").to_pylist() == [row["label"] for row in rows]
    assert "--out" in run(root, "predict", red, *tasks, "-f", "parquet", code=2).stderr
    table = run(root, "predict", "set/test/**/*.png", *tasks).stdout
    assert "9 images" in table
    assert "warmth" in table
    assert "no images there" in run(root, "predict", "none/*.png", *tasks, code=1).stderr
    run(root, "predict", tmp_path / "broken.png", *tasks, code=1)
    run(root, "predict", red, *tasks, "-f", "xml", code=2)
    run(root, "predict", red, *tasks, "--set", "batch_size=0", code=1)


def test_extends(root: Path, tmp_path: Path) -> None:
    common = ("train", "set", *TRAIN, "--cells", 1, "--epochs", 1, "--json", "--folder", tmp_path / "run")
    before = (root / "colour.safetensors").read_bytes()
    child, grandchild = tmp_path / "child.safetensors", tmp_path / "grandchild.safetensors"
    run(root, *common, "--task", "child", "--extends", "colour.safetensors", "-o", child)
    assert [parent.name for parent in memoro.load_task(child).parents] == ["colour"]
    assert (root / "colour.safetensors").read_bytes() == before
    alone = run(root, *common, "--task", "grandchild", "--extends", child, "-o", grandchild, code=1).stderr
    assert "Add --extends colour.safetensors" in alone
    both = ("--extends", child, "--extends", "colour.safetensors")
    record = run(root, *common, "--task", "grandchild", *both, "-o", grandchild).json
    files = [part for file in (grandchild, child, root / "colour.safetensors") for part in ("-t", file)]
    figures = run(root, "eval", "set", "-b", "vit", *files, "--set", "workers=0", "--json").json
    assert set(figures) == {"grandchild", "child", "colour"}
    assert figures["grandchild"]["loss"] == pytest.approx(record["metrics"]["loss"], abs=1e-5)
    assert "Add -t child.safetensors" in run(root, "eval", "set", "-b", "vit", *files[:2], code=1).stderr

    task = memoro.load_task(root / "colour.safetensors")
    task.head.bias.data.add_(1.0)
    other = memoro.save_task(task, tmp_path / "colour.safetensors")
    wrong = run(root, *common, "--task", "x", "--extends", child, "--extends", other, code=1).stderr
    assert "'child' extends a different version of 'colour'" in wrong


BAD: list[tuple[list[object], str]] = [
    (["set", *TRAIN, "--regime", "magic"], "unknown regime 'magic'"),
    (["nowhere", *TRAIN], "no such file or folder"),
    (["set/train/red", *TRAIN], "class"),
    (["one", *TRAIN], "only one class was found"),
    (["set", *TRAIN, "--task", "a/b"], "looks like a path"),
    (["set", *TRAIN, "--task", "base"], "reserved"),
    (["set", *TRAIN, "--lr", "-1"], "lr -1.0"),
    (["set", *TRAIN, "--epochs", "0"], "epochs 0"),
    (["set", *TRAIN, "--cells", "-1"], "cells must be between 0 and 4096, not -1"),
    (["set", *TRAIN, "--from-layer", "6"], "--from-layer must be between 0 and 5, not 6"),
    (["set", *TRAIN, "--extends", "vit/model.safetensors"], "not a memoro file"),
    (["set", *TRAIN, "--folder", "vit/config.json", "--epochs", "1"], "cannot write"),
    (["set", *TRAIN, "--backbone", "/nowhere/at/all"], "nowhere"),
    (["set", *TRAIN, "--image-size", "99999"], "image size 99999: choose 1 to 2048 pixels"),
    (["set", *TRAIN, "--image-size", "3"], "images of 3x3 are smaller than one 4x4 patch"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(root: Path, arguments: list[object], message: str) -> None:
    (root / "one" / "only").mkdir(parents=True, exist_ok=True)
    save_square(root / "one" / "only" / "0.png", "red", 0)
    done = run(root, "train", *arguments, "--out", "never", "--json", code=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert done.stdout == ""
    assert not (root / "never").exists()


@pytest.mark.parametrize("command", ["train", "eval", "predict"])
def test_help(tmp_path: Path, command: str) -> None:
    text = run(tmp_path, command, "--help").stdout
    assert "Usage" in text
    assert "--backbone" in text


def stopped(root: Path, lines: Path, count: int, number: int, *arguments: object) -> int:
    """The exit code of a training that gets a signal once it has written so many lines."""
    process, end = start(root, *arguments), time.monotonic() + 120
    while not lines.is_file() or lines.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end
        time.sleep(0.001)
    os.kill(process.pid, number)
    process.join(120)
    assert (root / ".stdout").read_text() == ""
    return int(process.exitcode)


def test_interrupted_killed_and_resumed(root: Path, tmp_path: Path) -> None:
    def command(name: str) -> list[object]:
        return [
            "train", "set", *TRAIN, "--task", "t", "--epochs", 16, "--set", "data_seed=1",
            "--folder", tmp_path / name, "--out", tmp_path / f"{name}.safetensors", "--json",
        ]  # fmt: skip

    lines = tmp_path / "a" / "metrics.jsonl"
    assert stopped(root, lines, 6, signal.SIGINT, *command("a")) == 130
    told = (root / ".stderr").read_text()
    assert "stopped and saved after step" in told
    assert "Run the same command with --resume" in told
    held = lines.read_bytes()
    assert "cannot resume: recipe differ" in run(root, *command("a"), "--resume", "--lr", 0.5, code=1).stderr
    assert lines.read_bytes() == held
    more = held.count(b"\n") + 6
    assert stopped(root, lines, more, signal.SIGKILL, *command("a"), "--resume") == -signal.SIGKILL
    assert not (tmp_path / "a.safetensors").exists()
    record = run(root, *command("a"), "--resume").json
    wanted = run(root, *command("b")).json
    assert record["metrics"] == wanted["metrics"]
    tasks = [memoro.load_task(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert tasks[0].content_hash() == tasks[1].content_hash()
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [entry["step"] for entry in steps if "steps" in entry] == list(range(1, 49))


@pytest.mark.parametrize(
    ("option", "value", "known"), [("--set", "optimizer=lion", "sgd, adamw"), ("--set", "crop=round", "pad")]
)
def test_values_that_an_option_does_not_have(root: Path, option: str, value: str, known: str) -> None:
    said = run(root, "train", "set", *TRAIN, option, value, code=1).stderr
    assert f"{value}: choose " in said
    assert known in said
