"""Untrusted image files become upright RGB images, or a clear error."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from memoro.errors import ImageError

# 3 bytes a pixel: no single image may decode to more than about 510 MB. Pillow's own limit is a little above it.
# 16-bit, integer and float images take about three times as much while they are scaled to bytes.
MAX_PIXELS = 170_000_000

# The shortest edge that a caller needs, as a number or as a function of the upright (width, height).
Draft = int | Callable[[tuple[int, int]], int] | None

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)

# The formats of these suffixes, whatever the file is called: EPS would be handed to Ghostscript, and TGA has no magic
# number. JPEG includes files of several pictures (MPO), which phones write.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "DIB", "TIFF", "PPM")


def open_image(
    source: str | Path | bytes | Image.Image,
    *,
    draft: Draft = None,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """The image of a path, of encoded bytes or of a PIL image as upright RGB, its first frame if it is animated.

    `draft` is the shortest edge that the caller needs: big JPEGs are then decoded at a fraction of their size. Errors
    call the image by its `name`. A file with more than `max_pixels` is refused before it is decoded.
    """
    name = name or ("image" if isinstance(source, (bytes, Image.Image)) else str(source))
    if source == b"":
        raise ImageError(f"{name}: the file is empty (0 bytes).")
    try:
        if isinstance(source, Image.Image):
            return _upright_rgb(source)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise ImageError(
                    f"{name}: {width}x{height} pixels are more than the limit of {max_pixels:,}; scale it down first."
                )
            if draft is not None and image.format == "JPEG":
                edge = draft(_upright_size(image)) if callable(draft) else draft
                image.draft("RGB", (edge, edge))
            return _upright_rgb(image)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name}: no such file.") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not a readable image (no known format).") from None
    except Exception as error:  # Pillow's decoders raise nearly every type there is on broken input.
        raise ImageError(f"{name}: not a readable image ({error or type(error).__name__}).") from None


def _upright_rgb(image: Image.Image) -> Image.Image:
    if getattr(image, "is_animated", False):
        image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode in {"I", "F"}:
        image = _eight_bit(image)
    if image.mode in {"LA", "PA", "RGBA"} or "transparency" in image.info:
        # Composited on white, as a viewer shows it: Pillow's own conversion reveals hidden colours.
        rgba = image.convert("RGBA")
        image = Image.new("RGB", rgba.size, (255, 255, 255))
        image.paste(rgba, mask=rgba.getchannel("A"))
    return image.convert("RGB") if image.mode != "RGB" else image.copy() if _lazy(image) else image


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    # EXIF orientations 5 to 8 lie on their side.
    return (height, width) if image.getexif().get(ExifTags.Base.Orientation) in {5, 6, 7, 8} else (width, height)


def _lazy(image: Image.Image) -> bool:
    """Whether the pixels still depend on the open file."""
    return getattr(image, "fp", None) is not None


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit and float images scaled to 0..255; Pillow's own conversion clips them to white."""
    values = np.array(image, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ImageError("pixels that are not finite numbers")
    top = values.max(initial=0.0)
    scale = 255.0 / 65535.0 if top > 255.0 else 255.0 if 0.0 < top <= 1.0 and image.mode == "F" else 1.0
    # In place: the image may be large.
    np.clip(values, 0.0, 255.0 / scale, out=values)
    values *= scale
    return Image.fromarray(np.rint(values, out=values).astype(np.uint8))
