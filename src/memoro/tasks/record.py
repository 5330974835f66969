"""What memoro's files have in common: safetensors with one JSON record, of which nothing is believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from memoro.backbones import Fingerprint
from memoro.errors import MemoroError, TaskFileError
from memoro.tasks.task import BackboneRecord

FORMAT = 1
KEY = "memoro"
MAX_HEADER = 64 << 20
MAX_DIM = 16_384
MAX_DEPTH = 512
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# ------------------------------------------------------------------------------------------------------- writing


def write_record(record: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file: the record as JSON that has the same bytes each time."""
    whole = {"format": FORMAT, **record}
    try:
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskFileError(f"training facts and metrics must be plain JSON with finite numbers: {error}.") from None
    return {KEY: text}


def write_backbone(backbone: BackboneRecord) -> dict[str, Any]:
    return {
        "name": backbone.name,
        "family": backbone.family,
        "dim": backbone.dim,
        "depth": backbone.depth,
        "fingerprint": asdict(backbone.fingerprint),
    }


def write_tensor(tensor: Tensor, what: str) -> Tensor:
    """The tensor as a file holds it, if all its values are finite."""
    if not torch.isfinite(tensor).all():
        raise TaskFileError(f"{what} holds NaN or infinity; it is not saved.")
    return tensor.detach().cpu().contiguous().clone()  # clone: parts of one storage would be refused


# ------------------------------------------------------------------------------------------------------- reading


@contextmanager
def reading(path: Path, most: int) -> Iterator[None]:
    """All that can go wrong with a file of at most `most` bytes is a TaskFileError that names it."""
    _check_header(path, most)
    try:
        yield
    except (SafetensorError, OSError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise TaskFileError(
            f"{path} is no task file that can be read ({_brief(error)}). It may be cut off or from another program: "
            "fetch it again, or import it with `memoro import`."
        ) from None
    except MemoroError as error:
        raise TaskFileError(f"{path}: {error}") from None


def _check_header(path: Path, most: int) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise TaskFileError(f"cannot read {path} ({error.strerror}).") from None
    if size > most:
        raise TaskFileError(f"{path} has {size >> 20} MiB; task files may have at most {most >> 20}.")
    if size < 8 or first > min(size - 8, MAX_HEADER):
        raise TaskFileError(f"{path} is no safetensors file, or it is cut off: fetch it again.")


def read_record(file: Any) -> Mapping[str, Any]:
    """The record of an open file, if this memoro can read its format."""
    text = (file.metadata() or {}).get(KEY)
    if text is None:
        raise TaskFileError(
            "a safetensors file, but not one of memoro's (it has no 'memoro' record). A backbone is loaded with "
            "load_backbone(), a checkpoint of the public reproduction with import_tasks()."
        )
    record = json.loads(text, parse_constant=_no_constant)
    if not isinstance(record, Mapping):
        raise TaskFileError("its record is not a JSON object.")
    version = record.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise TaskFileError(f"its format {version!r} is not a version number.")
    if version > FORMAT:
        raise TaskFileError(f"has format {version}, this memoro reads up to {FORMAT}: pip install --upgrade memoro.")
    return record


def read_backbone(item: Mapping[str, Any]) -> BackboneRecord:
    backbone = read_object(item, "backbone")
    fingerprint = read_object(backbone, "fingerprint")
    return BackboneRecord(
        name=read_text(backbone, "name"),
        family=read_text(backbone, "family"),
        dim=read_whole(backbone, "dim", 1, MAX_DIM),
        depth=read_whole(backbone, "depth", 1, MAX_DEPTH),
        fingerprint=Fingerprint(
            digest=read_text(fingerprint, "digest"),
            sketch=tuple(_number(value) for value in read_list(fingerprint, "sketch", 0, MAX_DEPTH + 2)),
            dtype=read_text(fingerprint, "dtype"),
        ),
    )


def read_tensor(file: Any, key: str, shape: Sequence[int], what: str) -> Tensor:
    """A tensor of an open file, if it has this shape, a float dtype and finite values."""
    part = file.get_slice(key)  # raises where it is missing, loads nothing yet
    if part.get_shape() != list(shape):
        raise TaskFileError(f"{what} has shape {part.get_shape()} instead of {list(shape)}.")
    if part.get_dtype() not in DTYPES:
        raise TaskFileError(f"{what} is {part.get_dtype()}; weights are {', '.join(DTYPES)}.")
    tensor: Tensor = file.get_tensor(key)
    if not torch.isfinite(tensor).all():
        raise TaskFileError(f"{what} holds NaN or infinity.")
    return tensor


def read_text(record: Mapping[str, Any], name: str) -> str:
    value: str = _field(record, name, lambda v: isinstance(v, str) and len(v) <= 4096, "a short text")
    return value


def read_whole(record: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value: int = _field(
        record, name, lambda v: isinstance(v, int) and low <= v <= high, f"a whole number from {low} to {high}"
    )
    return value


def read_choice(record: Mapping[str, Any], name: str, choices: Sequence[str]) -> Any:
    return _field(record, name, lambda v: v in choices, f"one of {', '.join(choices)}")


def read_object(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = _field(record, name, lambda v: isinstance(v, Mapping), "a JSON object")
    return value


def read_list(record: Mapping[str, Any], name: str, low: int, high: int) -> list[Any]:
    value: list[Any] = _field(
        record, name, lambda v: isinstance(v, list) and low <= len(v) <= high, f"a list of {low} to {high} entries"
    )
    return value


def _field(record: Mapping[str, Any], name: str, right: Callable[[Any], bool], what: str) -> Any:
    value = record.get(name)
    if isinstance(value, bool) or not right(value):
        raise TaskFileError(f"{name} in its record is not {what}.")
    return value


def _no_constant(name: str) -> float:
    raise TaskFileError(f"its record holds {name}, which is no JSON number.")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e6:
        raise TaskFileError("the sketch in its record is not a list of numbers.")
    return float(value)


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160] or type(error).__name__
