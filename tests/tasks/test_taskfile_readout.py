"""Read-outs in task files: kept, and refused if they are damaged or hostile. Which format a file has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES
from random_tasks import join_members
from safetensors import safe_open
from task_files import assert_same, rewrite
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, TaskFileError
from memoro.tasks.calibration import Calibration
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task


def written_format(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return int(json.loads(file.metadata()["memoro"])["format"])


def test_the_oldest_format_that_can_hold_a_task_is_written(backbone: Backbone, tmp_path: Path) -> None:
    plain = random_task(backbone, "plain", rank=2)
    plain.update_spec(calibration=Calibration((1.5,), (), (), 50, "validation"), preprocessing=backbone.preprocessing)
    deep = random_task(backbone, "deep", seed=1)
    deep.update_spec(preprocessing=replace(backbone.preprocessing, white=4095))
    ensemble = join_members([random_task(backbone, "ensemble", seed=seed) for seed in range(2)])
    read = add_readout(backbone, random_task(backbone, "read", seed=2))
    for tasks, version in (([plain], 2), ([ensemble], 3), ([read], 4), ([deep], 4), ([plain, ensemble, read], 4)):
        path = memoro.save_tasks(tasks, tmp_path / "tasks.safetensors")
        assert written_format(path) == version
        for older in range(1, 5):  # what a file holds is read whatever its number
            rewrite(path, lambda r, t, older=older: r.update(format=older))
            for task, loaded in zip(tasks, memoro.load_tasks(path), strict=True):
                assert_same(task, loaded)


@pytest.mark.parametrize(("share", "from_layer"), [(0.5, 1), (1.0, 0), (0.25, 4)])
@pytest.mark.parametrize("kind", ["softmax", "multilabel", "regression"])
def test_a_read_out_survives_its_file(
    backbone: Backbone, tmp_path: Path, pixels: torch.Tensor, kind: Any, share: float, from_layer: int
) -> None:
    plain = random_task(backbone, "one", rank=2, from_layer=2, head=kind)
    content = plain.content_hash()
    task = add_readout(backbone, random_task(backbone, "one", rank=2, from_layer=2, head=kind), from_layer=from_layer)
    other = add_readout(backbone, random_task(backbone, "one", rank=2, from_layer=2, head=kind), share=share, seed=1)
    path = memoro.save_task(other, tmp_path / "one.safetensors")
    loaded = memoro.load_task(path)
    assert_same(other, loaded)
    assert memoro.save_task(loaded, tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert len({task.content_hash(), other.content_hash(), content}) == 3
    answers = [memoro.compose(backbone, one)(pixels)["one"] for one in (other, loaded, task, plain)]
    assert torch.equal(answers[0], answers[1])
    assert not torch.allclose(answers[0], answers[2], atol=0.01)
    assert not torch.allclose(answers[0], answers[3], atol=0.01)
    with safe_open(path, "pt") as file:
        assert file.get_slice("0.readout.weight").get_dtype() == "F16", "half the size, and the same values"


def test_a_read_out_can_be_taken_away(backbone: Backbone, pixels: torch.Tensor) -> None:
    plain, task = (random_task(backbone, "one") for _ in range(2))
    add_readout(backbone, task, share=0.5)
    assert torch.equal(task.head.weight, plain.head.weight / 2)
    add_readout(backbone, task, seed=1, from_layer=3, share=0.25)  # in place of the first one
    assert torch.allclose(task.head.weight, plain.head.weight * 0.75)
    assert task.content_hash() != plain.content_hash()
    task.detach_readout()
    assert task.readout is None
    assert torch.allclose(task.head.weight, plain.head.weight)
    answers = [memoro.compose(backbone, one)(pixels)["one"] for one in (task, plain)]
    assert torch.allclose(*answers, atol=1e-5), "divided by what it was multiplied by"


@pytest.fixture
def read(backbone: Backbone) -> Task:
    """A task with a read-out of layers 1 to 4."""
    return add_readout(backbone, random_task(backbone, "pets", cells=2, labels=["cat", "dog", "öre"]))


def reads(**fields: Any) -> Any:
    return lambda r, t: r["tasks"][0]["readout"].update(fields)


def outgrow_halves(r: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    t["0.readout.weight"] = t["0.readout.weight"].double() * 1e300


READ_OUT_ATTACKS: dict[str, tuple[Any, str]] = {
    "a read-out that is a list": (lambda r, t: r["tasks"][0].update(readout=[]), "JSON object"),
    "no read-out, but its weights": (lambda r, t: r["tasks"][0].pop("readout"), "belong to none"),
    "a read-out without weights": (lambda r, t: t.pop("0.readout.weight"), "readout.weight"),
    "no bias": (lambda r, t: t.pop("0.readout.bias"), "readout.bias"),
    "before the first layer": (reads(from_layer=-1), "from_layer"),
    "after the last layer": (reads(from_layer=5), "from_layer"),
    "from a layer of text": (reads(from_layer="1"), "from_layer"),
    "another layer": (reads(from_layer=2), "shape"),
    "no statistics": (reads(statistics=0), "statistics"),
    "four statistics": (reads(statistics=4), "statistics"),
    "two statistics": (reads(statistics=2), "shape"),
    "hostile statistics": (reads(statistics=2**60), "statistics"),
    "no share": (lambda r, t: r["tasks"][0]["readout"].pop("share"), "share"),
    "a share of nothing": (reads(share=0), "share"),
    "more than all": (reads(share=1.5), "share"),
    "a share that is true": (reads(share=True), "share"),
    "another share": (reads(share=0.4), "changed after saving"),
    "changed weights": (lambda r, t: t["0.readout.weight"].add_(1), "changed after saving"),
    "changed bias": (lambda r, t: t["0.readout.bias"].add_(1), "changed after saving"),
    "more rows": (lambda r, t: t.update({"0.readout.weight": torch.zeros(4, 288)}), "shape"),
    "bytes for weights": (lambda r, t: t.update({"0.readout.weight": t["0.readout.weight"].byte()}), "U8"),
    "NaN": (lambda r, t: t["0.readout.weight"].fill_(float("nan")), "NaN"),
    "infinity": (lambda r, t: t["0.readout.bias"].fill_(float("inf")), "NaN"),
    "beyond the task's dtype": (outgrow_halves, "beyond torch.float32"),
}


@pytest.mark.parametrize("attack", READ_OUT_ATTACKS)
def test_attacks_on_read_outs(attack: str, read: Task, tmp_path: Path) -> None:
    change, message = READ_OUT_ATTACKS[attack]
    path = memoro.save_task(read, tmp_path / "t.safetensors")
    assert_same(memoro.load_task(rewrite(path, lambda r, t: None)), read)
    with pytest.raises(TaskFileError, match=message):
        memoro.load_task(rewrite(path, change))


def test_a_read_out_of_another_kind_of_backbone_is_refused() -> None:
    """SigLIP has two statistics a layer, and nothing in the file says that a read-out of three is wrong."""
    backbone = memoro.load_backbone(next(case for case in CASES if case.name == "siglip").model())
    task = random_task(backbone, "pets")
    task.attach_readout(ReadOut(1, 3), torch.zeros(3, 4 * 3 * 24), torch.zeros(3))
    with pytest.raises(CompositionError, match="does not read 2 vectors a layer"):
        memoro.compose(backbone, task)
    assert memoro.compose(backbone, add_readout(backbone, task)).names == ["pets"]
