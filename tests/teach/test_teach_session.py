"""Sessions: labels that stay, guesses that follow, and what is said about them."""

from __future__ import annotations

import csv
import os
import zipfile
from pathlib import Path

import pytest
from sessions import COLOURS, backbone, draw, fill, kept_elsewhere

import memoro
from memoro.backbones import Backbone
from memoro.errors import TeachError
from memoro.teach.session import Change

__all__ = ["backbone", "kept_elsewhere"]  # fixtures


def test_from_unlabelled_photographs_to_a_task(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos")
    with memoro.teach(tmp_path / "photos", task="colours", backbone=backbone) as session:
        assert session.wait().guesses() == {}
        while len(session.training()) < 12:
            for one in session.suggest(3):
                path = session.photos.paths[one.image]
                session.label(path, truth[path])
            session.wait()
        guesses = session.guesses()
        assert set(guesses) == set(truth)
        assert all(max(row, key=lambda name: row[name]) == truth[path] for path, row in guesses.items())
        figure = session.accuracy()
        assert figure is not None
        assert figure["low"] < figure["value"] <= figure["high"] <= 1
        assert figure["images"] == 12
        found = session.fit(tmp_path / "colours.safetensors", regime="readout", cache=False, quiet=True)
    assert sorted(found.task.labels) == sorted(COLOURS)
    model = memoro.compose(backbone, [memoro.load_task(tmp_path / "colours.safetensors")])
    [answer] = model.predict([draw("green", 999)])
    assert answer["colours"]["label"] == "green"


def test_decisions_survive_and_are_undone(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 2)
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        session.label(["00-0.png", "00-1.png"], "red")
        [(at, before, now)] = session.decide([Change(1, "label", "green")])
        assert (before.label, now.label) == ("red", "green")
        assert session.decide([Change(at, before.state, before.label, row=before.row)]) == []  # not the row it was
        session.decide([Change(at, before.state, before.label, row=now.row)])
        session.label("00-2.png", None)
        session.decide([Change(0, "clear")])
    with memoro.teach(tmp_path / "photos", backbone=backbone) as again:
        kept = {again.photos.paths[at]: (one.state, one.label) for at, one in again.decided().items()}
    assert kept == {"00-1.png": ("label", "red"), "00-2.png": ("none", None)}


def test_class_folders_are_labels_and_are_never_changed(backbone: Backbone, tmp_path: Path) -> None:
    for at in range(4):
        for colour in COLOURS:
            (tmp_path / "sets" / colour).mkdir(parents=True, exist_ok=True)
            draw(colour, at).save(tmp_path / "sets" / colour / f"{at}.png")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png"))
    with memoro.teach(tmp_path / "sets", backbone=backbone) as session:
        assert len(session.training()) == 12
        assert set(session.classes) == set(COLOURS)
        session.label("red/0.png", "blue")
        assert session.wait().decisions[session.photos.by_path["red/0.png"]].label == "blue"
        assert session.suspects()[0][:3] == ("red/0.png", "blue", "red")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")) == before
    assert len(memoro.load_data(tmp_path / "sets", val_fraction=0, quiet=True).train or ()) == 12  # not labels.csv
    with memoro.teach(
        tmp_path / "sets", backbone=backbone, labels=["red", "green"], labels_file=tmp_path / "l.csv"
    ) as few:
        assert len(few.training()) == 8


def test_a_half_labelled_table(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos", 3)
    with (tmp_path / "photos" / "list.csv").open("w", newline="") as file:
        rows = [(path, colour if at % 2 else "") for at, (path, colour) in enumerate(truth.items())]
        csv.writer(file).writerows([("path", "label"), *rows])
    with memoro.teach(tmp_path / "photos" / "list.csv", backbone=backbone) as session:
        assert (len(session.photos), len(session.training())) == (9, 4)


def test_several_labels_and_numbers(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos", 4)
    with memoro.teach(tmp_path / "photos", backbone=backbone, kind="labels") as session:
        for path, colour in truth.items():
            session.label(path, ["red", "warm"] if colour == "red" else ["cold"] if colour == "blue" else [])
        session.label("00-1.png", None)
        session.wait()
        answers = session.guesses()["03-0.png"]
        assert answers["red"] > 0.5 > answers["cold"]
        assert session.learner.now.guess(0, "multilabel") is not None
    with memoro.teach(tmp_path / "photos", backbone=backbone, kind="number", labels_file=tmp_path / "n.csv") as session:
        for path, colour in list(truth.items())[:9]:
            session.label(path, {"red": 3, "green": 2.0, "blue": "1"}[colour])
        session.wait()
        assert abs(session.guesses()["03-0.png"]["number"] - 3) < 0.7
        assert len(session.suggest(2)) == 2


def test_the_last_accepted_guesses_say_nothing_about_guesses(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos", 4)
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        for at, (path, colour) in enumerate(truth.items()):
            session.decide([Change(session.photos.by_path[path], "label" if at < 6 else "accept", colour)])
        session.wait()
        figure = session.accuracy()
    assert figure is not None
    assert figure["images"] == 6


def test_links_and_test_images_are_left_out(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", 1)
    for part in ("train", "test"):
        for colour in ("red", "blue"):
            (tmp_path / "photos" / part / colour).mkdir(parents=True)
            draw(colour, len(part)).save(tmp_path / "photos" / part / colour / "a.png")
    os.symlink(tmp_path / "elsewhere", tmp_path / "photos" / "train" / "red" / "out")
    os.symlink(tmp_path / "elsewhere" / "00-0.png", tmp_path / "photos" / "train" / "red" / "b.png")
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        assert session.photos.paths == ["train/blue/a.png", "train/red/a.png"]


def test_a_trusted_table_without_labels_may_name_images_elsewhere(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", 1)
    (tmp_path / "table").mkdir()
    draw("red", 5).save(tmp_path / "table" / "own.png")
    far = [str(path) for path in sorted((tmp_path / "elsewhere").iterdir())]
    (tmp_path / "table" / "all.csv").write_text("\n".join(["path", "own.png", *far]))
    with memoro.teach(tmp_path / "table" / "all.csv", backbone=backbone, allow_absolute=True) as session:
        assert session.photos.paths == ["own.png", *far]
        assert session.training() == {}


def test_unreadable_images_do_not_stop_the_others(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 2)
    (tmp_path / "photos" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n junk")
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        session.wait()
        assert list(session.gallery.unreadable) == [session.photos.by_path["bad.png"]]
        assert session.gallery.ready.sum() == 6


def test_a_zip_needs_a_file_for_its_labels(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos", 2)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in truth:
            archive.write(tmp_path / "photos" / path, path)
    with pytest.raises(TeachError, match="`labels_file`"):
        memoro.teach(tmp_path / "photos.zip", backbone=backbone)
    with memoro.teach(tmp_path / "photos.zip", backbone=backbone, labels_file=tmp_path / "l.csv") as session:
        session.label("00-0.png", "red")
        draw("red", 99).save(tmp_path / "new.png")
        with pytest.raises(TeachError, match="a folder"):
            session.add((tmp_path / "new.png").read_bytes(), "red")
    assert "00-0.png,red,label" in (tmp_path / "l.csv").read_text()


def test_corrections_become_images_of_the_folder(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 2)
    draw("red", 77).save(tmp_path / "new.png")
    data = (tmp_path / "new.png").read_bytes()
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        session.wait()
        at = session.add(data, "red")
        assert (at, session.photos.paths[at].split("/")[0]) == (6, "corrections")
        assert session.wait().gallery.ready[at]
        assert session.add(data, "blue") == at  # its content is known
        with pytest.raises(memoro.ImageError):
            session.add(b"junk", "red")
    assert not any(path.name == "junk" for path in (tmp_path / "photos").rglob("*"))
    with memoro.teach(tmp_path / "photos", backbone=backbone) as again:
        assert [one.label for one in again.training().values()] == ["blue"]


def test_an_earlier_task_guesses_before_the_first_label(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos")
    with memoro.teach(tmp_path / "photos", task="colours", backbone=backbone) as session:
        for path, colour in truth.items():
            session.label(path, colour)
        session.fit(tmp_path / "colours.safetensors", regime="readout", cache=False, quiet=True)
    fill(tmp_path / "more", 2)
    with memoro.teach(tmp_path / "more", backbone=backbone, start_from=tmp_path / "colours.safetensors") as session:
        assert (session.name, set(session.classes)) == ("colours", set(COLOURS))
        guesses = session.wait().guesses()
        assert all(max(row, key=lambda name: row[name]) == truth[path] for path, row in guesses.items())


def test_nothing_to_learn_from(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 1)
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        session.label([0, 1], "red")
        assert session.wait().accuracy() is None
        with pytest.raises(TeachError, match="two classes"):
            session.fit()
        with pytest.raises(TeachError, match="no image"):
            session.label("nothing.png", "red")
        with pytest.raises(TeachError, match="no image"):
            session.label(99, "red")
