"""What `model.predict` takes in Python: folders, arrays, tensors, bytes, open files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from PIL import Image
from prediction_inputs import encoded, picture

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, ImageError
from memoro.images import Decoder, Preprocessing, open_image, opening


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": -1}, {"top": 0}, {"top": -1}])
def test_numbers_that_make_no_sense_are_told(backbone: Backbone, wrong: dict[str, int]) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    with pytest.raises(CompositionError, match="must be at least 1, not"):
        model.predict(picture(0), **wrong)  # type: ignore[arg-type]


def test_python_predicts_folders_arrays_tensors_and_bytes(backbone: Backbone, tmp_path: Path) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    images = [picture(seed) for seed in range(3)]
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for image, name in zip(images, ("1.png", "2.png", "more/3"), strict=True):
        image.save(tmp_path / "photos" / name, "PNG")
    arrays = np.stack([np.asarray(image) for image in images])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    expected = model.predict(images)
    assert len({str(answer) for answer in expected}) == 3
    for given in (
        tmp_path / "photos",
        str(tmp_path / "photos"),
        [tmp_path / "photos" / "1.png", tmp_path / "photos" / "2.png", tmp_path / "photos" / "more"],
        arrays,
        list(arrays),
        arrays / 255,
        np.moveaxis(arrays, -1, 1),
        tensors,
        list(tensors),
        tensors / 255,
        [encoded(image, "PNG") for image in images],
        [images[0], arrays[1], encoded(images[2], "PNG")],
        [bytearray(encoded(image, "PNG")) for image in images],
        [io.BytesIO(encoded(image, "PNG")) for image in images],
    ):
        assert model.predict(given) == expected
    [one] = model.predict([images[1]])
    assert model.predict(encoded(images[1], "PNG")) == model.predict(tensors[1]) == model.predict(arrays[1]) == [one]
    with open(tmp_path / "photos" / "2.png", "rb") as file:
        assert model.predict(file) == model.predict([file]) == [one]
        assert torch.equal(model.explain(file, "pets").patches, model.explain(images[1], "pets").patches)
        assert open_image(file).size == images[1].size
    with open(tmp_path / "photos" / "2.png") as file, pytest.raises(ImageError, match="open it with mode 'rb'"):
        model.predict(file)
    written = io.BytesIO()
    images[1].save(written, "PNG")  # and is at its end
    assert model.predict(written) == model.predict(bytearray(written.getvalue())) == [one]
    rows = list(model.predict_stream(tmp_path / "photos"))
    assert [Path(row.image).name for row in rows] == ["1.png", "2.png", "3"]
    grey = np.asarray(images[0].convert("L"))
    assert model.predict([grey, grey[..., None], grey > 300]) == model.predict(
        [images[0].convert("L"), images[0].convert("L"), Image.new("RGB", images[0].size)]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.randn(3, 20, 20), r"image 0: an array of floats must be from 0 to 1.*call model\(pixels\)"),
        (np.full((20, 20, 3), np.nan), "from nan to nan"),
        (np.zeros((20, 20, 3), dtype=np.int64), "an array of int64 is not an image: give uint8, or floats"),
        (np.zeros((20, 20, 5), dtype=np.uint8), r"an array of shape \(20, 20, 5\) is not an image"),
        (np.zeros((0, 20, 3), dtype=np.uint8), r"shape \(0, 20, 3\) is not an image"),
        (b"", "image 0: the file is empty"),
        ([0], "image 0: not a readable image"),
    ],
)
def test_what_is_no_image_is_told(backbone: Backbone, given: Any, message: str) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    with pytest.raises(ImageError, match=message):
        model.predict(given)
    [row] = model.predict_stream(given)
    assert row.answers == {}
    assert row.error is not None
    with pytest.raises(CompositionError, match="no task 'two'"):
        model.predict_stream(given, ["two"])


@pytest.mark.parametrize(("form", "decodes"), [("JPEG", 3), ("PNG", 1)])
def test_pixels_do_not_depend_on_the_image_sizes_of_other_tasks(
    monkeypatch: pytest.MonkeyPatch, form: str, decodes: int
) -> None:
    """A JPEG is decoded at the fractions that each size takes alone, once each."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    photo = [("photo", encoded(noise, form))]
    sizes = [Preprocessing(resize=edge) for edge in (20, 60, 21, None)]  # 1/4, 1/2, 1/4, whole
    sizes.append(Preprocessing(resize=20, white=4095.0))  # for images of more bits only
    alone = [Decoder((size,))(photo).images[0] for size in sizes]
    opened, upright = list[Image.Image](), opening._upright_rgb
    monkeypatch.setattr(opening, "_upright_rgb", lambda image, white: opened.append(image) or upright(image, white))
    together = Decoder(tuple(sizes))(photo).images
    assert all(torch.equal(one, other) for [one], [other] in zip(alone, together, strict=True))
    assert len(opened) == decodes
