"""`load_backbone`: a hub id, a folder or a model object becomes a Backbone."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from memoro.backbones.backbone import Backbone, BackboneRecord
from memoro.backbones.precision import Precision, choose_dtype
from memoro.backbones.processor import read_processor
from memoro.errors import BackboneError, first_line

TINY = "memoro-tiny"
"""The small backbone that memoro ships; used if none is named."""
TIMM = "timm:"
"""What precedes the name of a pretrained model of timm."""
FOLDERS = "MEMORO_BACKBONES"
"""The environment variable that lists folders of backbones, separated as in PATH."""
WEIGHTS = Path(__file__).parents[1] / "weights" / TINY
"""Where it ships."""


def load_backbone(
    source: str | Path | nn.Module | Backbone | BackboneRecord = TINY,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    processor: Any = None,
    precision: Precision | None = None,
) -> Backbone:
    """A frozen view of a Vision Transformer: of a hub id, a folder, or a model of `transformers` or `timm`.

    `memoro-tiny`, the default, comes with memoro: small, for 112 x 112 pixels, no download. `timm:NAME` is timm's
    pretrained model of this name, such as `timm:vit_small_patch14_dinov2`. For `task.spec.backbone` it finds the one
    that a task was made for (see `find_backbone`). Code that comes with a checkpoint is never run.

    A model object is read, never changed, and its weights are shared, not copied, unless `dtype`, `precision` or
    `device` ask for others. `processor` (an image processor of `transformers`, or memoro's Preprocessing) overrides the
    checkpoint's.

    `precision` is what the backbone computes in: float32, bfloat16, float16, or auto, which is bfloat16 for a
    checkpoint on a device that is faster in it, and float32 on others; a model object stays as it is. Weights are
    rounded after the fingerprint was taken, so a task fits the backbone in every precision. With `dtype`, the rounded
    weights are a backbone of their own. Without either, weights keep the checkpoint's dtype.
    """
    kind = _dtype(dtype)
    if kind is not None and precision is not None:
        raise BackboneError("`dtype` and `precision` both say what to compute in: leave one of them out.")
    if isinstance(source, Backbone):
        if processor is not None:
            source = replace(source, preprocessing=read_processor(processor, source.preprocessing))
        backbone = source.to(device, kind)
    elif isinstance(source, nn.Module):
        model = getattr(source, "_orig_mod", source)  # what torch.compile was given
        backbone = _wrap(model, type(model).__name__, processor).to(device, kind)
    elif isinstance(source, BackboneRecord):
        backbone = find_backbone(source, dtype=kind, device=device, processor=processor)
    else:
        backbone = load_checkpoint(str(source), kind, device, processor)
    given = isinstance(source, (Backbone, nn.Module))
    if precision is None or (given and precision == "auto"):
        return backbone
    rounded = backbone.in_precision(choose_dtype(precision, backbone.device))
    # Nobody else has the model that was read from a checkpoint.
    return rounded if given or rounded is backbone else replace(rounded, model=rounded.module)


def load_checkpoint(
    source: str, dtype: torch.dtype | None, device: torch.device | str | None, processor: Any, **options: Any
) -> Backbone:
    """The backbone of a folder, a hub id, timm's name or `memoro-tiny`; `options` are those of `from_pretrained`."""
    if source.startswith(TIMM):
        from memoro.backbones.timm import load_pretrained

        return load_pretrained(source.removeprefix(TIMM), processor).to(device, dtype)
    folder = str(WEIGHTS) if source == TINY else source
    model = _from_pretrained(folder, dtype, options)
    if device is not None:
        model.to(device)  # nobody else holds it, so no copy is kept
    name = source if folder != source or not Path(source).is_dir() else Path(source).resolve().name
    return _wrap(model, name, folder if processor is None else processor)


def is_hub_id(text: str, tail: str = "") -> bool:
    """Whether it has the form owner/name, possibly followed by what the regular expression `tail` describes.

    A relative path may look the same.
    """
    return re.fullmatch(rf"\w[\w.-]*/\w[\w.-]*({tail})?", text, re.ASCII) is not None


def address_of(name: str) -> str:
    """What `-b` takes for a backbone of this name: a folder's name does not say where the folder is."""
    return name if name == TINY or name.startswith(TIMM) or is_hub_id(name) else "FOLDER"


def is_hub_reachable() -> bool:
    """Whether the hub's host is known, or a proxy would know it: without a network, its clients retry for half a
    minute."""
    from huggingface_hub import constants

    try:
        return bool(getproxies()) or bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None))
    except OSError:
        return False


def own_device(name: str | None = None) -> torch.device:
    """The device of this name; without one, this process's GPU (CUDA or MPS) if there is one, else the CPU."""
    if name in {None, "cuda"} and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if name is None:
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
        others = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        here = " or ".join(["cpu", *(device for device, available in others.items() if available)])
        raise BackboneError(f"device {name!r} cannot be used ({reason}): choose {here}.") from None


def supported() -> str:
    """The families that load_backbone reads, for people."""
    from memoro.backbones.families import FAMILY_SPECS

    return ", ".join(layout.title for layout in FAMILY_SPECS.values()) + ", and timm's VisionTransformer"


def _wrap(model: nn.Module, name: str, processor: Any) -> Backbone:
    found = _unreadable(model)
    if found is not None:
        raise BackboneError(
            f"{name} has been quantized or sharded, so memoro cannot read its weights ({found}): load the original "
            "model, and use dtype='bfloat16' to save memory."
        )
    if type(model).__module__.startswith("timm."):
        from memoro.backbones.timm import wrap_timm

        return wrap_timm(model, name, processor)
    from memoro.backbones.huggingface import wrap_huggingface

    backbone = wrap_huggingface(model, name, processor)
    if backbone is None:
        raise unsupported(type(model).__name__)
    return backbone


def _unreadable(model: nn.Module) -> str | None:
    """The class or dtype of weights that are not plain numbers, as libraries for quantization leave them."""
    for part in model.modules():
        if "quantized" in type(part).__module__.split("."):
            return type(part).__module__
        for weight in part._parameters.values():
            if weight is None:
                continue
            if type(weight) not in {nn.Parameter, torch.Tensor}:
                return type(weight).__name__
            if not weight.is_floating_point() or weight.itemsize < torch.float16.itemsize:
                return str(weight.dtype)
    return None


def unsupported(what: str) -> BackboneError:
    return BackboneError(
        f"memoro cannot read {what}: it is not a supported Vision Transformer. Supported: {supported()}. Windowed and "
        "hierarchical models (Swin, Hiera, PVT) have no class token that attends to every patch in every layer."
    )


def _from_pretrained(source: str, dtype: torch.dtype | None, options: Mapping[str, Any]) -> nn.Module:
    """The class that the checkpoint's config names, without any part that would start from random weights."""
    import transformers

    from memoro.backbones.families import FAMILY_SPECS
    from memoro.backbones.huggingface import find_trunk

    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise BackboneError(f"{source} has no config.json, so it is not a `transformers` checkpoint.")
    if not Path(source).exists() and not is_hub_reachable():
        options = {**options, "local_files_only": True}
    # Without trust_remote_code=False, transformers asks on the terminal whether to run a checkpoint's own code.
    options = {**options, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        how = (
            f": `hf download {source} --local-dir FOLDER`, then give FOLDER as `backbone`" if is_hub_id(source) else ""
        )
        raise BackboneError(
            f"cannot load a backbone from {source!r}: it is neither a folder with a readable config.json nor a hub id "
            f"that can be reached ({first_line(error)[:200].rstrip('.')}). If you are offline, download it on another "
            f"machine and pass the folder{how}."
        ) from None
    vision = getattr(config, "vision_config", config)
    if vision.model_type not in FAMILY_SPECS:
        raise unsupported(f"{source} ({config.model_type})")
    for part in (config, vision):
        if "/" in str(part._attn_implementation):
            raise BackboneError(
                f"{source} asks for attention code from the hub ({part._attn_implementation}), which memoro never "
                "loads: remove attn_implementation from its config.json."
            )
    name = next(iter(config.architectures or []), None)
    tower = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel"}.get(config.model_type)
    if tower is not None and not str(name).endswith("ForImageClassification"):
        name = tower
    architecture: Any = getattr(transformers, str(name), None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        architecture = transformers.AutoModel
    options = {**options, **({} if dtype is None else {"dtype": dtype})}
    try:
        model, info = architecture.from_pretrained(source, output_loading_info=True, **options)
        if info["missing_keys"] and (trunk := find_trunk(model)) is not None:
            # A pooler or classifier that the checkpoint does not hold would be random: leave it out.
            if hasattr(trunk, "pooler"):
                options["add_pooling_layer"] = False
            model, info = type(trunk).from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # a damaged file or config makes the libraries raise nearly every type
        raise BackboneError(f"cannot load the weights of {source!r}: {first_line(error)[:200]}") from None
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise BackboneError(f"{source!r} is incomplete: encoder weights are missing ({some}, …).")
    assert isinstance(model, nn.Module)
    return model.eval()


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise BackboneError(f"dtype {dtype!r}: choose float32, bfloat16, float16 or float64.")
        return found
    return dtype


def find_backbone(
    record: BackboneRecord,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    processor: Any = None,
) -> Backbone:
    """The shipped backbone, one from the folders of MEMORO_BACKBONES, or one from the hub, if its weights are those
    that the record's fingerprint says.

    A record may come from a stranger's file: a folder that it names is not opened, of a hub id only safetensors are
    read, and of timm only the weights that it lists itself.
    """
    if record.name == TINY or record.name.startswith(TIMM):
        return _check_weights(record, load_checkpoint(record.name, dtype, device, processor))
    for folder in _folders(record):
        try:
            return _check_weights(record, load_checkpoint(str(folder), dtype, device, processor))
        except BackboneError:
            continue
    if is_hub_id(record.name) and not Path(record.name).exists():
        _check_config(record)
        return _check_weights(record, load_checkpoint(record.name, dtype, device, processor, use_safetensors=True))
    raise BackboneError(
        f"the tasks were trained on {record}, a local folder whose path is not stored in task files. Pass it with "
        f"`backbone=FOLDER` or load_backbone(FOLDER), or set {FOLDERS} to its parent folder."
    )


def _check_config(record: BackboneRecord) -> None:
    """Raises if a model of the hub has another shape than the record says, before its weights are downloaded."""
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(record.name, "config.json", local_files_only=not is_hub_reachable())
    except Exception:  # loading explains it
        return
    if not _may_be(Path(file).parent, record):
        raise BackboneError(
            f"the tasks were trained on {record}, but {record.name} on the hub is another model now: pass the version "
            "that they were trained on with `backbone=FOLDER`, or train them again."
        )


def _check_weights(record: BackboneRecord, backbone: Backbone) -> Backbone:
    if record.fingerprint.match(backbone.fingerprint) == "different":
        raise BackboneError(
            f"the tasks were trained on {record}, but {backbone.name} has other weights now (fingerprint "
            f"{backbone.fingerprint.short}): pass the version that they were trained on with `backbone`, or train "
            "them again."
        )
    return backbone


def _folders(record: BackboneRecord) -> Iterator[Path]:
    """The user's folders with a checkpoint of the record's shape, those of the same name first."""
    roots = [Path(root).expanduser() for root in os.environ.get(FOLDERS, "").split(os.pathsep) if root]
    for root in roots:
        if not root.is_dir():
            raise BackboneError(f"{FOLDERS}: {root} is not a folder.")
    found = [folder for root in roots for folder in (root, *sorted(root.iterdir())) if _may_be(folder, record)]
    own = re.split(r"[/\\]", record.name)[-1]  # older files hold a path
    yield from sorted(found, key=lambda folder: folder.resolve().name != own)


def _may_be(folder: Path, record: BackboneRecord) -> bool:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("vision_config", config)
        shape = config.get("hidden_size", record.dim), config.get("num_hidden_layers", record.depth)
    except (OSError, ValueError, AttributeError):
        return False
    return bool(shape == (record.dim, record.depth))
