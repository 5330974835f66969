"""Odd and broken image files, made here byte by byte, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from image_files import picture, png_header, save_classes, to_bytes
from PIL import Image

from memoro.data import load_data
from memoro.data.screening import drop_unreadable
from memoro.errors import DataError
from memoro.images import find_images, open_image


def with_one(tmp_path: Path, data: bytes, suffix: str) -> Path:
    """A set of 40 good images and this one (2.4 %)."""
    save_classes(tmp_path / "set", {"a": 20, "b": 20})
    (tmp_path / "set" / "a" / f"odd{suffix}").write_bytes(data)
    return tmp_path / "set"


def opened(folder: Path) -> Image.Image:
    splits = load_data(folder, val_fraction=0)
    assert splits.train is not None
    assert splits.skipped == ()
    at = next(at for at in range(len(splits.train)) if "odd" in splits.train.where(at))
    return splits.train.open(at)


BROKEN = {
    "corrupt": (b"\xff\xd8\xff\xe0" + b"no jpeg at all" * 9, ".jpg"),
    "text": (b"<html>404 not found</html>", ".jpg"),
    "truncated": (to_bytes(picture(1, (90, 70)), ".jpg")[:900], ".jpg"),
    "truncated png": (to_bytes(picture(1, (90, 70)))[:-4000], ".png"),
    "zero bytes": (b"", ".png"),
    "bomb": (png_header(100_000, 100_000), ".png"),
    "smaller bomb": (png_header(13_000, 13_900), ".png"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_skipped_and_listed(tmp_path: Path, name: str) -> None:
    folder = with_one(tmp_path, *BROKEN[name])
    splits = load_data(folder, val_fraction=0)
    assert splits.train is not None
    assert len(splits.train) == 40
    [(where, reason)] = splits.skipped
    assert Path(where).stem == "odd"
    assert reason
    assert where not in reason
    assert any("1 unreadable" in note for note in splits.notes)


def test_more_than_five_per_cent_stops(tmp_path: Path) -> None:
    folder = with_one(tmp_path, b"junk", ".png")
    (folder / "b" / "odd2.png").write_bytes(b"")
    load_data(folder)  # 2 of 42
    (folder / "b" / "odd3.png").write_bytes(b"more junk")
    with pytest.raises(DataError, match=r"3 of 43 images cannot be read.*odd.*; .*odd.*; .*odd"):
        load_data(folder)


def test_images_are_checked_alike_with_and_without_workers(tmp_path: Path) -> None:
    folder = with_one(tmp_path, b"junk", ".png")
    splits = load_data(folder, val_fraction=0, screen=False)
    assert splits.train is not None
    assert len(splits.train) == 41
    assert any("not screened" in note for note in splits.notes)
    here, there = (drop_unreadable([splits.train], workers, quiet=True)[0] for workers in (0, 2))
    [found] = here.skipped
    assert found.where.endswith("odd.png")
    assert there.skipped == here.skipped
    assert len(there) == len(here) == 40


def test_animated_gif_gives_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    folder = with_one(tmp_path, to_bytes(frames[0], ".gif", save_all=True, append_images=frames[1:]), ".gif")
    assert opened(folder).getpixel((0, 0)) == (255, 0, 0)


def test_cmyk_jpeg_becomes_rgb(tmp_path: Path) -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixel = opened(with_one(tmp_path, to_bytes(image, ".jpg", quality=95), ".jpg")).getpixel((8, 8))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 200
    assert max(pixel[1:]) < 60


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.full((6, 8), 0x4000, dtype=np.uint16)
    values[:, 4:] = 0xFFFF
    image = opened(with_one(tmp_path, to_bytes(Image.fromarray(values)), ".png"))
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == (64, 64, 64)
    assert image.getpixel((7, 0)) == (255, 255, 255)


def test_every_sixteen_bit_value_is_rounded_to_the_nearest_byte() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = np.asarray(open_image(Image.fromarray(values)))[..., 0]
    assert (found == np.round(values.astype(np.float64) / 257)).all()
    floats = np.array([[-3e38, -1.0, 0.0], [0.25, 0.5, 1.0]], dtype=np.float32)
    assert np.asarray(open_image(Image.fromarray(floats)))[..., 0].tolist() == [[0, 0, 0], [64, 128, 255]]


@pytest.mark.parametrize("top", [255, 256])
def test_dark_sixteen_bit_images_have_the_scale_of_bright_ones(tmp_path: Path, top: int) -> None:
    image = Image.fromarray(np.full((6, 8), top, dtype=np.uint16))
    image.save(tmp_path / "a.tif")
    for source in (image, to_bytes(image), tmp_path / "a.tif"):
        assert open_image(source).getpixel((0, 0)) == (1, 1, 1)


def test_transparent_palette_is_put_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 6), 1)
    image.putpalette([0, 0, 0, 0, 200, 0])
    image.putpixel((0, 0), 0)
    opened_image = opened(with_one(tmp_path, to_bytes(image, transparency=0), ".png"))
    assert opened_image.getpixel((0, 0)) == (255, 255, 255)
    assert opened_image.getpixel((3, 3)) == (0, 200, 0)


def test_rotated_jpeg_comes_out_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 16), "black")
    image.paste("white", (0, 0, 16, 16))  # the left half, which orientation 6 turns to the top
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = opened(with_one(tmp_path, to_bytes(image, ".jpg", exif=exif), ".jpg"))
    assert upright.size == (16, 32)
    assert upright.getpixel((8, 4)) == (255, 255, 255)
    assert upright.getpixel((8, 28)) == (0, 0, 0)


def test_images_are_recognised_by_their_first_bytes(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        for number, form in enumerate(("JPEG", "AVIF", "HEIF")):
            place = tmp_path / "set" / label / f"{number}"
            place.parent.mkdir(parents=True, exist_ok=True)
            pillow_heif.register_heif_opener()  # to save: memoro opens these without
            picture(number + 3 * (label == "dog"), (36, 24)).save(place, form)
        (tmp_path / "set" / label / "notes.txt").write_text("not one")
    splits = load_data(tmp_path / "set", val_fraction=0)
    assert splits.train is not None
    assert len(splits.train) == 6
    assert any("files that are not images were left out: 2 .txt" in note for note in splits.notes)


def test_a_task_file_among_the_images_is_named(tmp_path: Path) -> None:
    (tmp_path / "pets.safetensors").touch()
    with pytest.raises(DataError, match="is a task file, not an image: pass each"):
        list(find_images([tmp_path / "pets.safetensors"]))
