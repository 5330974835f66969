"""The precision in which a backbone computes: by itself bfloat16 where the device is faster in it, else float32."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from memoro.clock import best_times
from memoro.errors import BackboneError, TaskFileError
from memoro.files import cache_folder, write_whole

Precision = Literal["auto", "float32", "bfloat16", "float16"]
CHOSEN = "computing in bfloat16, which is faster on this device (`precision=float32` for full precision)."
"""Said once if `auto` chose it."""
PRECISION_HELP = "What the backbone computes in; auto: bfloat16 if the device is faster in it, else float32."

FILE = "precision.json"
"""In the cache folder: for each CPU and version of torch, whether bfloat16 is faster."""
ROUNDS, SECONDS = 6, 1.0
"""Of the measurement; on a CPU that is very slow in bfloat16, the time is over first."""
FASTER, SURE = 1.15, (1.0, 1.3)
"""From how many times the speed of float32 on bfloat16 is used. Ratios between the two others are not remembered: they
may be noise, and are measured again."""


def choose_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of a backbone's weights: `auto` is bfloat16 where the device is faster in it, else float32."""
    check_precision(precision)
    if precision == "auto":
        return torch.bfloat16 if prefers_bfloat16(device) else torch.float32
    found = getattr(torch, precision)
    assert isinstance(found, torch.dtype)
    return found


def check_precision(precision: str) -> Precision:
    if precision not in get_args(Precision):
        raise BackboneError(f"precision {precision!r}: choose one of {', '.join(get_args(Precision))}.")
    return cast(Precision, precision)


def prefers_bfloat16(device: torch.device) -> bool:
    """Whether a device computes faster in bfloat16. GPUs with instructions for it do; a CPU is asked for some
    milliseconds, once."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    path, key = cache_folder() / FILE, _describe_cpu()
    known = _read(path)
    if key not in known:
        ratio = measure_speedup()
        if SURE[0] < ratio < SURE[1]:
            return ratio >= FASTER
        known[key] = ratio >= FASTER
        with suppress(OSError, TaskFileError):  # a cache that cannot be written is measured again
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(known, indent=1).encode())
    return known[key]


@torch.no_grad()
def measure_speedup() -> float:
    """How many times as fast as in float32 this CPU computes an MLP in bfloat16."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((128, 384), (1536, 384), (384, 1536))
    drawn = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]

    def run(tokens: Tensor, expand: Tensor, contract: Tensor) -> None:
        normed = functional.layer_norm(tokens, tokens.shape[1:])
        functional.linear(functional.gelu(functional.linear(normed, expand)), contract)

    kinds = (torch.float32, torch.bfloat16)
    times = best_times(
        {str(kind): partial(run, *(tensor.to(kind) for tensor in drawn)) for kind in kinds}, ROUNDS, seconds=SECONDS
    )
    return times[str(torch.float32)] / times[str(torch.bfloat16)]


def _describe_cpu() -> str:
    """What decides the outcome: the CPU with its instructions, and torch."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    parts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = hashlib.sha256(parts.get("flags", parts.get("Features", "")).encode()).hexdigest()[:8]
    name = parts.get("model name") or platform.processor() or platform.machine()
    return f"{name}, instructions {flags}, torch {torch.__version__}"


def _read(path: Path) -> dict[str, bool]:
    """What was remembered; nothing if the file is missing or damaged."""
    try:
        record = json.loads(path.read_bytes())
        return {name: value for name, value in record.items() if isinstance(value, bool)}
    except (OSError, ValueError, AttributeError):
        return {}
