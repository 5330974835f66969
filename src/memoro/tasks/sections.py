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
from memoro.tasks.task import TaskSpec

PREFIX = "familiarity."
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
            "scores": len(own.distances),
            "residual": own.residual,
            "images": own.images,
            "energy": list(own.energy),
        }
        record["familiarity"] = {**section, "checksum": hash_record(section, own.tensors)}
        tensors = write_tensors(spec.name, own.tensors, prefix + PREFIX)
    return record, tensors


def section_tensors(item: Mapping[str, Any], dim: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of a task's familiarity, none where it has none."""
    if "familiarity" not in item:
        return {}
    section = read_object(item, "familiarity")
    sizes = {
        "directions": read_whole(section, "directions", 1, min(dim, MAX_DIRECTIONS)),
        "classes": read_whole(section, "classes", 1, max(1, len(read_list(item, "labels", 1, 1 << 30)))),
        "scores": read_whole(section, "scores", 1, MAX_SCORES),
    }
    return {PREFIX + name: shape for name, shape in tensor_shapes(sizes, dim).items()}


def read_sections(item: Mapping[str, Any], spec: TaskSpec, file: Any, prefix: str) -> dict[str, Any]:
    """The fields of a TaskSpec that the sections hold, checked."""
    found: dict[str, Any] = {}
    if "calibration" in item:
        found["calibration"] = _read_calibration(read_object(item, "calibration"), spec)
    if shapes := section_tensors(item, spec.backbone.dim):
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
    residual = read_number(section, "residual", SMALLEST, LARGEST)
    images = read_whole(section, "images", 1, MAX_IMAGES)
    bounds = ((-LARGEST, LARGEST), (0.0, LARGEST))
    stated = read_list(section, "energy", 2, 2) if "energy" in section else (0.0, 0.0)
    mean, spread = (read_number({"energy": one}, "energy", *own) for one, own in zip(stated, bounds, strict=True))
    _check_sum(section, tensors, name, "familiarity")
    found = Familiarity(**tensors, residual=residual, images=images, energy=(mean, spread))
    return _check_values(found, name)


def _check_values(familiarity: Familiarity, name: str) -> Familiarity:
    if not familiarity.valid:
        raise TaskFileError(f"{name!r}: its familiarity has invalid values: compute it again with `memoro calibrate`.")
    return familiarity


def _check_sum(section: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, what: str) -> None:
    own = {key: value for key, value in section.items() if key != "checksum"}
    if read_text(section, "checksum") != hash_record(own, tensors):
        raise TaskFileError(f"{name!r}: its {what} was changed after saving: compute it again with `memoro calibrate`.")
