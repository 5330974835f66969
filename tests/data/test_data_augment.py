"""Augmentation: pure, within its bounds, and at the right size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import picture, to_bytes
from PIL import Image

from memoro.data import Augment
from memoro.errors import DataError
from memoro.images import Preprocessing, open_image
from memoro.images.augment import Crop, Purpose, View, order, uniform

WIDE = Preprocessing(resize=26, crop=(22, 18))
IMAGE = picture(0, (61, 47))
CROPS: tuple[Crop, ...] = ("inception", "pad", "none")


def seen(augment: Augment, seed: int = 1, epoch: int = 2, sample: int = 3) -> bytes:
    return View(augment, seed, epoch, sample).apply(IMAGE, WIDE).tobytes()


@pytest.mark.parametrize("crop", CROPS)
def test_view_has_the_input_size(crop: Crop) -> None:
    assert View(Augment(crop), 0, 0, 0).apply(IMAGE, WIDE).size == (18, 22)


@pytest.mark.parametrize("crop", ["inception", "pad"])
def test_view_depends_on_its_address_alone(crop: Crop) -> None:
    augment = Augment(crop, flip=0)
    first = seen(augment)
    seen(augment, sample=99)
    np.random.default_rng().random()
    assert seen(replace(augment)) == first
    for other in ({"seed": 5}, {"epoch": 5}, {"sample": 5}):
        assert seen(augment, **other) != first


def test_no_crop_and_no_flip_is_evaluation() -> None:
    assert seen(Augment("none", flip=0)) == WIDE.fit(IMAGE).tobytes()
    mirrored = WIDE.fit(IMAGE).transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    assert seen(Augment("none", flip=1)) == mirrored != WIDE.fit(IMAGE).tobytes()
    assert {seen(Augment("none"), sample=at) for at in range(20)} == {mirrored, WIDE.fit(IMAGE).tobytes()}


def test_pad_shifts_by_whole_pixels_over_black() -> None:
    fitted = np.asarray(WIDE.fit(IMAGE))
    black = np.pad(fitted, ((3, 3), (2, 2), (0, 0)))  # an eighth of 22 and of 18
    windows = {black[y : y + 22, x : x + 18].tobytes(): (y, x) for y in range(7) for x in range(5)}
    found = {windows[seen(Augment("pad", flip=0), sample=at)] for at in range(200)}
    assert {y for y, _ in found} == set(range(7))
    assert {x for _, x in found} == set(range(5))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**31))
def test_inception_box_lies_inside_and_keeps_its_promises(width: int, height: int, sample: int) -> None:
    left, top, right, bottom = View(Augment(), 0, 0, sample).box((width, height))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    area, ratio = (right - left) * (bottom - top) / (width * height), (right - left) / (bottom - top)
    assert area <= 1 + 1e-9
    if 3 / 4 <= width / height <= 4 / 3:  # else the centre of a strip may be smaller
        assert area >= 0.08 - 1e-9
        assert 3 / 4 - 1e-6 <= ratio <= 4 / 3 + 1e-6  # rounding of the box's corners


def test_inception_crops_vary_over_the_whole_range() -> None:
    areas = []
    for sample in range(500):
        left, top, right, bottom = View(Augment(), 0, 0, sample).box((100, 100))
        areas.append((right - left) * (bottom - top) / 10_000)
    assert min(areas) < 0.12
    assert max(areas) > 0.9


@pytest.mark.parametrize("crop", [(22, 18), (12, 40)])
def test_smaller_decode_shows_the_same_part(crop: tuple[int, int]) -> None:
    spec = replace(WIDE, crop=crop)
    photo = Image.linear_gradient("L").resize((1600, 1200)).convert("RGB")
    data = to_bytes(photo, ".jpg", quality=95)
    for sample in range(10):
        view = View(Augment(), 0, 0, sample)
        small = open_image(data, draft=partial(view.edge, spec))
        assert small.size < photo.size
        left, top, right, bottom = view.box(small.size)
        assert right - left >= 2 * crop[1] - 1
        assert bottom - top >= 2 * crop[0] - 1
        views = [np.asarray(view.apply(image, spec), dtype=int) for image in (small, open_image(data))]
        assert abs(views[0] - views[1]).max() <= 3  # JPEG's own scaling rounds


def test_edge_knows_that_an_image_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    sizes = []
    open_image(to_bytes(picture(0, (40, 24)), ".jpg", exif=exif), draft=lambda size: sizes.append(size) or 24)
    assert sizes == [(24, 40)]


@pytest.mark.parametrize(
    "fields",
    [
        {"crop": "random"},
        {"scale": (0.0, 1.0)},
        {"scale": (0.5, 0.2)},
        {"ratio": (2.0, 1.0)},
        {"flip": 1.5},
        {"padding": 1},
    ],
)
def test_senseless_augmentation(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        Augment(**fields)


def test_no_fixed_size() -> None:
    with pytest.raises(DataError, match=r"preprocessing\.at"):
        View(Augment(), 0, 0, 0).apply(IMAGE, Preprocessing(resize=20))


def test_draws_are_pinned() -> None:
    """A change here changes every run that anybody might want to repeat."""
    assert order(6, 1, Purpose.ORDER, epoch=2).tolist() == [1, 4, 3, 0, 2, 5]
    assert uniform(2, 1, Purpose.AUGMENT, 2, 3).round(6).tolist() == [0.723174, 0.483298]
