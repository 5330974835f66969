"""Verbs and options that are gone, and what replaces them. CHANGELOG.md lists each."""

from __future__ import annotations

from collections.abc import Sequence

from memoro.errors import MemoroError


def _settings(verb: str, *names: str) -> dict[str, str]:
    """Options that are settings now, under the same name."""
    return {f"{verb} --{name}": f"--set {name.replace('-', '_')}=VALUE" for name in names}


_READ = ("image-column", "allow-absolute", "max-unreadable", "batch-size", "workers")
REMOVED = {
    "sweep": "memoro train, which takes several values: --rank 4,8 --lr 0.001,0.003 --seeds 3",
    "train --streaming": "downloading the dataset, as without it; prediction still streams",
    "bench": "memoro lab bench",
    "reproduce": "memoro lab reproduce",
    "train --width": "memoro lab train-baseline --width",
    "train --tensorboard": "--track tensorboard",
    "train --cache": "--set cache=true",
    "train --no-cache": "--set cache=false",
    "train --dtype": "--precision, for what the backbone computes in",
    "export --dtype": "--precision",
    "train --ensemble": "--seeds, which keeps the best run",
    "train --crop-scale": "--set crop_scale=SMALLEST,LARGEST",
    **_settings(
        "train", "image-column", "allow-absolute", "max-unreadable", "others", "workers", "steps", "batch-size",
        "optimizer", "momentum", "weight-decay", "clip", "memory-rate", "warmup", "label-smoothing", "balance",
        "accumulate", "data-seed", "crop", "flip", "views", "val-fraction", "folds",
        "patience", "cache-folder", "cache-budget", "cache-dtype",
    ),
    **_settings("eval", *_READ),
    "eval --picture": "--json, which has the same figures",
    **_settings("predict", "image-column", "allow-absolute", "batch-size", "workers", "ray-address", "ray-workers"),
    "predict --ray": "--set ray=true",
    "predict --json": "--format json",
    **_settings("calibrate", *_READ[:-1]),
    "verify --data": "memoro eval NAME=DATA --together",
    **{f"verify --{name}": "memoro eval NAME=DATA --together" for name in ("label-column", *_READ[:3])},
    "serve --max-body-mb": "--set max_body=BYTES",
    "serve --max-megapixels": "--set max_pixels=PIXELS",
    **_settings(
        "serve", "max-queue", "max-images", "max-connections", "timeout", "header-timeout", "idle-timeout"
    ),
}  # fmt: skip


def refuse_removed(arguments: Sequence[str]) -> None:
    """Raises if a command line has a verb or an option that is gone."""
    verb = arguments[0]
    for word in [verb, *(f"{verb} {argument.partition('=')[0]}" for argument in arguments[1:])]:
        if word in REMOVED:
            raise MemoroError(f"memoro {word} was removed. Instead, use {REMOVED[word]}.")
