"""Image files that are not what they are called, and damaged ones: refused, never handed to other programs."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import picture, save_classes, to_bytes
from PIL import EpsImagePlugin, Image

import memoro
from memoro.data import load_data
from memoro.errors import DataError, ImageError, TaskFileError
from memoro.images import Preprocessing, open_image


def saved(form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture(3).save(file, form, **options)
    return file.getvalue()


XBM = b"#define im_width 8\n#define im_height 2\nstatic char im_bits[] = {\n0x0f, 0xf0 };\n"
DISGUISED = {
    "eps": saved("EPS"),
    "xbm": XBM,
    "pcx": saved("PCX"),
    "sgi": saved("SGI"),
    "pdf": saved("PDF"),
    "tga": saved("TGA"),
    "jpeg2000": saved("JPEG2000"),
    "ico": saved("ICO"),
    "qoi": saved("QOI"),
}


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in Ghostscript's place. Returns the file that it writes when somebody runs it."""
    program, trace = tmp_path / "bin" / "gs", tmp_path / "was-run"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{trace}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return trace


def test_eps_is_never_given_to_ghostscript(tmp_path: Path, ghostscript: Path) -> None:
    save_classes(tmp_path / "set", {"a": 20, "b": 20})
    (tmp_path / "set" / "a" / "odd.jpg").write_bytes(DISGUISED["eps"])
    [(where, reason)] = load_data(tmp_path / "set").skipped
    assert Path(where).name == "odd.jpg"
    assert "no known format" in reason
    with pytest.raises(ImageError, match="not a readable image"):
        open_image(tmp_path / "set" / "a" / "odd.jpg")
    assert not ghostscript.exists()
    with pytest.raises(OSError, match=r".*"):
        Image.open(io.BytesIO(DISGUISED["eps"])).load()
    assert ghostscript.exists()  # the trap works: Pillow alone runs the program


@pytest.mark.parametrize("form", DISGUISED)
def test_disguised_format_is_refused(form: str) -> None:
    with pytest.raises(ImageError, match="not a readable image"):
        open_image(DISGUISED[form])


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_pixels_as_text_are_refused_before_they_are_parsed(kind: int) -> None:
    with pytest.raises(ImageError, match="convert it to PNG"):
        open_image(f"P{kind}\n2 1\n255\n{'0 ' * 6}".encode())


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM", "MPO"])
def test_raster_format_is_opened_whatever_its_name(form: str, tmp_path: Path) -> None:
    options = {"save_all": True, "append_images": [picture(4)]} if form == "MPO" else {}
    (tmp_path / "photo.png").write_bytes(saved(form, **options))
    image = open_image(tmp_path / "photo.png")
    assert image.mode == "RGB"
    assert image.size == (20, 14)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM"])
def test_mutated_files_give_an_image_or_an_image_error(form: str) -> None:
    """120 files for each format, seeded: bytes overwritten, cut off or repeated."""
    generator = np.random.default_rng(list(form.encode()))
    whole = saved(form)
    outcomes = set()
    for _ in range(120):
        data = bytearray(whole)
        for at in generator.integers(0, len(data), generator.integers(1, 9)):
            data[at] = generator.integers(0, 256)
        if generator.random() < 0.3:
            data = data[: generator.integers(0, len(data))]
        elif generator.random() < 0.2:
            data += data[generator.integers(0, len(data)) :]
        try:
            outcomes.add(open_image(bytes(data), draft=8).mode)
        except ImageError:
            outcomes.add("refused")
    assert outcomes <= {"RGB", "refused"}
    assert "refused" in outcomes


def test_opening_leaves_the_warnings_of_other_threads_alone() -> None:
    seen = []
    open_image(to_bytes(picture(0), ".jpg"), draft=lambda size: seen.append(warnings.filters) or 8)
    assert seen[0] is warnings.filters


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 1e300},
        {"scale": -1e39},
        {"scale": 10**400},
        {"mean": [0.5, 1e39, 0.5]},
        {"std": [0.5, 0.5, 1e-46]},
        {"std": [0.0, 0.5, 0.5]},
        {"std": [0.5, 1e-30, 0.5]},
        {"scale": 1e30},
        {"mean": [-1e5, 0.5, 0.5]},
        {"scale": 1e38, "mean": [-3e38] * 3},
    ],
)
def test_preprocessing_that_overflows_is_refused(change: dict[str, object]) -> None:
    record = Preprocessing().to_json()
    assert memoro.Preprocessing.from_json(record) == Preprocessing()
    with pytest.raises(TaskFileError, match="finite"):
        memoro.Preprocessing.from_json({**record, **change})


@pytest.mark.parametrize("change", [{"scale": 1e30}, {"std": (0.0, 0.5, 0.5)}, {"mean": (float("nan"), 0.0, 0.0)}])
def test_unusable_arguments_of_preprocessing_are_memoros_own_errors(change: dict[str, Any]) -> None:
    raw = Preprocessing(scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert raw.normalise(np.full((1, 1, 3), 255, np.uint8)).max() == 255
    with pytest.raises(DataError, match=r"finite pixels of at most 10,000|mean is not a finite number"):
        Preprocessing(**change)


@pytest.mark.parametrize("side", [0, -3, 99_999])
def test_impossible_image_size_is_memoros_own_error(side: int) -> None:
    with pytest.raises(DataError, match=f"image size {side}: choose 1 to 2048 pixels"):
        Preprocessing().at(side)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(ImageError, match=r"pipe\.jpg: not a file"):
        open_image(tmp_path / "pipe.jpg")


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(ImageError, match="empty"):
        open_image(Image.new("RGB", (0, 0)))
