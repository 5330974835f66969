"""Files of baselines: the same outputs after loading, stable bytes, and nothing believed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from baseline_models import build, images, pairs, shaken, train
from conftest import in_fork
from families import FAMILIES, Case
from safetensors import safe_open
from safetensors.torch import save_file

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskFileError
from memoro.images import Preprocessing
from memoro.lab.baselines import BASELINES, Baseline
from memoro.lab.baselines.file import load_baseline, read_hashes, save_baseline
from memoro.regimes.regime import all_parameters


@pytest.fixture
def saved(backbone: Backbone, tmp_path: Path) -> Path:
    model = shaken(build(backbone, "adapter+memory-full"))
    model.update_spec(training={"epochs": 3}, metrics={"accuracy": 0.5}, preprocessing=Preprocessing(resize=(20, 20)))
    return save_baseline(model, tmp_path / "pets.safetensors")


def take(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Record and tensors of a file."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["memoro"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def put(path: Path, record: object, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path, metadata={"memoro": json.dumps(record)})
    return path


@pairs
def test_a_file_gives_the_same_outputs(case: Case, name: str, tmp_path: Path) -> None:
    backbone, pixels = memoro.load_backbone(case.model()), images(2)
    model = build(backbone, name)
    train(model, pixels, torch.tensor([0, 1]), steps=1)
    model.update_spec(training={"epochs": 3}, metrics={"accuracy": 0.5})
    path = save_baseline(model, tmp_path / "pets.safetensors")
    fresh = memoro.load_backbone(case.model())
    loaded = load_baseline(path, fresh)
    assert isinstance(loaded, Baseline)
    assert loaded.spec == model.spec
    assert (loaded.name, loaded.labels, loaded.kind, loaded.regime) == ("pets", ["a", "b", "c"], "softmax", name)
    assert loaded.content_hash() == model.content_hash()
    with torch.no_grad():
        assert torch.equal(loaded(pixels), model(pixels))
        assert not torch.equal(loaded(pixels), build(fresh, name)(pixels))
    again = save_baseline(loaded, tmp_path / "again.safetensors")
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", ["memory-full", "full", "lora"])
def test_another_dtype_of_the_same_backbone(name: str, tmp_path: Path) -> None:
    case = FAMILIES[0]
    model = shaken(build(memoro.load_backbone(case.model()), name))
    path = save_baseline(model, tmp_path / "pets.safetensors")
    pixels = images(2)
    wide = load_baseline(path, memoro.load_backbone(case.model(), dtype=torch.float64))
    assert torch.allclose(wide(pixels.double()).float(), model(pixels), atol=1e-4)  # float32 over five layers


def test_only_what_was_trained_is_stored(saved: Path, backbone: Backbone, tmp_path: Path) -> None:
    record, tensors = take(saved)
    assert set(tensors) == {"class_token", "memory", "down", "up", "head.weight", "head.bias"}
    assert set(record) == {"format", "baseline"}
    assert set(record["baseline"]) == {
        "name", "labels", "kind", "regime", "sizes", "backbone", "preprocessing", "training", "metrics", "content",
    }  # fmt: skip
    _, tensors = take(save_baseline(build(backbone, "full"), tmp_path / "full.safetensors"))
    assert set(tensors) == {*backbone.anatomy.tensors, "head.weight", "head.bias"}


def test_telling_files_apart(saved: Path, backbone: Backbone, tmp_path: Path) -> None:
    task = memoro.save_task(memoro.new_task(backbone, "one", ["a", "b"]), tmp_path / "task.safetensors")
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff" * 100)
    assert read_hashes(saved) == [load_baseline(saved, backbone).content_hash()]
    for path in (task, noise, tmp_path / "nothing", tmp_path):
        with pytest.raises(TaskFileError):
            read_hashes(path)
    for load in (memoro.load_task, memoro.load_tasks):
        with pytest.raises(TaskFileError, match=r"contains a baseline, which has a pass of its own.*load_baseline"):
            load(saved)
    with pytest.raises(TaskFileError, match=r"contains tasks: read it with load_task\(\)"):
        load_baseline(task, backbone)
    with pytest.raises(TaskFileError, match=r"save_task\(\)"):
        save_baseline(memoro.load_task(task), tmp_path / "x")  # type: ignore[arg-type]


def test_another_backbone_is_refused(saved: Path) -> None:
    for other in (FAMILIES[0].model(seed=8), FAMILIES[1].model()):
        with pytest.raises(TaskFileError, match=r"'pets' was trained for ViTForImageClass.*train the task again"):
            load_baseline(saved, memoro.load_backbone(other))


def test_what_is_not_finite_is_not_saved(backbone: Backbone, tmp_path: Path) -> None:
    for name in BASELINES:
        model = build(backbone, name)
        with torch.no_grad():
            next(iter(all_parameters(model).values())).view(-1)[0] = float("nan")
        with pytest.raises(TaskFileError, match="NaN or infinity; it was not saved"):
            save_baseline(model, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"regime": "magic"}, "unknown regime 'magic'; a newer version of memoro may know it"),
    ({"regime": 7}, "regime in the record must be a short string"),
    ({"regime": "memory-full"}, "the sizes of regime 'memory-full' are cells"),
    ({"sizes": {"cells": 3}}, "the sizes of regime .* are cells, width"),
    ({"sizes": {"cells": 4096, "width": 4096}}, "has shape .* instead of"),
    ({"sizes": {"cells": 10**9, "width": 2}}, "cells in the record must be a whole number"),
    ({"sizes": {"cells": True, "width": 2}}, "cells in the record must be a whole number"),
    ({"sizes": None}, "sizes in the record must be a JSON object"),
    ({"kind": "ranking"}, "kind in the record must be one of"),
    ({"labels": ["a", "b"]}, "head.weight has shape"),
    ({"labels": ["a", "b", "z"]}, "changed after saving"),
    ({"name": "../pets"}, "looks like a path"),
    ({"name": "other"}, "changed after saving"),
    ({"content": "0" * 64}, "changed after saving"),
    ({"backbone": {}}, "fingerprint in the record"),
    ({"preprocessing": {"resize": "x"}}, "resize"),
    ({"training": []}, "training in the record must be a JSON object"),
]


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=lambda value: str(value)[:40])
def test_a_changed_record_is_refused(
    saved: Path, backbone: Backbone, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    record, tensors = take(saved)
    record["baseline"] |= changes
    with pytest.raises(TaskFileError, match=message):
        load_baseline(put(tmp_path / "bad.safetensors", record, tensors), backbone)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"format": 5, "baseline": {}}, "has format 5.*Use a newer version of memoro"),
        ({"format": 1, "baseline": []}, "baseline in the record must be a JSON object"),
        ({"format": 1}, "baseline in the record"),
        ([1], "the record is not a JSON object"),
    ],
)
def test_another_record_is_refused(backbone: Backbone, record: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=message):
        load_baseline(put(tmp_path / "bad.safetensors", record, {"x": torch.zeros(1)}), backbone)


def test_changed_tensors_are_refused(saved: Path, backbone: Backbone, tmp_path: Path) -> None:
    record, tensors = take(saved)
    bad = tmp_path / "bad.safetensors"
    nan = tensors["up"].clone()
    nan[0, 0, 0, 0] = float("nan")
    cases = [
        ({**tensors, "up": nan}, "up contains NaN"),
        ({**tensors, "up": tensors["up"] + 1}, "changed after saving"),
        ({**tensors, "up": tensors["up"].to(torch.int32)}, "up is I32; weights are"),
        ({**tensors, "up": tensors["up"][:1].clone()}, r"up has shape \[1, 2, 24, 2\] instead of \[5, 2, 24, 2\]"),
        ({**tensors, "evil": torch.zeros(1)}, "does not train \\('evil'\\)"),
        ({name: tensor for name, tensor in tensors.items() if name != "up"}, "up"),
    ]
    for changed, message in cases:
        with pytest.raises(TaskFileError, match=message):
            load_baseline(put(bad, record, changed), backbone)
    for count in (0, 7, 8, 100, saved.stat().st_size - 1):
        bad.write_bytes(saved.read_bytes()[:count])
        with pytest.raises(TaskFileError, match="truncated"):
            load_baseline(bad, backbone)
    assert load_baseline(saved, backbone).name == "pets"


def test_mutated_files_raise_only_our_error(saved: Path, backbone: Backbone, tmp_path: Path) -> None:
    data, bad = saved.read_bytes(), tmp_path / "bad.safetensors"
    header, generator = 8 + int.from_bytes(data[:8], "little"), random.Random(3)
    refused = 0
    for number in range(300):
        changed = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            changed[generator.randrange(header if number % 3 else len(data))] = generator.randrange(256)
        bad.write_bytes(changed)
        try:
            load_baseline(bad, backbone)
        except TaskFileError:
            refused += 1
    assert refused > 200


def test_a_killed_save_leaves_the_old_file(backbone: Backbone, vit: Any, tmp_path: Path) -> None:
    path = save_baseline(build(backbone, "full"), tmp_path / "pets.safetensors")
    vit.save_pretrained(tmp_path / "vit")
    before = path.read_bytes()

    def save() -> None:
        model = load_baseline(path, memoro.load_backbone(tmp_path / "vit"))
        model.update_spec(metrics={"x": 1})
        os.fsync = lambda _: os.kill(os.getpid(), 9)
        save_baseline(model, path)

    process = in_fork(save)
    process.join(60)
    assert process.exitcode == -9
    assert path.read_bytes() == before
