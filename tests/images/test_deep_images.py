"""Images of more than 8 bits: one scale for a data set, which its tasks keep."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import close
from PIL import Image
from serving import serving

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet, load_data
from memoro.engine.verify import sample_pixels
from memoro.errors import ImageError, TaskFileError
from memoro.images import Preprocessing, open_image

SIZE = (18, 24)
KINDS: dict[str, tuple[Any, str, float, float]] = {
    "12 bits in 16": (np.uint16, ".png", 4000, 4095),
    "16 bits": (np.uint16, ".tif", 60_000, 65_535),
    "32 bits": (np.int32, ".tif", 1_000_000, 2**20 - 1),
    "floats to 256": (np.float32, ".tif", 256, 256),
    "floats to 1.25": (np.float32, ".tif", 1.25, 1.25),
    "dark floats": (np.float32, ".tif", 0.5, 1),
}
"""By what they contain: the type, how they are saved, the brightest pixel of the set, and what becomes white."""


def save_deep(path: Path, kind: str, level: float, top: float) -> np.ndarray[Any, Any]:
    """An image of noise around a share of the set's brightest pixel, with one pixel at the share `top`."""
    dtype, _, highest, _ = KINDS[kind]
    values = np.random.default_rng(len(path.name) + ord(path.stem[-1])).uniform(0.6, 1.0, SIZE) * level * highest
    values[0, 0], values[5, 5] = top * highest, 0.2 * highest
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(dtype)).save(path)
    return values


def save_set(root: Path, kind: str, each: int = 6, scale: float = 1.0) -> Path:
    """Dark and bright images; of each, one has the brightest pixel of the set."""
    suffix = KINDS[kind][1]
    for label, level in (("bright", 0.8), ("dark", 0.2)):
        for number in range(each):
            top = 1.0 if number == 0 else level
            save_deep(root / label / f"{number}{suffix}", kind, level * scale, top * scale)
    return root


def load(folder: Path) -> ImageSet:
    images = load_data(folder, val_fraction=0, workers=0, quiet=True).train
    assert images is not None
    return images


def train(folder: Path, backbone: Backbone, **more: Any) -> Any:
    how: dict[str, Any] = {"regime": "head", "lr": 0.05, "epochs": 2, "workers": 0, "quiet": True}
    return memoro.train(folder, backbone=backbone, **{**how, **more})


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_are_equally_bright_in_all_images(tmp_path: Path, kind: str) -> None:
    images = load(save_set(tmp_path / "set", kind))
    _, _, highest, white = KINDS[kind]
    value = np.array(0.2 * highest).astype(KINDS[kind][0])
    shown = [images.open(at).getpixel((5, 5)) for at in range(len(images))]
    assert shown == [(round(255 * float(value) / white),) * 3] * 12
    assert len(np.unique(np.asarray(images.open(0)))) > 17


def test_one_brighter_pixel_changes_nothing_else(tmp_path: Path) -> None:
    for top, name in ((255, "a"), (256, "b")):
        values = np.full(SIZE, 100, np.float32)
        values[0, 0] = top
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.fromarray(values).save(tmp_path / "set" / name / "1.tif")
    images = load(tmp_path / "set")
    assert [images.open(at).getpixel((9, 9)) for at in (0, 1)] == [(100,) * 3] * 2


@pytest.mark.parametrize("kind", ["12 bits in 16", "floats to 256"])
def test_a_task_keeps_the_scale_of_its_images(tmp_path: Path, backbone: Backbone, kind: str) -> None:
    folder, white = save_set(tmp_path / "set", kind), KINDS[kind][3]
    result = train(folder, backbone, out=tmp_path / "task.safetensors")
    assert any(f"{white:,.6g} as white" in note for note in result.notes)
    task = memoro.load_task(tmp_path / "task.safetensors")
    steps = task.spec.preprocessing
    assert steps is not None
    assert steps.white == white
    assert task.content_hash() == result.task.content_hash()
    task.update_spec(preprocessing=Preprocessing(**{**vars(steps), "white": None}))
    assert task.content_hash() != result.task.content_hash()

    # A dark image without a bright pixel: alone, it would not tell its scale.
    path = folder / "dark" / f"3{KINDS[kind][1]}"
    with Image.open(path) as image:
        values = np.asarray(image).astype(np.float64)
    pixels = steps.to_tensor(Image.fromarray(np.rint(values / white * 255).astype(np.uint8)).convert("RGB"))
    task = memoro.load_task(tmp_path / "task.safetensors")
    model = memoro.compose(backbone, [task])
    [logits] = model(pixels[None])[task.name].softmax(-1)
    asked: list[Any] = [path, path.read_bytes(), Image.open(path)]
    for answer in model.predict(asked):
        found = answer[task.name]["probabilities"]
        assert [found[label] for label in task.labels] == pytest.approx(logits.tolist(), abs=0.05)
    assert len({str(answer) for answer in model.predict(asked)}) == 1
    maps = model.explain([path], task.name)
    assert np.asarray(maps.images[0]).mean() == pytest.approx(0.2 * 0.8 * 255, abs=12)
    assert sample_pixels(backbone, [path], [task]).equal(pixels[None])
    with serving(backbone, tmp_path / "task.safetensors") as server:
        client = memoro.Client(server.url)
        assert close(client.predict(asked), model.predict(asked))


def test_tasks_of_other_images_have_no_scale(tmp_path: Path, backbone: Backbone) -> None:
    for number in range(8):
        folder = tmp_path / "set" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    spec = train(tmp_path / "set", backbone).task.spec
    assert spec.preprocessing.white is None
    assert "white" not in spec.preprocessing.to_json()


def test_brighter_images_than_those_of_the_training_are_told(tmp_path: Path, backbone: Backbone) -> None:
    kind, told = "floats to 256", list[str]()
    task = train(save_set(tmp_path / "set", kind), backbone).task
    other = save_set(tmp_path / "other", kind, scale=4)
    memoro.evaluate(backbone, task, other, workers=0, log=told.append)
    assert any("256 is white in the training images of set" in text for text in told)
    result = train(other, backbone, start_from=task, regime=None, log=told.append)
    assert any("brighter pixels become white. Train a new task" in text for text in told)
    assert result.task.spec.preprocessing.white == 256
    told.clear()
    memoro.evaluate(backbone, task, tmp_path / "set", workers=0, log=told.append)
    assert not any("brighter" in text for text in told)


def test_an_image_alone_does_not_tell_its_scale() -> None:
    floats = Image.fromarray(np.full(SIZE, 0.5, np.float32))
    assert open_image(floats).getpixel((0, 0)) == (128, 128, 128)
    floats.putpixel((3, 3), 1.2)
    with pytest.raises(ImageError, match=r"brightest pixel is 1\.2, more than 1.*Train a task on them"):
        open_image(floats)
    assert open_image(floats, white=2.0).getpixel((0, 0)) == (64, 64, 64)
    buffer = io.BytesIO()
    Image.fromarray(np.full(SIZE, 70_000, np.int32)).save(buffer, "TIFF")
    with pytest.raises(ImageError, match="70,000, more than 65,535"):
        open_image(buffer.getvalue())


@pytest.mark.parametrize("white", [0, 0.5, -1, float("inf"), "255", True, [1]])
def test_a_file_with_an_unusable_scale_is_refused(white: Any) -> None:
    record = {**Preprocessing().to_json(), "white": white}
    with pytest.raises(TaskFileError, match="white is not a"):
        Preprocessing.from_json(record)
    assert Preprocessing.from_json({**record, "white": 4095}).to_json()["white"] == 4095
