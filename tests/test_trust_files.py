"""Calibration and familiarity in task files: kept, and refused if they are damaged or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from trust import known

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskFileError
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Familiarity, fit_familiarity
from memoro.tasks.task import Task

__all__ = ["known"]  # fixtures


def test_sections_are_kept_and_leave_the_content_as_it_is(known: Task, tmp_path: Path) -> None:
    content, path = known.content_hash(), tmp_path / "pets.safetensors"
    memoro.save_task(known, path)
    back = memoro.load_task(path)
    assert back.spec.calibration == known.spec.calibration
    mine, kept = known.spec.familiarity, back.spec.familiarity
    assert mine is not None
    assert kept is not None
    assert all(torch.equal(mine.tensors[name], tensor) for name, tensor in kept.tensors.items())
    assert (kept.residual, kept.images, kept.energy) == (mine.residual, 150, mine.energy)
    assert memoro.save_task(back, tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    back.update_spec(calibration=None, familiarity=None)
    plain = memoro.load_task(memoro.save_task(back, path))
    assert (plain.spec.calibration, plain.spec.familiarity) == (None, None)
    assert plain.content_hash() == content


def test_near_identical_images_can_be_saved(backbone: Backbone, tmp_path: Path) -> None:
    tokens = torch.zeros(40, backbone.dim)
    tokens[0] = 100.0
    found = fit_familiarity(tokens, None, torch.zeros(backbone.dim))
    assert found is not None
    assert float(found.distances[-1]) == 1e6, "as far as a distance goes"
    task = random_task(backbone, "pets")
    task.update_spec(familiarity=found)
    path = memoro.save_task(task, tmp_path / "pets.safetensors")
    assert memoro.load_task(path).spec.familiarity is not None
    assert fit_familiarity(tokens * 1e5, None, torch.zeros(backbone.dim)) is None, "beyond what a file may hold"


def test_what_cannot_be_loaded_is_not_saved(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    before = path.read_bytes()
    assert known.spec.familiarity is not None
    tensors = {**known.spec.familiarity.tensors, "distances": torch.full((5,), 1e9)}
    known.update_spec(familiarity=Familiarity(**tensors, residual=1.0, images=5))
    with pytest.raises(TaskFileError, match="invalid values: compute it again"):
        memoro.save_task(known, path)
    assert path.read_bytes() == before


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Changes the first task's record and the tensors, with right checksums."""
    from memoro.tasks.spec import hash_record

    with safe_open(path, "pt") as file:
        record = json.loads(file.metadata()["memoro"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(record["tasks"][0], tensors)
    for name, prefix in (("calibration", "none"), ("familiarity", "0.familiarity.")):
        section = record["tasks"][0].get(name)
        if isinstance(section, dict) and section.get("checksum") != "wrong":
            section.pop("checksum", None)
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            section["checksum"] = hash_record(section, own)
    save_file(tensors, path, metadata={"memoro": json.dumps(record)})


def put(section: str, **fields: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda record, tensors: record[section].update(fields)


def scale(part: str, factor: float) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"0.familiarity.{part}"] = tensors[f"0.familiarity.{part}"].float() * factor

    return change


def no_variance_in_half_precision(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["0.familiarity.variances"] = torch.zeros_like(tensors["0.familiarity.variances"]).half()


def another_width(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["0.familiarity.directions"] = tensors["0.familiarity.directions"][:, 1:].contiguous()


def without_section(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del record["familiarity"]


ATTACKS: dict[str, tuple[Any, str]] = {
    "temperature 0": (put("calibration", temperature=[0]), "temperature"),
    "two temperatures": (put("calibration", temperature=[1, 1]), "temperature"),
    "temperature of text": (put("calibration", temperature=["1"]), "temperature"),
    "thresholds of another kind": (put("calibration", thresholds=[0.5]), "thresholds"),
    "no images": (put("calibration", images=0), "images"),
    "long source": (put("calibration", source="x" * 5000), "source"),
    "changed calibration": (put("calibration", checksum="wrong"), "changed after saving"),
    "changed familiarity": (put("familiarity", checksum="wrong"), "changed after saving"),
    "huge": (put("familiarity", directions=2**60), "directions"),
    "hostile scores": (put("familiarity", scores=10**9), "scores"),
    "more classes than labels": (put("familiarity", classes=4), "classes"),
    "other shape": (put("familiarity", scores=7), "shape"),
    "negative residual": (put("familiarity", residual=-1.0), "residual"),
    "huge energy": (put("familiarity", energy=[1e30, 1.0]), "energy"),
    "negative spread of energies": (put("familiarity", energy=[0.0, -1.0]), "energy"),
    "energy of text": (put("familiarity", energy=["1", 1.0]), "energy"),
    "three energies": (put("familiarity", energy=[1.0, 1.0, 1.0]), "energy"),
    "another width": (another_width, "shape"),
    "NaN": (scale("center", float("nan")), "NaN"),
    "infinity": (scale("means", float("inf")), "NaN or infinity"),
    "overflow": (scale("center", 1e30), "invalid values"),
    "background": (scale("background", 1e30), "invalid values"),
    "background NaN": (scale("background", float("nan")), "NaN"),
    "no variance": (scale("variances", 0.0), "invalid values"),
    "no variance, in half precision": (no_variance_in_half_precision, "invalid values"),
    "negative distances": (scale("distances", -1.0), "invalid values"),
    "long directions": (scale("directions", 1e4), "invalid values"),
    "tensors without a section": (without_section, "belong to none"),
    "a list": (lambda record, tensors: record.update(familiarity=[]), "JSON object"),
    "a number": (lambda record, tensors: record.update(calibration=1), "JSON object"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_sections_are_refused(known: Task, tmp_path: Path, name: str) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    change, words = ATTACKS[name]
    rewrite(path, change)
    with pytest.raises(TaskFileError, match=words) as caught:
        memoro.load_task(path)
    assert str(path) in str(caught.value)


def test_a_rewritten_file_with_valid_values_is_loaded(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    rewrite(path, put("calibration", temperature=[2.5], source="elsewhere"))
    found = memoro.load_task(path)
    assert found.spec.calibration == Calibration((2.5,), (), (), 90, "elsewhere")
    assert found.content_hash() == known.content_hash()
