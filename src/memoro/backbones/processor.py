"""A checkpoint's own image processor, read into memoro's preprocessing. Nothing here needs torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memoro.errors import BackboneError, DataError, first_line
from memoro.images import Preprocessing

CONFIGS = ("preprocessor_config.json", "processor_config.json")
"""Where a checkpoint describes its processor."""


def read_processor(source: Any, default: Preprocessing) -> Preprocessing:
    """The preprocessing that a processor object of `transformers` does, or one described in a checkpoint's config.

    `source` is that object, memoro's own Preprocessing, or a folder or hub id; `default` is for None, and for a
    checkpoint without a processor.
    """
    if isinstance(source, str):
        source = _read_config(source)
    if source is None or isinstance(source, Preprocessing):
        return source or default
    processor = getattr(source, "image_processor", source)  # CLIPProcessor and the like hold one

    def value(name: str, other: Any = None) -> Any:
        found = _get(processor, name)
        return other if found is None else found

    normalise = value("do_normalize", True)
    try:
        return Preprocessing(
            resize=_size(value("size")) if value("do_resize", True) else None,
            crop=_size(value("crop_size")) if value("do_center_crop", False) else None,  # type: ignore[arg-type]
            resample=int(value("resample", default.resample)),
            scale=float(value("rescale_factor", 1 / 255)) if value("do_rescale", True) else 1.0,
            mean=_triple(value("image_mean", default.mean)) if normalise else (0.0, 0.0, 0.0),
            std=_triple(value("image_std", default.std)) if normalise else (1.0, 1.0, 1.0),
        )
    except (DataError, TypeError, ValueError) as error:
        raise BackboneError(f"the image processor of the checkpoint cannot be used: {error}") from None


def _read_config(source: str) -> Any:
    """The Pillow-backed processor that a checkpoint's config names: it knows what the config leaves out."""
    import transformers
    from transformers.image_processing_base import ImageProcessingMixin

    from memoro.backbones.load import is_hub_reachable

    here = Path(source).exists() or not is_hub_reachable()
    try:
        record, _ = ImageProcessingMixin.get_image_processor_dict(source, local_files_only=here)
    except OSError as error:
        if any((Path(source) / name).exists() if here else _is_on_hub(source, name) for name in CONFIGS):
            raise BackboneError(f"{source}: its image processor cannot be read ({first_line(error)})") from None
        return None
    if not isinstance(record, dict):
        raise BackboneError(f"{source}: its image processor cannot be read: it is not a JSON object.")
    name = str(record.get("image_processor_type") or record.get("feature_extractor_type") or "")
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    try:
        return getattr(transformers, f"{name}Pil")(**record)
    except (TypeError, ValueError) as error:
        raise BackboneError(f"{source}: its image processor cannot be read: {first_line(error)}") from None
    except (AttributeError, ImportError):
        # DINOv3 has no Pillow processor. Its own resizes floats, Pillow bytes: they differ by half a grey level.
        return record


def _is_on_hub(source: str, name: str) -> bool:
    """Whether a model of the hub has a file; raises if the hub does not say, as its processor may be needed."""
    from huggingface_hub import file_exists

    try:
        return file_exists(source, name)
    except Exception as error:  # networks and the hub's client have many
        raise BackboneError(f"{source}: its image processor cannot be read ({first_line(error)})") from None


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _size(size: Any) -> int | tuple[int, int]:
    if isinstance(size, int):
        return size
    shortest, height, width = (int(_get(size, name) or 0) for name in ("shortest_edge", "height", "width"))
    if shortest:
        return shortest
    if height and width:
        return height, width
    raise BackboneError(f"the processor's size {size!r} must be either a shortest edge or a height and width.")


def _triple(values: Any) -> tuple[float, float, float]:
    try:
        first, second, third = (float(value) for value in values)
    except (TypeError, ValueError):
        raise BackboneError(f"the processor's mean and std must be three numbers each, not {values!r}.") from None
    return first, second, third
