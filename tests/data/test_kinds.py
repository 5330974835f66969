"""What a label is: a class, several labels or a number. Told by --kind, or read from the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from families import CASES
from squares import save_square
from typer.testing import CliRunner

import memoro
from memoro.cli import app
from memoro.data import load_data
from memoro.errors import DataError
from memoro.heads import find_kind

COLOURS = ("red", "green", "blue")


def save_table(folder: Path, **columns: Sequence[object]) -> Path:
    count = len(next(iter(columns.values())))
    for number in range(count):
        save_square(folder / f"{number}.png", COLOURS[number % 3], number)
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    lines = [",".join(["path", *columns]), *(f"{number}.png,{row}" for number, row in enumerate(rows))]
    (folder / "houses.csv").write_text("\n".join(lines) + "\n")
    return folder / "houses.csv"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    CASES[0].model().save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    common = [
        "-b",
        "vit",
        "--image-size",
        20,
        "--set",
        "batch_size=8",
        "--set",
        "workers=0",
        "--epochs",
        1,
        "--lr",
        0.05,
    ]

    def run(*arguments: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [str(one) for one in ("train", *arguments, *common)])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return run


def test_a_column_of_prices_becomes_a_regression(train: Callable[..., Any], tmp_path: Path) -> None:
    table = save_table(tmp_path / "set", price=[90 + 7 * n for n in range(20)], rooms=[1 + n % 4 for n in range(20)])
    done = train(table, "--label-column", "price", "--task", "my houses")
    assert "note: column 'price' is treated as numbers" in done.stderr
    assert "20 different values in 20 rows" in done.stderr
    assert "use --kind class" in done.stderr
    task = memoro.load_task(tmp_path / "my houses.safetensors")
    assert (task.name, task.kind, task.labels) == ("my houses", "regression", ["price"])
    assert "R²" in done.stdout
    assert "accuracy" not in done.stdout

    own = ["-b", "vit", "-t", "my houses.safetensors", "--label-column", "price", "--set", "workers=0", "--json"]
    measured = json.loads(CliRunner().invoke(app, ["eval", str(table), *own]).stdout)["my houses"]
    assert measured["mean_absolute_error"] > 0

    done = train(table, "--label-column", "price", "--kind", "class")
    assert "warning: 20 of 20 classes have a single image in train" in done.stderr
    assert memoro.load_task(tmp_path / "price.safetensors").kind == "softmax"

    both = ("--label-column", "rooms", "--label-column", "price")
    assert "--task only for a single column" in str(train(table, *both, "--task", "x", code=1).exception)
    assert "'price' is not one of 'class'" in train(table, "--label-column", "price", "--kind", "price", code=2).stderr


@pytest.mark.parametrize(
    ("cells", "kind", "why"),
    [
        ([1.5, 2, 2, 2, 3, 3], "regression", "not all whole"),
        ([1, 2, 3, 4, 4, 4], "regression", "4 different values in 6 rows"),
        ([1, 1, 2, 2, 3, 3], "softmax", "treated as 3 classes"),
        (["007", "007", "008", "008"], "softmax", "treated as 2 classes"),
        (["a", "b", "3.5", "a"], "softmax", ""),
        (["1e400", "2", "2", "1e400"], "softmax", ""),
    ],
)
def test_values_decide_where_nobody_does(tmp_path: Path, cells: list[object], kind: str, why: str) -> None:
    table = save_table(tmp_path, size=cells)
    splits = load_data(table, label_column="size", val_fraction=0, workers=0)
    assert splits.kind == kind
    notes = [note for note in splits.notes if "'size'" in note]
    assert [why in note for note in notes] == [True] * bool(why)
    for asked in ("class", "softmax"):
        assert load_data(table, label_column="size", kind=asked, val_fraction=0, workers=0).kind == "softmax"


def test_typed_columns_are_read_the_same_way(tmp_path: Path) -> None:
    import datasets

    table = save_table(tmp_path, unused=range(6))
    images = [str(table.parent / f"{number}.png") for number in range(6)]
    columns = {"price": [10, 20, 30, 40, 50, 60], "rooms": [1, 2, 1, 2, 1, 2], "area": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]}
    data = datasets.Dataset.from_dict({"image": images, **columns}).cast_column("image", datasets.Image())
    how: dict[str, Any] = {"val_fraction": 0, "workers": 0, "allow_absolute": True}
    kinds = {name: load_data(data, label_column=name, **how).kind for name in columns}
    assert kinds == {"price": "regression", "rooms": "softmax", "area": "regression"}
    assert "treated as numbers" in " ".join(load_data(data, label_column="area", **how).notes)


def test_kinds_have_plain_names() -> None:
    plain = {name: find_kind(name) for name in ("class", "labels", "number")}
    assert plain == {"class": "softmax", "labels": "multilabel", "number": "regression"}
    assert all(find_kind(kind) == kind for kind in plain.values())
    with pytest.raises(DataError, match="unknown kind 'price': choose class"):
        find_kind("price")


def test_several_labels_lead_with_mean_average_precision(train: Callable[..., Any], tmp_path: Path) -> None:
    cells = ["red|warm", "green", "blue|cold", "red", "cold", "warm|green"] * 4
    done = train(
        save_table(tmp_path / "set", seen=cells), "--label-column", "seen", "--kind", "labels", "--task", "tags"
    )
    rows = [line for line in done.stdout.splitlines() if "images)" in line]
    order = ["mAP", "F1", "exact match", "label accuracy", "loss"]
    assert [name in row for name, row in zip(order, rows, strict=True)] == [True] * 5
    assert memoro.load_task(tmp_path / "tags.safetensors").labels == ["blue", "cold", "green", "red", "warm"]
    assert "mean fold mAP" in done.stderr, "progress has the name that the table has"
