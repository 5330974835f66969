"""Which weights a task was made for: an exact digest, and a sketch that survives rounding to another dtype."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

# The relative rounding error of a weight is spread evenly within half a unit in the last place, so a projection of a
# normed group of weights moves by at most about unit / sqrt(12); eight of those is a safe bound. A fine-tuning whose
# relative change |new - old| / |old| stays below the bound in every layer cannot be told from rounding.
_TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 8 * 2.0**-10 / 12**0.5, "bfloat16": 8 * 2.0**-7 / 12**0.5}

_PERIOD = 4096


@dataclass(frozen=True)
class Fingerprint:
    digest: str
    """SHA-256 over the encoder's tensors under memoro's own names."""
    sketch: tuple[float, ...]
    """One number for the final norm, one for the embedding, one for each layer."""
    dtype: str

    @property
    def short(self) -> str:
        return self.digest[:12]

    def match(self, other: Fingerprint) -> Literal["same", "same up to rounding", "different"]:
        """How these weights relate to others. Between two dtypes only the sketch can tell, within its tolerance."""
        if self.digest == other.digest:
            return "same"
        if self.dtype == other.dtype or len(self.sketch) != len(other.sketch):
            return "different"
        bound = max(_TOLERANCE.get(self.dtype, 0.0), _TOLERANCE.get(other.dtype, 0.0))
        close = all(abs(a - b) <= bound for a, b in zip(self.sketch, other.sketch, strict=True))
        return "same up to rounding" if close else "different"


def take_fingerprint(tensors: Mapping[str, Tensor], heads: int) -> Fingerprint:
    """The fingerprint of an encoder. The number of heads counts too: it changes the function, not the tensors."""
    names = sorted(tensors)
    whole = hashlib.sha256(f"heads {heads}\n".encode())
    for name in names:
        tensor = tensors[name]
        whole.update(f"{name} {tuple(tensor.shape)} {_dtype(tensor)} {_digest(tensor)}\n".encode())
    return Fingerprint(whole.hexdigest(), _sketch(tensors), _dtype(next(iter(tensors.values()))))


def name_functions(model: nn.Module) -> tuple[str, ...]:
    """What a model computes with, besides its weights: its activations, and the epsilon of its norms."""
    linear = (nn.Linear, nn.Dropout, nn.Identity)
    leaves = [part for part in model.modules() if not any(part.children()) and not isinstance(part, linear)]
    return tuple(sorted({repr(part) for part in leaves}))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()


def _sketch(tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    """Each group's weights projected on fixed random signs, over their norm: about normal with variance 1."""
    bits = hashlib.shake_256(b"memoro sketch").digest(_PERIOD // 8)
    signs = torch.tensor(
        [1.0 if bits[i // 8] >> (i % 8) & 1 else -1.0 for i in range(_PERIOD)], dtype=torch.float64, device="cpu"
    )
    projection: dict[str, float] = defaultdict(float)
    square: dict[str, float] = defaultdict(float)
    for name in sorted(tensors):
        parts = name.split(".")
        group = ".".join(parts[:2]) if parts[0] == "blocks" else "embed" if parts[0] != "norm" else "norm"
        flat = tensors[name].detach().cpu().reshape(-1)  # MPS has no float64
        flat = flat.float() if flat.dtype in {torch.float16, torch.bfloat16} else flat
        rolled = signs.roll(zlib.crc32(name.encode()) % _PERIOD)
        whole = flat.numel() - flat.numel() % _PERIOD
        projection[group] += float((flat[:whole].view(-1, _PERIOD) @ rolled.to(flat)).double().sum())
        projection[group] += float(flat[whole:].double() @ rolled[: flat.numel() - whole])
        square[group] += float(torch.linalg.vector_norm(flat)) ** 2
    order = sorted(projection, key=lambda group: (len(group), group))
    return tuple(round(projection[group] / math.sqrt(square[group] or 1.0), 7) for group in order)
