"""Calibration and familiarity in task files: kept, and refused if they are damaged or hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from trust import draw, fit, known, photographs, spread

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, TaskFileError
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Others, fit_familiarity
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
    numbers = [(one.residual, one.slope, one.offset, one.images, one.noticed) for one in (mine, kept)]
    assert numbers[0] == numbers[1]
    assert len(kept.reader) == 4 * 3 * 24
    assert memoro.save_task(back, tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    back.update_spec(calibration=None, familiarity=None)
    plain = memoro.load_task(memoro.save_task(back, path))
    assert (plain.spec.calibration, plain.spec.familiarity) == (None, None)
    assert plain.content_hash() == content


def test_near_identical_images_can_be_saved(backbone: Backbone, tmp_path: Path) -> None:
    tokens = torch.zeros(40, backbone.dim)
    tokens[0] = 100.0
    task = random_task(backbone, "pets")
    for others in (None, photographs(backbone.dim)):
        found = fit(tokens, None, others)
        assert found is not None
        task.update_spec(familiarity=found)
        path = memoro.save_task(task, tmp_path / "pets.safetensors")
        assert memoro.load_task(path).spec.familiarity is not None
    assert fit(tokens * 1e5, None) is None, "beyond what a file may hold"


def test_what_cannot_be_loaded_is_not_saved(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    before, right = path.read_bytes(), known.spec.familiarity
    assert right is not None
    for wrong in (
        replace(right, held_out=torch.full((5,), 1e9)),
        replace(right, slope=-1.0),
        replace(right, noticed=1.5),
        replace(right, reader=right.reader.float() * torch.inf),
    ):
        known.update_spec(familiarity=wrong)
        with pytest.raises(TaskFileError, match="invalid values: compute it again"):
            memoro.save_task(known, path)
    assert path.read_bytes() == before


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None], **fields: Any) -> None:
    """Changes the first task's record and the tensors, with right checksums; `fields` are of the whole record."""
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
    save_file(tensors, path, metadata={"memoro": json.dumps({**record, **fields})})


def put(section: str, **fields: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda record, tensors: record[section].update(fields)


def drop(field: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda record, tensors: record["familiarity"].pop(field)


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
    "features of more layers than there are": (put("familiarity", features=6 * 3 * 24), "features"),
    "hostile features": (put("familiarity", features=2**60), "features"),
    "fewer features": (put("familiarity", features=3 * 3 * 24), "shape"),
    "negative residual": (put("familiarity", residual=-1.0), "residual"),
    "negative slope": (put("familiarity", slope=-1.0), "slope"),
    "slope of text": (put("familiarity", slope="1"), "slope"),
    "huge slope": (put("familiarity", slope=1e30), "slope"),
    "huge offset": (put("familiarity", offset=-1e30), "offset"),
    "no offset": (drop("offset"), "offset"),
    "noticed more than all": (put("familiarity", noticed=1.5), "noticed"),
    "noticed is true": (put("familiarity", noticed=True), "noticed"),
    "another width": (another_width, "shape"),
    "NaN": (scale("center", float("nan")), "NaN"),
    "infinity": (scale("means", float("inf")), "NaN or infinity"),
    "overflow": (scale("center", 1e30), "invalid values"),
    "a reader beyond bounds": (scale("reader", 1e30), "invalid values"),
    "a reader of NaN": (scale("reader", float("nan")), "NaN"),
    "no variance": (scale("variances", 0.0), "invalid values"),
    "no variance, in half precision": (no_variance_in_half_precision, "invalid values"),
    "held-out images out of order": (scale("held_out", -1.0), "invalid values"),
    "held-out images beyond bounds": (scale("held_out", 1e9), "invalid values"),
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


def as_before(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The familiarity as formats up to 3 held it: distances relative to a background token, and energies."""
    section = record["familiarity"]
    for field in ("slope", "offset", "noticed", "features"):
        del section[field]
    section["energy"] = [1.0, 2.0]
    del tensors["0.familiarity.reader"]
    tensors["0.familiarity.background"] = torch.zeros(24)
    tensors["0.familiarity.distances"] = tensors.pop("0.familiarity.held_out")


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_an_outdated_familiarity_is_left_out(known: Task, tmp_path: Path, version: int, pixels: Tensor) -> None:
    """It means something else: the task loads as one that was never described, and can be described again."""
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    assert written_format(path) == 4
    rewrite(path, as_before, format=version)
    found = memoro.load_task(path)
    assert found.spec.familiarity is None
    assert found.spec.calibration == known.spec.calibration
    assert found.content_hash() == known.content_hash()
    backbone = memoro.load_backbone(CASES[0].model())
    assert memoro.compose(backbone, found).run(pixels).recognition == {}
    assert set(memoro.compose(backbone, known).run(pixels).recognition) == {"pets"}
    assert written_format(memoro.save_task(found, path)) == 2, "older versions can read what is left"


def test_an_outdated_section_is_bounded_as_well(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")

    def hostile(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        as_before(record, tensors)
        record["familiarity"]["directions"] = 2**60

    rewrite(path, hostile)
    with pytest.raises(TaskFileError, match="directions"):
        memoro.load_task(path)


def written_format(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return int(json.loads(file.metadata()["memoro"])["format"])


def test_a_description_of_another_kind_of_backbone_is_refused() -> None:
    """SigLIP has no class token, so its layers have two statistics each instead of three."""
    backbone = memoro.load_backbone(next(case for case in CASES if case.name == "siglip").model())
    task = random_task(backbone, "pets")
    tokens, classes = draw(60, 24, 3, seed=0)
    for layers, statistics, fits in ((4, 2, True), (5, 2, True), (4, 3, False), (3, 3, False), (5, 3, False)):
        some = Others.of(spread(4 * torch.randn(60, 24), layers, statistics))
        task.update_spec(familiarity=fit_familiarity(spread(tokens, layers, statistics), classes, some))
        if fits:
            judged = memoro.compose(backbone, task).run(torch.zeros(1, 3, 20, 20)).recognition
            assert judged["pets"].familiarity.isfinite().all()
        else:
            with pytest.raises(CompositionError, match="does not read 2 vectors a layer"):
                memoro.compose(backbone, task)
