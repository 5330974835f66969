"""Near-duplicates of one set: frames of a film belong together, on one side of every split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet, load_data
from memoro.data.screening import near_groups
from memoro.data.splits import fold_numbers


def save_film(folder: Path, number: int, frames: int) -> None:
    """Frames of a film: the camera moves on by a pixel a frame, so only those close to each other look the same."""
    coarse = np.random.default_rng(number).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    scene = Image.fromarray(coarse).resize((240, 120), Image.Resampling.BICUBIC)
    folder.mkdir(parents=True, exist_ok=True)
    for frame in range(frames):
        scene.crop((frame, 0, 160 + frame, 120)).save(folder / f"{number:02}-{frame:02}.png")


def load(folder: Path) -> ImageSet:
    images = load_data(folder, val_fraction=0, workers=0, quiet=True).train
    assert images is not None
    return images


def film(images: ImageSet, index: int) -> str:
    return Path(images.where(index)).stem[:2]


@pytest.fixture
def films(tmp_path: Path) -> Path:
    for number in range(12):
        save_film(tmp_path / "films" / "ab"[number % 2], number, frames=(12, 5, 1)[number % 3])
    return tmp_path / "films"


def test_frames_of_a_film_are_one_group(films: Path) -> None:
    images = load(films)
    found = near_groups(images)
    names = [film(images, at) for at in range(len(images))]
    assert found.numbers.shape == (72,)
    assert len(set(found.numbers.tolist())) == len(set(zip(names, found.numbers.tolist(), strict=True))) == 12
    assert found.near == 68  # the others are films of one frame
    assert found.alike == ()
    assert "68 training images are near-duplicates" in found.notes[0]


def test_unlike_images_are_alone_and_copies_are_not(tmp_path: Path) -> None:
    for number in range(10):
        save_film(tmp_path / "set" / "ab"[number % 2], number, frames=1)
    (tmp_path / "set" / "a" / "copy.png").write_bytes((tmp_path / "set" / "a" / "00-00.png").read_bytes())
    images = load(tmp_path / "set")
    found = near_groups(images)
    assert len(set(found.numbers.tolist())) == 10
    assert found.notes == []
    unscreened = load_data(tmp_path / "set", val_fraction=0, screen=False, quiet=True).train
    assert unscreened is not None
    assert near_groups(unscreened).numbers.tolist() == list(range(11))


def test_a_class_that_is_one_film_is_not_a_group(films: Path) -> None:
    save_film(films / "c", 20, frames=10)
    save_film(films / "c", 21, frames=1)
    images = load(films)
    found = near_groups(images)
    assert found.alike == ("c",)
    of_c = found.numbers[images.targets.numpy() == 2]
    assert len(set(of_c.tolist())) == 11
    assert found.near == 68
    assert "warning: most images of c look the same" in found.notes[1]


def test_classes_that_differ_by_a_detail_are_not_joined(tmp_path: Path) -> None:
    save_film(tmp_path / "set" / "good", 0, frames=4)
    save_film(tmp_path / "set" / "bad", 0, frames=4)
    for path in (tmp_path / "set" / "bad").iterdir():
        image = Image.open(path)
        image.paste("red", (70, 50, 76, 56))
        image.save(path)
    for number in range(1, 4):
        save_film(tmp_path / "set" / "good", number, frames=1)
        save_film(tmp_path / "set" / "bad", number + 10, frames=1)
    images = load(tmp_path / "set")
    found = near_groups(images)
    assert found.near == 8
    assert len(set(found.numbers.tolist())) == 8
    assert len(set(zip(found.numbers.tolist(), images.targets.tolist(), strict=True))) == 8


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_film_is_on_one_side_of_a_split(films: Path, seed: int) -> None:
    splits = load_data(films, val_fraction=0.15, seed=seed, workers=0, quiet=True)
    assert splits.train is not None
    assert splits.val is not None
    sides = [{film(images, at) for at in range(len(images))} for images in (splits.train, splits.val)]
    assert not sides[0] & sides[1]
    assert set(splits.val.targets.tolist()) == {0, 1}
    assert 0.08 <= len(splits.val) / 72 <= 0.25
    assert any("held out together" in note for note in splits.notes)
    plain = load_data(films, val_fraction=0.15, seed=seed, workers=0, quiet=True, screen=False)
    assert plain.val is not None
    assert not any("held out together" in note for note in plain.notes)


def test_a_film_is_in_one_fold(films: Path) -> None:
    images = load(films)
    number = fold_numbers(images, 4, 0)
    assert len({(film(images, at), fold) for at, fold in enumerate(number.tolist())}) == 12
    assert set(number.tolist()) == {0, 1, 2, 3}
    for label in (0, 1):  # 12, 12, 5, 5, 1 and 1 frames
        assert sorted(np.bincount(number[images.targets.numpy() == label], minlength=4).tolist()) == [6, 6, 12, 12]


def test_a_training_says_that_films_stay_together(films: Path, backbone: Backbone) -> None:
    how: dict[str, Any] = {"backbone": backbone, "epochs": 1, "workers": 0, "quiet": True}
    result = memoro.train(films, lr=(0.001, 0.01), **how)
    assert result.metrics["split"] == "4 folds"
    assert any("68 training images are near-duplicates" in note for note in result.notes)
