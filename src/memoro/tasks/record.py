"""What memoro's files have in common: safetensors with one JSON record. Nothing in a file is trusted."""

from __future__ import annotations

import json
import math
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memoro.backbones import BackboneRecord, Fingerprint
from memoro.errors import MemoroError, TaskFileError, first_line
from memoro.heads import HeadKind
from memoro.images import Preprocessing
from memoro.tasks.spec import ModelSpec, check_labels, check_name

PLAIN_FORMAT, ENSEMBLE_FORMAT, READ_OUT_FORMAT = 2, 3, 4
"""What tasks are written as: the oldest that can hold them, so that older versions can read the rest."""
FORMAT = READ_OUT_FORMAT
"""The newest that can be read."""
KEY = "memoro"
MAX_HEADER = 64 << 20
MAX_BRACKETS = 1 << 18
"""Lists and objects of a record. A task has fewer than 100, most of them rows of its confusion matrix."""
MAX_DIM = 16_384
MAX_DEPTH = 512
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONTENTS = {
    "tasks": "tasks: read it with load_task() or load_tasks()",
    "baseline": "a baseline, which has a pass of its own and cannot be composed: use memoro lab eval-baseline, "
    "predict-baseline or inspect-baseline (in Python, memoro.lab.load_baseline)",
}
"""What a file's record may hold (docs/format.md), for a reader that expects the other."""


# ------------------------------------------------------------------------------------------------------- writing


def file_bytes(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """What a file holds: it depends on the content only."""
    whole = {"format": PLAIN_FORMAT, **record}
    try:
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskFileError(f"training facts and metrics must be plain JSON with finite numbers: {error}.") from None
    text = text.encode(errors="backslashreplace").decode()  # a file name that is not UTF-8, as JSON escapes it
    if _count_brackets(text) > MAX_BRACKETS:
        raise TaskFileError("the record would have too many parts to be read again: write fewer tasks to one file.")
    data: bytes = save(dict(tensors), metadata={KEY: text})
    return data


def _count_brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def write_spec(spec: ModelSpec, content: str) -> dict[str, Any]:
    """The record of what all specs have, and the hash of the content."""
    return {
        "name": spec.name,
        "labels": spec.labels,
        "kind": spec.kind,
        "backbone": asdict(spec.backbone),
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": dict(spec.training),
        "metrics": dict(spec.metrics),
        "content": content,
    }


def write_tensors(name: str, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The tensors as a file holds them, if all their values are finite."""
    for part, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise TaskFileError(f"{name!r}: {part} contains NaN or infinity; it was not saved.")
    # clone: safetensors refuses tensors that share a storage
    return {f"{prefix}{part}": tensor.detach().cpu().contiguous().clone() for part, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------------------- reading


class Section:
    """A JSON object of a file. Each value is checked when it is read."""

    def __init__(self, values: object, what: str = "the record") -> None:
        if not isinstance(values, dict):
            raise TaskFileError(f"{what} is not a JSON object.")
        self.values: dict[str, Any] = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str:
        return str(self._field(name, lambda v: isinstance(v, str) and len(v) <= 4096, "a short string"))

    def whole(self, name: str, low: int, high: int) -> int:
        what = f"a whole number from {low} to {high}"
        return int(self._field(name, lambda v: isinstance(v, int) and low <= v <= high, what))

    def number(self, name: str, low: float, high: float) -> float:
        what = f"a number from {low:g} to {high:g}"
        return float(self._field(name, lambda v: isinstance(v, (int, float)) and low <= v <= high, what))

    def numbers(self, name: str, fewest: int, most: int, low: float, high: float) -> tuple[float, ...]:
        return tuple(Section({name: value}).number(name, low, high) for value in self.list(name, fewest, most))

    def choice(self, name: str, choices: Sequence[str]) -> Any:
        return self._field(name, lambda v: v in choices, f"one of {', '.join(choices)}")

    def section(self, name: str) -> Section:
        return Section(self._field(name, lambda v: isinstance(v, dict), "a JSON object"))

    def sections(self, name: str, fewest: int, most: int) -> list[Section]:
        return [Section(value, f"an entry of {name}") for value in self.list(name, fewest, most)]

    def list(self, name: str, fewest: int, most: int) -> Sequence[Any]:
        what = f"a list of {fewest} to {most} entries"
        values: Sequence[Any] = self._field(name, lambda v: isinstance(v, list) and fewest <= len(v) <= most, what)
        return values

    def _field(self, name: str, right: Callable[[Any], bool], what: str) -> Any:
        value = self.values.get(name)
        if isinstance(value, bool) or not right(value):
            raise TaskFileError(f"{name} in the record must be {what}.")
        return value


@contextmanager
def open_file(path: str | Path, content: str, most: int) -> Iterator[tuple[Any, Section]]:
    """An open file of at most `most` bytes, and its record, which holds no other content than the given one.

    All that can go wrong until it is closed is a TaskFileError that names the file.
    """
    path = Path(path)
    _check_header(path, most)
    try:
        with safe_open(path, framework="pt") as file:
            record = _read_record(file)
            for other, held in CONTENTS.items():
                if other != content and other in record:
                    raise TaskFileError(f"contains {held}.")
            yield file, record
    except (SafetensorError, OSError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise TaskFileError(
            f"cannot read {path} as a task file ({first_line(error)[:160]}). It may be truncated or written by another "
            "program: download it again, or convert it with `memoro import`."
        ) from None
    except MemoroError as error:
        raise TaskFileError(f"{path}: {error}") from None


def _check_header(path: Path, most: int) -> None:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a FIFO would block
            what = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise TaskFileError(f"cannot read {path}: it is {what}.")
        with path.open("rb") as file:
            first = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise TaskFileError(f"cannot read {path} ({error.strerror}).") from None
    size = found.st_size
    if size > most:
        raise TaskFileError(f"{path} is {size >> 20} MiB; task files must not exceed {most >> 20} MiB.")
    if size < 8 or first > min(size - 8, MAX_HEADER):
        raise TaskFileError(f"{path} is not a safetensors file, or it is truncated: download it again.")


def _read_record(file: Any) -> Section:
    text = (file.metadata() or {}).get(KEY)
    if text is None:
        raise TaskFileError(
            "a safetensors file, but not a memoro file (it has no 'memoro' record). A backbone is loaded with "
            "load_backbone(), a checkpoint of the public reproduction with import_tasks()."
        )
    if _count_brackets(text) > MAX_BRACKETS:  # each becomes an object of many times its size
        raise TaskFileError("the record has too many parts.")
    record = Section(json.loads(text, parse_constant=_finite, parse_float=_finite))
    version = record.values.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise TaskFileError(f"the format {version!r} is not a version number.")
    if version > FORMAT:
        raise TaskFileError(
            f"the file has format {version}; this version of memoro reads formats up to {FORMAT}. Use a newer "
            "version of memoro."
        )
    return record


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise TaskFileError(f"the record contains {number[:20]}, which is not a finite number.")
    return value


def read_spec(item: Section) -> dict[str, Any]:
    """What `write_spec` wrote of a spec, checked: the fields of a ModelSpec."""
    name, preprocessing = check_name(item.values.get("name")), item.values.get("preprocessing")
    return {
        "name": name,
        "labels": check_labels(item.values.get("labels"), name),
        "kind": item.choice("kind", get_args(HeadKind)),
        "backbone": read_backbone(item.section("backbone")),
        "preprocessing": None if preprocessing is None else Preprocessing.from_json(preprocessing),
        "training": item.section("training").values,
        "metrics": item.section("metrics").values,
    }


def read_backbone(item: Section) -> BackboneRecord:
    """What a file says of its backbone, checked."""
    fingerprint = item.section("fingerprint")
    return BackboneRecord(
        name=item.text("name"),
        family=item.text("family"),
        dim=item.whole("dim", 1, MAX_DIM),
        depth=item.whole("depth", 1, MAX_DEPTH),
        fingerprint=Fingerprint(
            digest=fingerprint.text("digest"),
            sketch=fingerprint.numbers("sketch", 0, MAX_DEPTH + 2, -1e6, 1e6),
            dtype=fingerprint.text("dtype"),
        ),
    )


def read_tensors(file: Any, name: str, shapes: Mapping[str, Sequence[int]], prefix: str = "") -> dict[str, Tensor]:
    """Tensors of an open file, if they have these shapes, a float dtype and finite values."""
    tensors: dict[str, Tensor] = {}
    for part, shape in shapes.items():
        key, what = f"{prefix}{part}", f"{name!r}: {part}"
        stored = file.get_slice(key)  # raises if it is missing; loads nothing yet
        if stored.get_shape() != list(shape):
            raise TaskFileError(f"{what} has shape {stored.get_shape()} instead of {list(shape)}.")
        if stored.get_dtype() not in DTYPES:
            raise TaskFileError(f"{what} is {stored.get_dtype()}; weights are {', '.join(DTYPES)}.")
        tensors[part] = file.get_tensor(key)
        if not torch.isfinite(tensors[part]).all():
            raise TaskFileError(f"{what} contains NaN or infinity.")
    return tensors


def check_content(item: Section, name: str, content: str) -> None:
    """Raises if the content's hash is not the one in the record."""
    if item.text("content") != content:
        raise TaskFileError(f"{name!r}: the weights or the record were changed after saving: download the file again.")


MAX_TEXT = 200
SKETCH = "image_sketch"
"""The fact by which the images that a task learned from are recognised; it is not for people."""


def describe_fact(value: object, most: int = MAX_TEXT) -> str:
    """Any value as a short text. It may contain control characters."""
    try:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    except RecursionError:
        text = "nested too deeply to show"
    except ValueError:  # Python writes no more than 4300 digits
        text = "a number too large to show"
    return text if len(text) <= most else f"{text[:most]}…"


def finite_number(value: object) -> float | None:
    """The value as a float, if it is a number that fits one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def short_facts(training: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The facts about a training that fit on a line; lists of numbers, and numbers that are too large, as text."""
    found: dict[str, str | int | float] = {}
    for name, value in training.items():
        if isinstance(value, (str, bool)) or finite_number(value) is not None:
            found[name] = value
        elif isinstance(value, (int, float)):
            found[name] = describe_fact(value)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(one, (int, float)) for one in value):
            found[name] = describe_fact(", ".join(map(describe_fact, value[:MAX_TEXT])))
    return found
