"""The finished model as a folder that `from_pretrained` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save

from distillation.tokencache import write_json
from distillation.views import MEAN, STD
from memoro.files import write_whole


def export(student: Any, folder: Path) -> None:
    """Write what `from_pretrained` reads: weights stored as float16, used as float32."""
    tensors = {name: tensor.half().contiguous() for name, tensor in student.state_dict().items()}
    write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    architecture = {"architectures": ["ViTForImageClassification"], "dtype": "float32"}
    write_json(folder / "config.json", {**student.config.to_diff_dict(), **architecture})
    side = student.config.image_size
    resize = {"do_resize": True, "size": {"height": side, "width": side}, "resample": 3}  # 3 is bicubic
    rescale = {"do_rescale": True, "rescale_factor": 1 / 255, "do_convert_rgb": True}
    normalize = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    kind = {"image_processor_type": "ViTImageProcessor"}
    write_json(folder / "preprocessor_config.json", {**kind, **resize, **rescale, **normalize})
