"""CSV, JSON lines and Parquet files that list images, and image folders with such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from image_files import picture, save_classes, to_bytes

from memoro.data import load_columns, load_data
from memoro.errors import DataError


def csv(root: Path, text: str, images: int = 6, name: str = "set.csv") -> Path:
    for number in range(images):
        (root / f"{number}.png").write_bytes(to_bytes(picture(number)))
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def test_csv_with_label_and_split(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,label,split\n0.png,007,train\n1.png,NA,train\n2.png,007,test\n3.png,NA,val\n")
    splits = load_data(path)
    assert splits.labels == ("007", "NA")
    assert splits.train is not None
    assert splits.val is not None
    assert splits.test is not None
    assert splits.train.targets.tolist() == [0, 1]
    assert splits.test.open(0).tobytes() == picture(2).tobytes()
    assert splits.val.where(0).endswith("3.png")


def test_csv_with_semicolons_bom_and_backslashes(tmp_path: Path) -> None:
    save_classes(tmp_path, {"é": 2})
    path = csv(tmp_path, "\ufeffPath;Label\né\\0000.png;x\né\\0001.png;y\n")
    assert load_data(path, val_fraction=0).labels == ("x", "y")


def test_csv_with_several_labels(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,labels\n0.png,sky|sea\n1.png,sea; tree\n2.png,\n3.png,tree\n")
    splits = load_data(path, val_fraction=0)
    assert splits.kind == "multilabel"
    assert splits.labels == ("sea", "sky", "tree")
    assert splits.train is not None
    assert splits.train.targets.dtype == torch.float32
    assert splits.train.targets.tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1]]


def test_columns_of_0_and_1_are_labels(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,who,sky,sea,split\n0.png,ann,1,1,\n1.png,bob,0,1,\n2.png,ann,0,0,test\n3.png,bob,1,0,\n")
    splits = load_data(path, val_fraction=0)
    assert (splits.kind, splits.labels) == ("multilabel", ("sea", "sky"))
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1, 1], [1, 0], [0, 1]]
    assert splits.test is not None
    assert splits.test.targets.tolist() == [[0, 0]]
    assert splits.notes[0] == "columns 'sky', 'sea' hold 0 and 1: used as the labels of a multi-label task."
    assert load_data(path, val_fraction=0, label_column="who").labels == ("ann", "bob")
    assert load_data(path, val_fraction=0, label_column="sky").labels == ("0", "1")
    with pytest.raises(DataError, match="no column for the label"):
        load_data(path, kind="softmax")  # a row has two, another has none


def test_columns_with_one_1_in_each_row_are_classes(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,cat,dog\n0.png,1,0\n1.png,0,1\n2.png,False,True\n")
    splits = load_data(path, val_fraction=0)
    assert (splits.kind, splits.labels) == ("softmax", ("cat", "dog"))
    assert splits.train is not None
    assert splits.train.targets.tolist() == [0, 1, 1]
    assert "use `kind='labels'`" in splits.notes[0]
    several = load_data(path, val_fraction=0, kind="multilabel")
    assert several.train is not None
    assert several.train.targets.tolist() == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("rows", ["0.png,1,0\n1.png,2,1\n", "0.png,1,0\n1.png,,1\n", ""])
def test_columns_of_other_values_are_no_labels(tmp_path: Path, rows: str) -> None:
    with pytest.raises(DataError, match="no column for the label"):
        load_data(csv(tmp_path, "path,cat,dog\n" + rows))


def test_csv_with_numbers(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,number,width\n0.png,1.5,3\n1.png,-2,4\n2.png,1e3,5\n")
    splits = load_data(path, val_fraction=0)
    assert splits.kind == "regression"
    assert splits.labels == ("number",)
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1.5], [-2.0], [1000.0]]
    both = load_data(path, label_column=["width", "number"], val_fraction=0)
    assert both.labels == ("width", "number")
    assert both.train is not None
    assert both.train.targets[0].tolist() == [3.0, 1.5]
    with pytest.raises(DataError, match="1 numbers per image"):
        load_data(path, labels=["a", "b"])


def test_numbers_come_in_the_order_of_the_labels(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,x,y\n0.png,1,10\n1.png,2,20\n")
    splits = load_data(path, label_column=["y", "x"], labels=["x", "y"], val_fraction=0)
    assert splits.labels == ("x", "y")
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1, 10], [2, 20]]
    with pytest.raises(DataError, match=r"label columns are x, y, but the task predicts a, b\. Rename the columns"):
        load_data(path, label_column=["x", "y"], labels=["a", "b"])
    other = load_data(path, kind="regression", label_column="x", labels=["width"], val_fraction=0)
    assert other.labels == ("width",)
    assert "the numbers of column 'x' are used as 'width'." in other.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,number\n0.png,1\n1.png,nan\n", r"line 3: 'nan' is not a finite number"),
        ("path,number\n0.png,1\n1.png,much\n", r"line 3: 'much' is not a number"),
        ("path,label\n0.png,\n1.png,\n", r"contains no images. set.csv: 2 images were left out: they have no label"),
        (
            "path,age\n" + "".join(f"0.png,{at}.5\n" for at in range(20)) + "1.png,unknown\n",
            r"column 'age' mixes numbers and text \('unknown', 1 of 21 rows\)\. Empty these cells.*`kind='class'`",
        ),
        ("path,number\n0.png,inf\n", "not a finite number"),
        ("photo,what\n0.png,a\n", r"no column for the image's path \(columns: 'photo', 'what'\).*image_column"),
        ("path,what\n0.png,a\n", r"no column for the label \(columns: 'what'\).*label_column"),
        ("path,label,split\n0.png,a,train\n1.png,b,later\n", r"line 3: unknown split 'later': choose one of train"),
        ("path,label\n,a\n", "line 2: there is no path"),
        ("path,label\n", "there are no rows"),
        ("", "not a readable CSV"),
        ("path,label\n0.png,a\n1.png,a\n", "only one class was found"),
        ("path,labels\n0.png,\n1.png,\n", "no image has a label"),
    ],
)
def test_unusable_csv(tmp_path: Path, text: str, message: str) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(DataError, match=message):
        load_data(path, label_column="age" if "age" in text else None)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("path,label\n0.png,a\n1.png,\n2.png,b\n", [0, 1]),
        ("path,number\n0.png,1\n1.png,\n2.png,2\n", [[1], [2]]),
    ],
)
def test_rows_without_a_label_are_left_out(tmp_path: Path, text: str, targets: list[Any]) -> None:
    splits = load_data(csv(tmp_path, text), val_fraction=0)
    assert splits.train is not None
    assert splits.train.targets.tolist() == targets
    assert splits.train.open(1).tobytes() == picture(2).tobytes()
    assert "set.csv: 1 image was left out: it has no label." in splits.notes


def test_columns_of_one_table_may_have_gaps_of_their_own(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,shape,age\n0.png,round,\n1.png,,1.5\n2.png,flat,2.5\n3.png,flat,3.5\n")
    found = load_columns(path, ["shape", "age"], val_fraction=0)
    assert [len(one.train) for one in found.values() if one.train is not None] == [3, 3]


@pytest.mark.parametrize("cells", [["sky,sea", "sea, tree", "tree"], ["['sky', 'sea']", "['sea', 'tree']", "['tree']"]])
def test_labels_between_commas_and_lists_of_pandas(tmp_path: Path, cells: list[str]) -> None:
    text = "path,labels\n" + "".join(f'{at}.png,"{cell}"\n' for at, cell in enumerate(cells))
    splits = load_data(csv(tmp_path, text), val_fraction=0)
    assert splits.labels == ("sea", "sky", "tree")
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 1]]


def test_class_numbers_of_few_images_are_classes_where_the_column_says_so(tmp_path: Path) -> None:
    text = "path,{}\n" + "".join(f"{at}.png,{at}\n" for at in range(6))
    assert load_data(csv(tmp_path, text.format("label")), val_fraction=0).kind == "softmax"
    assert load_data(csv(tmp_path, text.format("age")), val_fraction=0, label_column="age").kind == "regression"


def test_a_regression_finds_its_own_columns(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,x,y\n0.png,1,10\n1.png,2,20\n")
    both = load_data(path, kind="regression", labels=["y", "x"], val_fraction=0)
    assert both.train is not None
    assert both.train.targets.tolist() == [[10, 1], [20, 2]]
    assert load_data(path, kind="regression", labels=["y"], val_fraction=0).labels == ("y",)


def test_a_folder_with_a_file_that_datasets_might_have_written(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "state.json").write_text("{}")
    assert load_data(tmp_path, val_fraction=0).labels == ("a", "b")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read by datasets\.load_from_disk"):
        load_data(tmp_path)


def test_csv_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_bytes("path,label\n0.png,café\n".encode("latin-1"))
    with pytest.raises(DataError, match="save it as UTF-8"):
        load_data(tmp_path / "set.csv")


@pytest.mark.parametrize("way", ["relative", "absolute"])
def test_csv_path_that_leaves_the_folder(tmp_path: Path, way: str) -> None:
    outside = tmp_path / "out.png"
    outside.write_bytes(to_bytes(picture(50)))
    (tmp_path / "in").mkdir()
    leaving = "x/../../out.png" if way == "relative" else outside
    path = csv(tmp_path / "in", f"path,label\n0.png,a\n{leaving},b\n")
    with pytest.raises(DataError, match=r"line 3: .* leaves the table's folder.*allow_absolute"):
        load_data(path)
    train = load_data(path, val_fraction=0, allow_absolute=True).train
    assert train is not None
    assert train.open(1).tobytes() == picture(50).tobytes()


def test_missing_files_count_as_unreadable(tmp_path: Path) -> None:
    rows = "".join(f"{at % 6}.png,{'ab'[at % 2]}\n" for at in range(38))
    path = csv(tmp_path, f"path,label\n{rows}gone.png,a\n")
    [(where, reason)] = load_data(path).skipped
    assert (Path(where).name, reason) == ("gone.png", "no such file")
    path = csv(tmp_path, "path,label\ngone.png,a\nlost.png,b\n")
    with pytest.raises(
        DataError, match=r"none of the 2 images was found, for example .*gone\.png\. Paths are relative to"
    ):
        load_data(path)
    path = csv(tmp_path, "path,label\ngone.png,a\nlost.png,b\n0.png,a\n1.png,b\n")
    with pytest.raises(DataError, match=r"2 of 4 images cannot be read.*gone\.png: no such file"):
        load_data(path)


def test_column_and_kind_as_asked(tmp_path: Path) -> None:
    path = csv(tmp_path, "f,what,label\n0.png,3,a\n1.png,4,b\n")
    assert load_data(path, image_column="f", label_column="what", kind="class").labels == ("3", "4")
    assert load_data(path, image_column="f", label_column="what", kind="regression").labels == ("what",)
    with pytest.raises(DataError, match="no column 'nix'; it has 'what', 'label'"):
        load_data(path, image_column="f", label_column="nix")


def test_parquet_of_paths(tmp_path: Path) -> None:
    csv(tmp_path, "")
    rows = {"path": ["0.png", "1.png"], "labels": [["x", "y"], ["y"]], "size": [0.5, 0.25]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "set.parquet")
    splits = load_data(tmp_path / "set.parquet", val_fraction=0)
    assert splits.train is not None
    assert splits.train.targets.tolist() == [[1, 1], [0, 1]]
    assert load_data(tmp_path / "set.parquet", label_column="size").kind == "regression"
    (tmp_path / "bad.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match="not a readable Parquet"):
        load_data(tmp_path / "bad.parquet")


# ----------------------------------------------------------------------------------------------------- JSON lines


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"path": "0.png", "label": "x"}, {"label": "y", "path": "1.png", "split": "test"}, {"path": "2.png"}]
    rows.append({"path": "3.png", "label": "y"})
    path = csv(tmp_path, lines(*rows) + "\n", name="set.jsonl")
    splits = load_data(path, val_fraction=0)
    assert splits.labels == ("x", "y")
    assert (len(splits.train or ()), len(splits.test or ())) == (2, 1)  # without a label: left out
    assert splits.test is not None
    assert splits.test.open(0).tobytes() == picture(1).tobytes()


@pytest.mark.parametrize(
    ("cells", "kind", "targets"),
    [
        (("a", "b"), "softmax", [0, 1]),
        ((3, 7), "softmax", [0, 1]),
        ((["a"], ["a", "b"]), "multilabel", [[1.0, 0.0], [1.0, 1.0]]),
        ((0.5, 2), "regression", [[0.5], [2.0]]),
    ],
)
def test_json_lines_have_types(tmp_path: Path, cells: Any, kind: str, targets: Any) -> None:
    column = {"softmax": "label", "multilabel": "labels", "regression": "number"}[kind]
    rows = [{"path": f"{at}.png", column: cells[at % 2]} for at in range(6)]
    splits = load_data(csv(tmp_path, lines(*rows), name="set.ndjson"), val_fraction=0)
    assert splits.kind == kind
    assert splits.train is not None
    assert splits.train.targets[:2].tolist() == targets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]\n", "line 1: not a JSON object"),
        ('{"path": "0.png"\n', "not readable as JSON lines"),
        ("[" * 100_000, "not readable as JSON lines"),
        ("\n", "set.jsonl: .*column"),
        (lines({"path": "../0.png", "label": "x"}), r"line 1: '../0.png' leaves the table's folder"),
        (lines({"path": None, "label": "x"}), "line 1: there is no path"),
    ],
)
def test_unusable_json_lines(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(csv(tmp_path, text, name="set.jsonl"))


# ------------------------------------------------------------------------------------- image folders with metadata


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.parquet"])
def test_an_image_folder_with_metadata(tmp_path: Path, name: str) -> None:
    columns = {"file_name": [f"{at}.png" for at in range(6)], "label": ["x", "y", "x", "z", "y", "x"]}
    rows = list(zip(*columns.values(), strict=True))
    csv(tmp_path, "\n".join(map(",".join, [columns, *rows])), 6, name)
    if name.endswith("jsonl"):
        (tmp_path / name).write_text(lines(*(dict(zip(columns, row, strict=True)) for row in rows)))
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / name)
    train = load_data(tmp_path, val_fraction=0).train
    assert train is not None
    assert [train.labels[target] for target in train.targets] == columns["label"]
    assert [train.open(at).tobytes() for at in range(6)] == [picture(at).tobytes() for at in range(6)]


def test_an_image_folder_with_metadata_is_what_datasets_reads(tmp_path: Path) -> None:
    rows = [{"file_name": f"{at}.png", "label": label} for at, label in enumerate("xyxzyx")]
    csv(tmp_path, lines(*rows), 6, "metadata.jsonl")
    train = load_data(tmp_path, val_fraction=0).train
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "c"))
    assert train is not None
    assert [(train.labels[target], train.open(at).tobytes()) for at, target in enumerate(train.targets)] == [
        (row["label"], row["image"].convert("RGB").tobytes()) for row in theirs
    ]


def test_metadata_of_each_split(tmp_path: Path) -> None:
    for split, numbers in (("train", (0, 1, 2)), ("test", (3, 4))):
        (tmp_path / split).mkdir()
        text = "file_name,label\n" + "".join(f"{at}.png,{'xy'[at % 2]}\n" for at in numbers)
        csv(tmp_path / split, text, 6, "metadata.csv")
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.train is not None
    assert splits.test is not None
    assert [Path(splits.train.where(at)).parent.name for at in range(3)] == ["train"] * 3
    assert splits.train.targets.tolist() == [0, 1, 0]
    assert splits.test.targets.tolist() == [1, 0]
    (tmp_path / "test" / "metadata.csv").write_text("file_name,label\n../../0.png,x\n")
    with pytest.raises(DataError, match=r"metadata.csv, line 2: 'test/../../0.png' leaves"):
        load_data(tmp_path)


def test_metadata_with_another_label_column(tmp_path: Path) -> None:
    csv(tmp_path, "file_name,species,weight\n0.png,cat,4\n1.png,dog,9\n", 2, "metadata.csv")
    assert load_data(tmp_path, label_column="species", val_fraction=0).labels == ("cat", "dog")
    assert load_data(tmp_path, task="species", val_fraction=0).labels == ("cat", "dog"), "as eval does"
    weight = load_data(tmp_path, kind="regression", labels=["weight"], val_fraction=0).train
    assert weight is not None
    assert weight.targets.tolist() == [[4.0], [9.0]]


def test_tabs_separate_the_columns_of_a_tsv(tmp_path: Path) -> None:
    path = csv(tmp_path, "path\tlabel;x\n0.png\ta\n1.png\tb\n", 2, "set.tsv")
    assert load_data(path, label_column="label;x", val_fraction=0).labels == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("set.csv", '\npath,number,note\n\n0.png,1,"two\nlines"\n\n1.png,many,\n'),
        ("set.jsonl", '\n\n{"path": "0.png", "number": 1}\n\n\n\n{"path": "1.png", "number": "many"}\n'),
    ],
)
def test_messages_name_the_line_as_an_editor_does(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(DataError, match=f"{name}, line 7: 'many' is not a number"):
        load_data(csv(tmp_path, text, 2, name))


def test_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    path = csv(tmp_path, "path,number\n0.png,1e39\n1.png,2\n", 2)
    with pytest.raises(DataError, match="line 2: '1e39' is not a finite number of float32"):
        load_data(path)


@pytest.mark.parametrize("text", ["author,label\nme,x\n", "file_name,author\n0.png,me\n", "\xff", ""])
def test_class_folders_beside_another_file_called_metadata(tmp_path: Path, text: str) -> None:
    save_classes(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "metadata.csv").write_text(text, encoding="latin-1")
    assert load_data(tmp_path, val_fraction=0).labels == ("cat", "dog")
