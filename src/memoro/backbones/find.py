"""The backbone that a task was made for, found by the name and the fingerprint in its file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from memoro.backbones.backbone import Backbone, BackboneRecord
from memoro.backbones.load import TIMM, TINY, is_hub_id, is_hub_reachable, load_checkpoint
from memoro.errors import BackboneError

FOLDERS = "MEMORO_BACKBONES"
"""The environment variable that lists folders of backbones, separated as in PATH."""


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
        return _check(record, load_checkpoint(record.name, dtype, device, processor))
    for folder in _folders(record):
        try:
            return _check(record, load_checkpoint(str(folder), dtype, device, processor))
        except BackboneError:
            continue
    if is_hub_id(record.name) and not Path(record.name).exists():
        _check_config(record)
        return _check(record, load_checkpoint(record.name, dtype, device, processor, use_safetensors=True))
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


def _check(record: BackboneRecord, backbone: Backbone) -> Backbone:
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
