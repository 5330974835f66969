"""The optional sections of a task's record: calibration and familiarity. They have checksums of their own, so that a
task stays the same for its children when it is calibrated again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from memoro.errors import TaskFileError
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import LARGEST, SMALLEST, Familiarity, tensor_shapes
from memoro.tasks.record import read_list, read_number, read_object, read_tensors, read_text, read_whole, write_tensors
from memoro.tasks.spec import hash_record
from memoro.tasks.taskspec import MAX_STATISTICS, TaskSpec

PREFIX = "familiarity."
NUMBERS = {
    "residual": (SMALLEST, LARGEST),
    "slope": (0.0, LARGEST),
    "offset": (-LARGEST, LARGEST),
    "noticed": (0.0, 1.0),
}
"""The fields of a familiarity that are numbers, and their bounds."""
MAX_DIRECTIONS = 1024
MAX_SCORES = 4096
MAX_IMAGES = 10**12


def write_sections(spec: TaskSpec, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file holds of a task's calibration and familiarity: entries of its record, and tensors."""
    record: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if spec.calibration is not None:
        section = spec.calibration.to_json()
        record["calibration"] = {**section, "checksum": hash_record(section, {})}
    if spec.familiarity is not None:
        own = _check_values(spec.familiarity, spec.name)
        section = {
            "directions": len(own.directions),
            "classes": len(own.means),
            "features": len(own.reader),
            "scores": len(own.held_out),
            **{name: getattr(own, name) for name in NUMBERS},
            "images": own.images,
        }
        record["familiarity"] = {**section, "checksum": hash_record(section, own.tensors)}
        tensors = write_tensors(spec.name, own.tensors, prefix + PREFIX)
    return record, tensors


def section_tensors(item: Mapping[str, Any], dim: int, depth: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of a task's familiarity, none if it has none."""
    if "familiarity" not in item:
        return {}
    section = read_object(item, "familiarity")
    outdated = _is_outdated(section)
    sizes = {
        "directions": read_whole(section, "directions", 1, min(dim, MAX_DIRECTIONS)),
        "classes": read_whole(section, "classes", 1, max(1, len(read_list(item, "labels", 1, 1 << 30)))),
        "features": 0 if outdated else read_whole(section, "features", 0, depth * MAX_STATISTICS * dim),
        "scores": read_whole(section, "scores", 1, MAX_SCORES),
    }
    shapes = tensor_shapes(sizes, dim)
    if outdated:
        del shapes["reader"]
        shapes |= {"background": (dim,), "distances": shapes.pop("held_out")}
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _is_outdated(section: Mapping[str, Any]) -> bool:
    """Whether a familiarity was written by a version that measured it in another way. It is not read."""
    return "slope" not in section


def read_sections(item: Mapping[str, Any], spec: TaskSpec, file: Any, prefix: str) -> dict[str, Any]:
    """The fields of a TaskSpec that the sections hold, checked."""
    found: dict[str, Any] = {}
    if "calibration" in item:
        found["calibration"] = _read_calibration(read_object(item, "calibration"), spec)
    shapes = section_tensors(item, spec.backbone.dim, spec.backbone.depth)
    if shapes and not _is_outdated(item["familiarity"]):
        stored = read_tensors(file, spec.name, shapes, prefix)
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
        found["familiarity"] = _read_familiarity(read_object(item, "familiarity"), tensors, spec.name)
    return found


def _read_calibration(section: Mapping[str, Any], spec: TaskSpec) -> Calibration:
    labels = len(spec.labels)
    counts = {"softmax": (1, 0, 0), "multilabel": (labels, labels, 0), "regression": (0, 0, labels)}[spec.kind]
    temperature, thresholds, spread = (
        tuple(read_number({name: value}, name, low, high) for value in read_list(section, name, count, count))
        for (name, low, high), count in zip(
            (("temperature", 1e-3, 1e3), ("thresholds", 1e-6, 1 - 1e-6), ("spread", 0.0, 1e300)), counts, strict=True
        )
    )
    images, source = read_whole(section, "images", 1, MAX_IMAGES), read_text(section, "source")
    calibration = Calibration(temperature, thresholds, spread, images, source)
    _check_sum(section, {}, spec.name, "calibration")
    return calibration


def _read_familiarity(section: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Familiarity:
    numbers = {number: read_number(section, number, *bounds) for number, bounds in NUMBERS.items()}
    images = read_whole(section, "images", 1, MAX_IMAGES)
    _check_sum(section, tensors, name, "familiarity")
    fields: dict[str, Any] = {**tensors, **numbers, "images": images}
    return _check_values(Familiarity(**fields), name)


def _check_values(familiarity: Familiarity, name: str) -> Familiarity:
    if not familiarity.valid:
        raise TaskFileError(f"{name!r}: its familiarity has invalid values: compute it again with `memoro calibrate`.")
    return familiarity


def _check_sum(section: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, what: str) -> None:
    own = {key: value for key, value in section.items() if key != "checksum"}
    if read_text(section, "checksum") != hash_record(own, tensors):
        raise TaskFileError(f"{name!r}: its {what} was changed after saving: compute it again with `memoro calibrate`.")
