"""Untrusted image files become upright RGB images, or a clear error."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from memoro.errors import ImageError
from memoro.images.finding import HEAD_BYTES, is_heif

# 3 bytes a pixel: no single image may decode to more than about 510 MB. Pillow's own limit is a little above it.
# 16-bit, integer and float images take about three times as much while they are scaled to bytes.
MAX_PIXELS = 170_000_000

# The shortest edge that a caller needs, as a number or as a function of the upright (width, height).
Draft = int | Callable[[tuple[int, int]], int] | None

White = float | Callable[["Levels"], float] | None
"""The value of a pixel of more than 8 bits that becomes white, as a number or as a function of the image's values."""

Picture = str | Path | bytes | bytearray | io.IOBase | Image.Image | npt.NDArray[Any] | Tensor
"""A path, an encoded image or an open file of one, or a decoded image: see `open_image`."""
PICTURE_TYPES = (str, Path, bytes, bytearray, io.IOBase, Image.Image, np.ndarray, Tensor)

# Raster formats only, whatever the file is called: EPS would be handed to Ghostscript, and TGA has no magic number.
# JPEG includes files of several pictures (MPO), which phones write. HEIF has a plugin of its own.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM")


def open_image(
    source: Picture,
    *,
    draft: Draft = None,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    opened: dict[Any, Image.Image] | None = None,
    white: White = None,
) -> Image.Image:
    """The image of a path, of encoded bytes, of an open file, of a PIL image or of an array as upright RGB, its first
    frame if it is animated.

    An array is (height, width) or (height, width, channels), a tensor (channels, height, width), of bytes or of floats
    from 0 to 1. `draft` is the shortest edge that the caller needs: big JPEGs are then decoded at a fraction of their
    size. Errors call the image by its `name`. A file of more than `max_pixels` is refused before it is decoded.
    `opened` holds what was decoded of this image, by size: another draft is decoded only if it has another size.
    `white` is the value that becomes white in an image of more than 8 bits (of integers or floats), and black is 0. A
    data set has one such value, a task keeps it. Without one, white is 65,535 for integers and 1 for floats, and a
    brighter image is refused: an image alone does not show its scale.
    """
    opened = {} if opened is None else opened
    name = name or (str(source) if isinstance(source, (str, Path)) else "image")
    try:
        if isinstance(source, Image.Image):
            if not all(source.size):
                raise ImageError("the image is empty (0 pixels).")
            return _decode(source, opened, white)
        if isinstance(source, (np.ndarray, Tensor)):
            return _decode(_from_array(source), opened, white)
        with _open_encoded(source) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ImageError(
                    f"{width}x{height} pixels are more than the limit of {max_pixels:,}; scale it down first."
                )
            if draft is not None and image.format == "JPEG":
                edge = draft(_upright_size(image)) if callable(draft) else draft
                image.draft("RGB", (edge, edge))
            return _decode(image, opened, white)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except FileNotFoundError:
        raise ImageError(f"{name}: no such file.") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not a readable image (no known format).") from None
    except Exception as error:  # Pillow's decoders raise nearly every type there is on broken input.
        raise ImageError(f"{name}: not a readable image ({error or type(error).__name__}).") from None


def read_file(file: io.IOBase) -> bytes:
    """All bytes of an open file, which stays open, from its start, as Pillow reads it."""
    if isinstance(file, io.TextIOBase):
        raise ImageError("the file is open as text: open it with mode 'rb'.")
    if file.seekable():
        file.seek(0)
    data: bytes = file.read()
    return data


def encode_image(picture: Any, name: str) -> str | bytes:
    """A path or an encoded image; a decoded one as a file, without loss, so that it has a digest as others do."""
    if isinstance(picture, (str, Path)):
        return str(picture)
    if isinstance(picture, (bytes, bytearray)):
        return bytes(picture)
    buffer = io.BytesIO()
    if isinstance(picture, Image.Image) and is_deep(picture):
        picture.save(buffer, "TIFF")
    else:
        open_image(picture, name=name).save(buffer, "BMP")  # fast: it is not compressed
    return buffer.getvalue()


@contextmanager
def _open_encoded(source: str | Path | bytes | bytearray | io.IOBase) -> Iterator[Image.Image]:
    source = read_file(source) if isinstance(source, io.IOBase) else source
    if isinstance(source, (str, Path)) and os.path.exists(source) and not os.path.isfile(source):
        raise ImageError("not a file.")  # a pipe would be waited for
    with io.BytesIO(source) if isinstance(source, (bytes, bytearray)) else open(os.fspath(source), "rb") as file:
        head = file.read(HEAD_BYTES)
        if not head:
            raise ImageError("the file is empty (0 bytes).")
        if head[:2] in {b"P1", b"P2", b"P3"}:  # Pillow parses each number in Python
            raise ImageError("a plain-text PBM, PGM or PPM file; convert it to PNG first.")
        file.seek(0)
        with _open_heif(file) if is_heif(head) else Image.open(file, formats=FORMATS) as image:
            yield image


def _open_heif(file: Any) -> Image.Image:
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise ImageError("a HEIC photo: to read these, pip install 'memoro[heif]'.") from None
    # Not registered with Pillow: that would change what Image.open does for other code.
    image: Image.Image = HeifImageFile(file)
    return image


def _from_array(array: npt.NDArray[Any] | Tensor) -> Image.Image:
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        values, channels = (array.float() if array.is_floating_point() else array).numpy(), 0
    else:
        values, channels = array, 2
    if values.ndim == 3:
        other = 2 - channels  # both orders are in use
        if values.shape[channels] not in {1, 3, 4} and values.shape[other] in {1, 3, 4}:
            channels = other
        values = np.moveaxis(values, channels, 2)
    if values.ndim not in {2, 3} or (values.ndim == 3 and values.shape[2] not in {1, 3, 4}) or not values.size:
        raise ImageError(
            f"an array of shape {tuple(array.shape)} is not an image: give (height, width) or (height, width, "
            "channels), or a tensor (channels, height, width), with 1, 3 or 4 channels."
        )
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # NaN fails too
            raise ImageError(
                f"an array of floats must be from 0 to 1, this one is from {low:.3g} to {high:.3g}. Divide by 255, or "
                "call model(pixels) if these are normalised pixels."
            )
        values = np.rint(values * 255)
    elif values.dtype == np.bool_:
        values = values * 255
    elif values.dtype != np.uint8:
        raise ImageError(f"an array of {values.dtype} is not an image: give uint8, or floats from 0 to 1.")
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    return Image.fromarray(np.ascontiguousarray(values, dtype=np.uint8))


def _decode(image: Image.Image, opened: dict[Any, Image.Image], white: White) -> Image.Image:
    key = image.size, white if is_deep(image) else None  # the size before it is turned
    if key not in opened:
        opened[key] = _upright_rgb(image, white)
    return opened[key]


def _upright_rgb(image: Image.Image, white: White) -> Image.Image:
    if getattr(image, "is_animated", False) and image.format != "HEIF":  # which opens at its primary image
        image.seek(0)
    image = ImageOps.exif_transpose(image)
    if is_deep(image):
        image = _eight_bit(image, white)
    if image.mode in {"LA", "PA", "RGBA"} or "transparency" in image.info:
        # Composited on white, as a viewer shows it: Pillow's own conversion reveals hidden colours.
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    depends_on_file = getattr(image, "fp", None) is not None
    return image.convert("RGB") if image.mode != "RGB" else image.copy() if depends_on_file else image


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    # EXIF orientations 5 to 8 lie on their side.
    return (height, width) if image.getexif().get(ExifTags.Base.Orientation) in {5, 6, 7, 8} else (width, height)


def is_deep(image: Image.Image) -> bool:
    """Whether its pixels are single values of more than 8 bits."""
    return image.mode.startswith("I;16") or image.mode in {"I", "F"}


class Levels(NamedTuple):
    """The values of pixels of more than 8 bits: of an image, or of all such images of a set."""

    low: float
    high: float
    floats: int
    """How many of the images have floats; the others have integers."""
    images: int = 1

    @property
    def white(self) -> float:
        """The value that becomes white: the brightest one, for integers with all of its bits; for floats 1 at least."""
        if self.floats:
            return max(self.high, 1.0)
        return float(2 ** max(8, int(self.high).bit_length()) - 1)


def _eight_bit(image: Image.Image, white: White) -> Image.Image:
    """The image with its values from 0 to white as bytes; Pillow's own conversion clips them at 255."""
    values = np.array(image, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ImageError("some pixels are NaN or infinite; export the image again.")
    floats = image.mode == "F"
    levels = Levels(float(values.min(initial=0.0)), float(values.max(initial=0.0)), int(floats))
    top = white(levels) if callable(white) else (1.0 if floats else 65535.0) if white is None else white
    if white is None and levels.high > top:
        raise ImageError(
            f"its brightest pixel is {levels.high:,.6g}, more than {top:,.0f}, and no task that was trained on such "
            "images tells which value is white. Train a task on them, or convert them to 8 bits."
        )
    # In place: the image may be large.
    np.clip(values, 0.0, top, out=values)
    values *= 255.0 / top
    return Image.fromarray(np.rint(values, out=values).astype(np.uint8))
