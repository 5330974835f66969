"""The columns of a table: one set of images, split once, and a task of each."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from run_groups import LOAD, root, run_spec, same_result
from small_training import FRESH, PLAIN, double

from memoro.backbones import Backbone
from memoro.data import load_columns, load_data, splits
from memoro.errors import DataError
from memoro.evaluation.evaluate import evaluate
from memoro.tasks.task import new_task
from memoro.training import Run, train_runs
from memoro.training.loop import Trainer
from memoro.training.recipe import TrainOptions

__all__ = ["double", "root"]  # fixtures


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sets whose images were decoded."""
    names: list[str] = []
    real = splits.drop_unreadable
    monkeypatch.setattr(
        splits,
        "drop_unreadable",
        lambda sets, *given, **how: (names.extend(one.name for one in sets), real(sets, *given, **how))[1],
    )
    return names


def test_columns_of_a_table_are_one_course(double: Backbone, root: Path, screened: list[str]) -> None:
    columns = load_columns(root / "table" / "table.csv", ["x", "y", "labels", "number"], val_fraction=0.25, **LOAD)
    assert len(screened) == 1  # every image is decoded once
    [alone] = load_columns(root / "table" / "table.csv", "labels", val_fraction=0.25, **LOAD).items()
    assert (alone[0], alone[1].labels) == ("labels", columns["labels"].labels)
    assert [one.kind for one in columns.values()] == ["softmax", "softmax", "multilabel", "regression"]
    assert [one.name for one in columns.values()] == ["table-x", "table-y", "table-labels", "table-number"]
    parts = list(columns.values())
    for one in parts:
        assert one.train is not None
        assert one.val is not None
        assert (len(one.train), len(one.val)) == (18, 6)
        assert np.array_equal(one.val.rows, parts[0].val.rows)  # type: ignore[union-attr]
        assert np.array_equal(one.train.rows, parts[0].train.rows)  # type: ignore[union-attr]
        assert not set(one.train.rows) & set(one.val.rows)

    def specs() -> list[Run]:
        return [run_spec(double, name, one, seed=at) for at, (name, one) in enumerate(columns.items())]

    groups = Trainer(double, specs(), TrainOptions(workers=0)).groups
    assert [(len(group.runs), len(group.val_sets)) for group in groups] == [(3, 1), (1, 1)], "numbers have plain views"
    together = train_runs(double, specs(), **FRESH)
    for number in (1, 2, 3):
        same_result(together[number], train_runs(double, [specs()[number]], **FRESH)[0])
    # The first is cut as a set that knows of no others.
    own = load_data(root / "table" / "table.csv", label_column="x", val_fraction=0.25, **LOAD)
    same_result(together[0], train_runs(double, [run_spec(double, "x", own, seed=0)], **FRESH)[0])


def test_columns_that_are_examined_on_the_same_images_keep_their_own_labels(double: Backbone, root: Path) -> None:
    columns = load_columns(root / "table" / "table.csv", ["x", "y"], val_fraction=0.25, **LOAD)

    def specs() -> list[Run]:  # other views: two groups, but one set of validation images
        return [run_spec(double, "x", columns["x"]), run_spec(double, "y", columns["y"], augment=PLAIN)]

    assert len(Trainer(double, specs(), TrainOptions(workers=0)).groups) == 2
    for number, result in enumerate(train_runs(double, specs(), **FRESH)):
        same_result(result, train_runs(double, [specs()[number]], **FRESH)[0])


def test_columns_of_a_set_with_splits_of_its_own(root: Path, tmp_path: Path) -> None:
    lines = (root / "table" / "table.csv").read_text().splitlines()
    roles = ["split", *["train"] * 12, *["val"] * 6, *["test"] * 6]
    shutil.copytree(root / "table", tmp_path / "table")
    text = "\n".join(f"{line},{role}" for line, role in zip(lines, roles, strict=True))
    (tmp_path / "table" / "table.csv").write_text(text + "\n")
    columns = load_columns(tmp_path / "table" / "table.csv", ["x", "y"], **LOAD)
    for one in columns.values():
        assert [len(part or ()) for part in (one.train, one.val, one.test)] == [12, 6, 6]
        assert one.test is not None
        assert one.test.digests is not None
    for wrong in ([], ["x", "x"]):
        with pytest.raises(DataError, match="each of them once"):
            load_columns(tmp_path / "table" / "table.csv", wrong, **LOAD)
    with pytest.raises(DataError, match="nothing"):
        load_columns(tmp_path / "table" / "table.csv", ["x", "nothing"], **LOAD)


def test_columns_keep_out_what_cannot_be_read(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "table", tmp_path / "table")
    (tmp_path / "table" / "5.png").write_bytes(b"no image")
    columns = load_columns(tmp_path / "table" / "table.csv", ["x", "y"], val_fraction=0.25, **LOAD)
    for one in columns.values():
        rows = [*one.train.rows, *one.val.rows]  # type: ignore[union-attr]
        assert sorted(rows) == sorted(str(tmp_path / "table" / f"{row}.png") for row in range(24) if row != 5)
        assert len(one.skipped) == 1
    assert np.array_equal(columns["x"].val.rows, columns["y"].val.rows)  # type: ignore[union-attr]
    assert [one.val.name for one in columns.values()] == ["table:val"] * 2  # type: ignore[union-attr]


def test_a_class_that_another_column_takes_away_is_told(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "table", tmp_path / "table")
    table = tmp_path / "table" / "table.csv"
    held = load_columns(table, ["x"], val_fraction=0.25, **LOAD)["x"].val
    assert held is not None
    header, *lines = table.read_text().splitlines()
    lines = [
        f"{line},{'rare' if Path(held.rows[0]).name == f'{row}.png' else 'usual'}" for row, line in enumerate(lines)
    ]
    table.write_text("\n".join([f"{header},z", *lines]) + "\n")
    told = load_columns(table, ["x", "z"], val_fraction=0.25, **LOAD)["z"].notes
    assert any("has no image in train: rare" in note for note in told)
    assert not any("a single image" in note for note in told)  # so it was before the split


def test_columns_of_embedded_images_are_read_once_and_hold_out_the_same_images(
    root: Path, tmp_path: Path, screened: list[str]
) -> None:
    table = csv.DictReader((root / "table" / "table.csv").read_text().splitlines())
    rows = [{"image": (root / "table" / row["path"]).read_bytes(), "x": row["x"], "y": row["y"]} for row in table]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    how = {**LOAD, "val_fraction": 0.25}
    first, second = load_columns(tmp_path / "table.parquet", ["x", "y"], **how).values()
    assert len(screened) == 1
    assert first.val is not None
    assert second.val is not None
    assert first.val.source == second.val.source
    assert np.array_equal(first.val.rows, second.val.rows)
    other = pyarrow.Table.from_pylist(rows[::-1])
    pyarrow.parquet.write_table(other, tmp_path / "other.parquet")
    assert load_data(tmp_path / "other.parquet", label_column="x", **LOAD).train.source != first.train.source  # type: ignore[union-attr]


def test_a_task_is_measured_on_the_column_of_its_name(backbone: Backbone, root: Path) -> None:
    table = root / "table" / "table.csv"
    tasks = {name: new_task(backbone, name, load_columns(table, name, **LOAD)[name].labels) for name in ("x", "y")}
    found = evaluate(backbone, list(tasks.values()), table, workers=0)
    assert [found[name]["images"] for name in ("x", "y")] == [24, 24]
    assert not any("unknown_classes" in one for one in found.values())


def test_the_column_that_is_used_is_named(root: Path) -> None:
    note = "the labels are those of column 'labels'; for another one, use `label_column`."
    table = root / "table" / "table.csv"
    assert note in load_data(table, **LOAD).notes
    assert note not in load_data(table, label_column="labels", **LOAD).notes
