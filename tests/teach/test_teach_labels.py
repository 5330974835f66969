"""The table of labels: on disk before the next decision, never overwritten, read back whatever is in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memoro.errors import TeachError
from memoro.teach.labels import Decision, LabelTable, read_label


def reopened(path: Path) -> list[tuple[str, Decision]]:
    table = LabelTable(path)
    table.close()
    return table.rows


def test_rows_are_on_disk_when_append_returns_and_are_read_back(tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.append([("a.jpg", Decision("label", "cat")), ("b.jpg", Decision("accept", "dog"))])
    assert (tmp_path / "labels.csv").read_text().splitlines() == [
        "path,label,decision",
        "a.jpg,cat,label",
        "b.jpg,dog,accept",
    ]
    table.append([("a.jpg", Decision("clear"))])
    table.close()
    assert reopened(tmp_path / "labels.csv") == [
        ("a.jpg", Decision("label", "cat", 1)),
        ("b.jpg", Decision("accept", "dog", 2)),
        ("a.jpg", Decision("clear", None, 3)),
    ]


@pytest.mark.parametrize("kind", ["softmax", "multilabel", "regression"])
def test_the_header_says_what_labels_are(tmp_path: Path, kind: str) -> None:
    label = {"softmax": "cat", "multilabel": ("a", "b"), "regression": -1.5}[kind]
    table = LabelTable(tmp_path / "t.csv", kind)  # type: ignore[arg-type]
    table.append([("x", Decision("label", label))])  # type: ignore[arg-type]
    table.close()
    found = LabelTable(tmp_path / "t.csv")
    found.close()
    assert (found.kind, found.rows[0][1].label) == (kind, label)
    with pytest.raises(TeachError, match="has a column"):
        LabelTable(tmp_path / "t.csv", "softmax" if kind != "softmax" else "regression")
    with pytest.raises(TeachError, match="separates"):
        read_label(["a|b"], "multilabel")


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "'=1", "''=1", "+x", "@y", "a,b", 'quo"te', "-1", "é"])
def test_hostile_names_are_harmless_in_a_spreadsheet_and_come_back(tmp_path: Path, name: str) -> None:
    table = LabelTable(tmp_path / "t.csv")
    table.append([(name, Decision("label", name))])
    table.close()
    cell = (tmp_path / "t.csv").read_text().splitlines()[1]
    assert cell.lstrip('"')[0] not in "=+@" or cell.startswith("'")
    assert reopened(tmp_path / "t.csv") == [(name, Decision("label", name, 1))]


def test_paths_that_are_not_unicode_come_back(tmp_path: Path) -> None:
    path = b"\xff.jpg".decode("utf-8", "surrogateescape")
    table = LabelTable(tmp_path / "t.csv")
    table.append([(path, Decision("label", "cat"))])
    table.close()
    assert reopened(tmp_path / "t.csv")[0][0] == path


@pytest.mark.parametrize("torn", ["b.jp", "b.jpg,do", "b.jpg,dog,lab"])
def test_a_row_that_was_torn_off_is_skipped_and_the_next_one_is_whole(tmp_path: Path, torn: str) -> None:
    (tmp_path / "t.csv").write_text(f"path,label,decision\na.jpg,cat,label\n{torn}")
    table = LabelTable(tmp_path / "t.csv")
    assert [path for path, _ in table.rows] == ["a.jpg", ""]
    table.append([("c.jpg", Decision("label", "fox"))])
    table.close()
    rows = [(path, decision.label) for path, decision in reopened(tmp_path / "t.csv") if path]
    assert rows == [("a.jpg", "cat"), ("c.jpg", "fox")]


def test_one_process_at_a_time_and_readers_beside_it(tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "t.csv")
    table.append([("a", Decision("label", "cat"))])
    place = str(tmp_path / "t.csv")
    code = f"import pathlib; from memoro.teach.labels import LabelTable; LabelTable(pathlib.Path({place!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is open in another memoro teach" in other.stderr
    reader = LabelTable(tmp_path / "t.csv", read_only=True)
    assert [path for path, _ in reader.rows] == ["a"]
    reader.close()
    table.close()
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_another_table_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,label\na.jpg,cat\n")
    with pytest.raises(TeachError, match="no table of memoro teach"):
        LabelTable(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == "path,label\na.jpg,cat\n"


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "t.csv").mkdir()
    with pytest.raises(TeachError, match="`labels_file`"):
        LabelTable(tmp_path / "t.csv")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX")
def test_a_full_disk_leaves_no_half_of_a_row(tmp_path: Path) -> None:
    import resource

    table = LabelTable(tmp_path / "t.csv")
    table.append([("a.jpg", Decision("label", "cat"))])
    before = (tmp_path / "t.csv").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(TeachError, match="cannot write"):
            table.append([("b.jpg", Decision("label", "dog"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "t.csv").read_bytes() == before
    table.append([("c.jpg", Decision("label", "fox"))])
    table.close()
    assert [(path, decision.label) for path, decision in reopened(tmp_path / "t.csv")] == [
        ("a.jpg", "cat"),
        ("c.jpg", "fox"),
    ]


@pytest.mark.parametrize("bad", ["", "  ", "two\nlines", "x" * 201, 3, None])
def test_names_that_are_none(bad: object) -> None:
    with pytest.raises(TeachError):
        read_label(bad, "softmax")


@pytest.mark.parametrize("bad", ["cat", "nan", "inf", None])
def test_numbers_that_are_none(bad: object) -> None:
    with pytest.raises(TeachError):
        read_label(bad, "regression")
    assert read_label("-1.5", "regression") == read_label(-1.5, "regression") == -1.5
