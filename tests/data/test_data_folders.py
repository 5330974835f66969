"""Folders and zips of class folders: what is read, what is left out, what is refused."""

from __future__ import annotations

import io
import os
import pickle
import stat
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import members, picture, save_classes, to_bytes, zipped

from memoro.data import ImageSet, Splits, load_data
from memoro.data.columns import RawDataset
from memoro.data.folders import Folder, Zip, read_tree
from memoro.errors import DataError, ImageError


def sizes(splits: Splits) -> list[int | None]:
    return [None if images is None else len(images) for images in (splits.train, splits.val, splits.test)]


def read(*files: str) -> RawDataset:
    return read_tree(Folder("x", files, (), {}))


def classes(*files: str) -> dict[Any, Any]:
    """The class of each of these files."""
    train = read(*files).splits["train"]
    return dict(zip(train.rows, train.annotations, strict=True))


def shown(images: ImageSet | None) -> dict[str, str]:
    """File name → label."""
    assert images is not None
    return {os.path.basename(images.where(at)): images.labels[images.targets[at]] for at in range(len(images))}


def test_class_folders(tmp_path: Path) -> None:
    save_classes(tmp_path, {"bees": 4, "ants": 6})
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.labels == ("ants", "bees")
    assert splits.kind == "softmax"
    assert sizes(splits) == [10, None, None]
    assert splits.train is not None
    assert splits.train.targets.dtype == torch.long
    assert shown(splits.train)["0000.png"] == "bees"
    assert shown(splits.train)["0009.png"] == "ants"


def test_validation_is_cut_from_train_by_seed(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 20, "b": 20, "lone": 1})
    first, again, other = (load_data(tmp_path, val_fraction=0.25, seed=seed) for seed in (1, 1, 2))
    assert sizes(first) == [31, 10, None]
    assert shown(first.val) == shown(again.val)
    assert shown(first.val) != shown(other.val)
    assert "lone" in shown(first.train).values()
    assert any("single image" in note and "lone" in note for note in first.notes)
    assert not set(shown(first.train)) & set(shown(first.val))
    assert first.val is not None
    assert first.val.name.endswith(":val")


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Val"])
def test_split_folders_are_used_as_such(tmp_path: Path, val: str) -> None:
    number = save_classes(tmp_path / "train", {"a": 3, "b": 3})
    number = save_classes(tmp_path / val, {"a": 1, "b": 1}, number)
    save_classes(tmp_path / "test", {"a": 2, "b": 2}, number)
    assert sizes(load_data(tmp_path)) == [6, 2, 4]
    assert sizes(load_data(tmp_path, split="test")) == [None, None, 4]
    with pytest.raises(DataError, match="no split 'extra'; it has test, train, val"):
        load_data(tmp_path, split="extra")


def test_class_may_be_called_train() -> None:
    assert classes("bus/1.png", "train/2.png", "car/3.png") == {0: "bus", 1: "train", 2: "car"}


def test_folder_beside_the_splits_is_noted() -> None:
    raw = read("train/a/1.png", "test/a/2.png", "extra/a/3.png")
    assert set(raw.splits) == {"train", "test"}
    assert any("extra" in note for note in raw.notes)


def test_images_deeper_in_a_class_belong_to_it() -> None:
    assert classes("a/x/1.png", "a/2.png", "b/y/z/3.png") == {0: "a", 1: "a", 2: "b"}


def test_clutter_is_ignored_and_other_files_are_noted(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2, "__MACOSX": 1, ".cache": 1})
    (tmp_path / "a" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "a" / "._0000.png").write_bytes(b"x")
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "loose.png").write_bytes(to_bytes(picture(99)))
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.labels == ("a", "b")
    assert sizes(splits) == [4, None, None]
    assert any("1 .txt" in note for note in splits.notes)
    assert any("loose.png" in note for note in splits.notes)


def test_empty_class_folder_is_noted(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2, "nothing": 0})
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.labels == ("a", "b")
    assert any("nothing is empty" in note for note in splits.notes)


def test_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert sizes(load_data(tmp_path, val_fraction=0)) == [4, None, None]


def test_a_linked_split_is_read(tmp_path: Path) -> None:
    number = save_classes(tmp_path / "train", {"a": 3, "b": 3})
    save_classes(tmp_path / "val", {"a": 1, "b": 1}, number)
    (tmp_path / "test").symlink_to(tmp_path / "val")
    splits = load_data(tmp_path)
    assert sizes(splits) == [6, 2, 2]
    assert any("2 images of test are in val too" in note for note in splits.notes)


def test_folders_that_become_one_class_are_noted() -> None:
    files = ["caf\udce9/1.png", "caf\udcea/2.png", "dog/3.png", "dog /4.png", "cat/5.png"]
    assert set(classes(*files).values()) == {"caf\N{REPLACEMENT CHARACTER}", "dog", "cat"}
    told = [note for note in read(*files).notes if "were read as one class" in note]
    assert [note.partition(" were")[0] for note in told] == [
        r"the folders 'caf\udce9' and 'caf\udcea'",
        "the folders 'dog' and 'dog '",
    ]


def test_non_ascii_names_in_either_spelling(tmp_path: Path) -> None:
    number = save_classes(tmp_path / "train", {unicodedata.normalize("NFD", "café"): 2, "蝶": 2})
    save_classes(tmp_path / "test", {unicodedata.normalize("NFC", "café"): 1, "蝶": 1}, number)
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.labels == (unicodedata.normalize("NFC", "café"), "蝶")
    assert sizes(splits) == [4, None, 2]
    assert splits.test is not None
    assert splits.test.open(0).size == (20, 14)


def test_unseen_test_classes_are_dropped_and_counted(tmp_path: Path) -> None:
    number = save_classes(tmp_path / "train", {"a": 2, "b": 2})
    save_classes(tmp_path / "test", {"a": 1, "new": 3}, number)
    splits = load_data(tmp_path, val_fraction=0)
    assert splits.labels == ("a", "b")
    assert set(shown(splits.test).values()) == {"a"}
    assert any("3 test images were left out" in note and "new" in note for note in splits.notes)


def test_labels_of_a_task(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2})
    splits = load_data(tmp_path, labels=["c", "b", "a"], val_fraction=0)
    assert splits.labels == ("c", "b", "a")
    assert splits.train is not None
    assert splits.train.targets.tolist() == [2, 2, 1, 1]
    assert any("no image" in note and "c" in note for note in splits.notes)
    with pytest.raises(DataError, match=r"that the task does not have: b\. The task's labels are a, x"):
        load_data(tmp_path, labels=["a", "x"])


def test_duplicates_across_splits_are_noted(tmp_path: Path) -> None:
    number = save_classes(tmp_path / "train", {"a": 3, "b": 3})
    save_classes(tmp_path / "test", {"a": 2, "b": 2}, number)
    assert not any("too" in note for note in load_data(tmp_path).notes)
    (tmp_path / "test" / "a" / "copy.png").write_bytes((tmp_path / "train" / "a" / "0000.png").read_bytes())
    splits = load_data(tmp_path, val_fraction=0)
    assert any("1 image of test is in train too" in note and "copy.png" in note for note in splits.notes)
    assert splits.train is not None
    assert splits.test is not None
    copy = next(at for at in range(len(splits.test)) if "copy" in splits.test.where(at))
    assert splits.test.key(copy) == splits.train.key(0) != splits.train.key(1)
    unscreened = load_data(tmp_path, val_fraction=0, screen=False)
    assert unscreened.train is not None
    assert unscreened.train.key(0) == splits.train.key(0)


def test_copies_stay_on_one_side_of_the_cut(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 8, "b": 8})
    for number in range(8):
        (tmp_path / "a" / f"copy{number}.png").write_bytes((tmp_path / "a" / f"{number:04}.png").read_bytes())
    splits = load_data(tmp_path, val_fraction=0.4)
    assert splits.val is not None
    assert len(splits.val) > 4
    assert not any("too" in note for note in splits.notes)


def test_image_under_two_labels_is_noted(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "b" / "same.png").write_bytes((tmp_path / "a" / "0000.png").read_bytes())
    notes = load_data(tmp_path, val_fraction=0).notes
    assert f"1 image with two or more labels in train: {tmp_path}/a/0000.png." in notes


def test_labels_that_are_spelled_alike_are_noted(tmp_path: Path) -> None:
    save_classes(tmp_path, {"Ants": 3, "ants": 3, "bees": 3})
    assert [note for note in load_data(tmp_path, val_fraction=0).notes if "warning" in note] == [
        "warning: the labels 'Ants' and 'ants' differ in case or spaces only: if they mean one class, merge them."
    ]


def test_a_folder_above_the_classes_is_noted(tmp_path: Path) -> None:
    for name in ("pets", "rooms"):
        save_classes(tmp_path / "photos" / name, {"a": 2, "b": 2})
    save_classes(tmp_path / "photos" / "pets", {"c": 2, "d": 2, "e": 2}, 8)
    [note] = [note for note in load_data(tmp_path / "photos", val_fraction=0).notes if "warning" in note]
    assert "only further folders (pets/a, pets/b, pets/c, pets/d, pets/e and 2 more)" in note
    assert not any("warning" in note for note in load_data(tmp_path / "photos" / "pets", val_fraction=0).notes)


@pytest.mark.parametrize("inside", ["", "train"])
@pytest.mark.parametrize("packed", [False, True])
def test_places_with_class_folders_inside_are_recognised(tmp_path: Path, inside: str, packed: bool) -> None:
    for at, place in enumerate(("north", "south", "east")):
        save_classes(tmp_path / "set" / inside / place, {"cat": 2, "dog": 2, **({"owl": 1} if at else {})}, 9 * at)
    if inside:
        save_classes(tmp_path / "set" / "test" / "west", {"cat": 1, "dog": 1}, 40)
    place = tmp_path / "set"
    if packed:
        place = tmp_path / "set.zip"
        with zipfile.ZipFile(place, "w") as archive:
            for file in (tmp_path / "set").rglob("*.png"):
                archive.write(file, file.relative_to(tmp_path / "set"))
    outer = load_data(place, val_fraction=0)
    assert outer.labels == ("east", "north", "south")
    [note] = [note for note in outer.notes if "warning" in note and "folders" in note]
    assert "the folders east, north, south" in note
    assert "of the same names (cat, dog, owl)" in note
    assert "`class_folder=inner`" in note
    inner = load_data(place, val_fraction=0, class_folder="inner")
    assert inner.labels == ("cat", "dog", "owl")
    assert not any("warning" in note and "folders" in note for note in inner.notes)
    assert inner.train is not None
    assert inner.train.targets.bincount().tolist() == [6, 6, 2]
    assert (inner.test is not None) == bool(inside)


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_classes(tmp_path / "photos" / "pets", {"a": 2, "b": 2})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"'photos/pet': there is no such file or folder \(photos/ has pets\)"):
        load_data("photos/pet")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "contains no images"),
        (lambda root: save_classes(root, {"only": 3}), r"only one class was found \(only\)"),
        (lambda root: save_classes(root, {"": 3}), "no class folders"),
        (lambda root: (root / "a.txt").write_text("x"), "contains no images"),
    ],
)
def test_unusable_folder(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        load_data(tmp_path)


def test_what_is_no_set_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder; give a folder of class folders"):
        load_data(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no such file or folder"):
        load_data("photos")
    with pytest.raises(DataError, match="no such file or folder"):
        load_data("some/photos.zip")
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="is not a dataset"):
        load_data(tmp_path / "a.bin")
    with pytest.raises(DataError, match="int is not a dataset"):
        load_data(3)


def test_folder_for_another_kind(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(DataError, match="write a CSV"):
        load_data(tmp_path, kind="multilabel")


@pytest.mark.parametrize("wrapping", ["", "set/", "deep/er/"])
def test_zip_is_read_in_place(tmp_path: Path, wrapping: str) -> None:
    names = [f"{wrapping}{split}/{label}/{at}.png" for split in ("train", "test") for label in "ab" for at in range(2)]
    path = zipped(tmp_path / "set.zip", {**members(*names), "__MACOSX/._x.png": b"x", f"{wrapping}.DS_Store": b"x"})
    before = set(tmp_path.rglob("*"))
    splits = load_data(path, val_fraction=0)
    assert sizes(splits) == [4, None, 4]
    assert splits.train is not None
    assert splits.train.open(0).tobytes() == picture(0).tobytes()
    assert set(tmp_path.rglob("*")) == before


def test_zip_set_survives_pickling_while_open(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    train = load_data(path, val_fraction=0).train
    assert train is not None
    copy = pickle.loads(pickle.dumps(train))
    assert copy.read(1) == train.read(1) != train.read(0)


def test_zip_handle_of_another_process_is_not_used(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    train = load_data(path, val_fraction=0, screen=False).train
    assert train is not None
    expected = train.read(1)
    source = train.source
    assert isinstance(source, Zip)
    assert source._open is not None
    process, archive = source._open
    assert process == os.getpid()
    archive.close()  # useless now, as an inherited one is
    source._open = (process + 1, archive)
    assert train.read(1) == expected


def test_zip_names_in_utf8_without_the_flag(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("蝶/1.png", "b/2.png"))
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        while at >= 0:
            data[at + offset + 1] &= ~0x08  # the flag that says UTF-8
            at = data.find(signature, at + 1)
    path.write_bytes(data)
    assert load_data(path, val_fraction=0).labels == ("b", "蝶")


@pytest.mark.parametrize("name", ["../a/1.png", "a/../../1.png", "/etc/1.png", "C:/a/1.png", "..\\a\\1.png"])
def test_zip_with_a_path_that_leaves_is_refused(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png", name))
    with pytest.raises(DataError, match="leaves the folder"):
        load_data(path)


def test_zip_with_a_symlink_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    link = zipfile.ZipInfo("a/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="symbolic link"):
        load_data(path)


def test_zip_bomb_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/3.png", bytes(40 * 2**20))
    with pytest.raises(DataError, match="zip bomb"):
        load_data(path)


def test_member_that_lies_about_its_size_is_skipped(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members(*(f"{label}/{at}.png" for label in "ab" for at in range(15))))
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    data[at + 24 : at + 28] = (50).to_bytes(4, "little")
    path.write_bytes(data)
    splits = load_data(path, val_fraction=0)
    assert [Path(where).name for where, _ in splits.skipped] == ["0.png"]


def test_damaged_zip(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match="not a readable zip"):
        load_data(tmp_path / "set.zip")


def test_zip_that_vanished_names_the_member(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    train = load_data(path, val_fraction=0, screen=False).train
    path.unlink()
    assert train is not None
    with pytest.raises(ImageError, match=r"a/1\.png: cannot be unpacked"):
        train.read(0)


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", members("a/1.png", "b/2.png"))
    data = bytearray(path.read_bytes())
    data[data.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="without a password"):
        load_data(path)


def test_subset_keeps_images_and_targets_together(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 3, "b": 3})
    train = load_data(tmp_path, val_fraction=0).train
    assert train is not None
    part = train.subset([5, 0])
    assert part.targets.tolist() == [1, 0]
    assert part.read(0) == train.read(5) != train.read(0)
    assert part.key(1) == train.key(0)
    assert part.open(0).tobytes() == picture(5).tobytes()
    assert io.BytesIO(part.read(1)).getvalue() == to_bytes(picture(0))


def test_link_to_itself_or_to_nowhere_is_left_out_and_listed(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 20, "b": 20})
    (tmp_path / "a" / "loop.png").symlink_to("loop.png")
    (tmp_path / "b" / "gone.png").symlink_to("nowhere.png")
    splits = load_data(tmp_path, val_fraction=0)
    assert sizes(splits) == [40, None, None]
    assert {Path(where).name: reason for where, reason in splits.skipped} == {
        "loop.png": "Too many levels of symbolic links",
        "gone.png": "No such file or directory",
    }


def test_repr_is_short(tmp_path: Path) -> None:
    save_classes(tmp_path, {"a": 9, "b": 9})
    splits = load_data(tmp_path, val_fraction=0)
    assert f"train=ImageSet('{tmp_path.name}:train', 18 images, 2 labels)" in repr(splits)
