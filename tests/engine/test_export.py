"""ONNX files, run by ONNX Runtime. Tracing takes seconds, so tests share a file where they can."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import random_task
from families import CASES, Case
from PIL import Image
from test_train_cli import run
from trust import add_readout

import memoro
from memoro.cli.tasks import export
from memoro.engine.composition import Composition
from memoro.engine.streams import pool_pass
from memoro.errors import BackboneError, CompositionError
from memoro.images import Preprocessing
from memoro.lab.bench.export import bench_export
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Others, fit_familiarity

SMALL = Preprocessing(resize=(20, 20), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
FAMILIAR = 40
TOLERANCE = 1e-4  # other kernels sum in another order; float32, logits of about 10


def compose_small(case: Case) -> Composition:
    """Two layers, a task from the start and one that extends it later; inner parts of the graph have such names too."""
    backbone = memoro.load_backbone(case.model(num_hidden_layers=2).requires_grad_(False), processor=SMALL)
    linear = random_task(backbone, "linear", cells=2)
    own = torch.randn(FAMILIAR, 3, 20, 20, generator=torch.Generator().manual_seed(9))
    statistics = pool_pass(backbone.anatomy, own, 0)
    others = Others.of(pool_pass(backbone.anatomy, 2 * own.flip(0), 0))
    linear.update_spec(familiarity=fit_familiarity(statistics, torch.arange(FAMILIAR) % 3, others))
    fork = random_task(
        backbone, "älter 2.x", seed=1, cells=3, rank=2, from_layer=1, extends=[linear], head="multilabel"
    )
    head = random_task(backbone, "age", seed=2, from_layer=2, head="regression")
    add_readout(backbone, fork, seed=1)
    add_readout(backbone, head, seed=2, from_layer=0, share=1.0)
    fork.update_spec(calibration=Calibration((1.0, 1.0, 1.0), (0.3, 0.5, 0.8), (), 30, "validation"))
    head.update_spec(calibration=Calibration((), (), (2.0, 0.5, 1.0), 30, "validation"))
    return memoro.compose(backbone, [linear, fork, head])


class Exported(NamedTuple):
    model: Composition
    path: Path

    def run(self, **feed: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
        session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return {name: torch.from_numpy(out) for name, out in zip(names, session.run(names, feed), strict=True)}


def check_answers(exported: Exported) -> None:
    """One file answers any number of images as memoro does."""
    for count in (1, 5, 32):
        pixels = torch.randn(count, 3, 20, 20, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected, judged, _ = exported.model.run(pixels)
        found = exported.run(pixel_values=pixels.numpy())
        for name, right in expected.items():
            assert (found[name] - right).abs().max() < TOLERANCE, name
        assert (found["linear.probabilities"] - expected["linear"].softmax(-1)).abs().max() < TOLERANCE
        assert (found["älter 2.x.probabilities"] - expected["älter 2.x"].sigmoid()).abs().max() < TOLERANCE
        assert (found["linear"] - found["älter 2.x"]).abs().max() > 0.1
        familiarity = found["linear.familiarity"]
        # A step function: rounding may move a distance over one of its steps.
        assert (familiarity - judged["linear"].familiarity).abs().max() < 1.5 / FAMILIAR
        assert count == 1 or familiarity.std() > 0.01, "it differs from image to image"
        assert set(found) == {*expected, "linear.probabilities", "älter 2.x.probabilities", "linear.familiarity"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    model = compose_small(CASES[0])
    return Exported(model, model.export(tmp_path_factory.mktemp("onnx") / "new" / "vit.onnx"))


def test_the_file_answers_as_memoro_does(exported: Exported) -> None:
    check_answers(exported)
    assert os.listdir(exported.path.parent) == ["vit.onnx"]


def test_the_file_describes_itself(exported: Exported) -> None:
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    record = json.loads({prop.key: prop.value for prop in model.metadata_props}["memoro"])
    assert record["input"] == {
        "name": "pixel_values", "dtype": "float32", "shape": ["batch", 3, 20, 20], "layout": "NCHW"
    }  # fmt: skip
    assert record["tasks"]["älter 2.x"]["labels"] == ["a", "b", "c"]
    assert record["tasks"]["älter 2.x"]["extends"] == ["linear"]
    assert record["tasks"]["älter 2.x"]["thresholds"] == [0.3, 0.5, 0.8]
    assert record["tasks"]["age"]["spread"] == [2.0, 0.5, 1.0]
    assert not {"thresholds", "spread"} & record["tasks"]["linear"].keys()
    assert record["tasks"]["linear"]["content"] == exported.model.tasks["linear"].content_hash()
    assert Preprocessing.from_json(record["preprocessing"]) == SMALL
    assert record["backbone"]["fingerprint"]["digest"] == exported.model.backbone.fingerprint.digest
    assert record["outputs"] == [output.name for output in model.graph.output]
    for name in record["outputs"]:
        if name.startswith("linear"):
            assert name.replace("linear", "NAME") in str(export.__doc__), "the help names all outputs"
    assert {output.type.tensor_type.shape.dim[0].dim_param for output in model.graph.output} == {"batch"}
    assert str(Path(memoro.__file__).parent) not in str(model)  # no paths of this machine


def test_the_command_exports_bytes_as_input(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "clip")
    case.model(num_hidden_layers=1).save_pretrained(tmp_path / "clip")
    backbone = memoro.load_backbone(tmp_path / "clip")
    pets = random_task(backbone, "pets", labels=["cat", "dog"])
    pets.update_spec(preprocessing=SMALL, calibration=Calibration((2.5,), (), (), 30, "validation"))
    memoro.save_task(pets, tmp_path / "pets.safetensors")
    said = run(tmp_path, "export", "-b", "clip", "-t", "pets.safetensors", "-o", "model.onnx", "--images")
    assert said.stdout.startswith("model.onnx: pets (")
    assert said.stderr == "exporting 1 task; this may take a minute\n"
    model = memoro.compose(backbone, [pets])
    photos = [Image.effect_noise((30 + at, 40), 90).convert("RGB") for at in range(3)]
    images = np.stack([np.asarray(SMALL.fit(photo)) for photo in photos])
    found = Exported(model, tmp_path / "model.onnx").run(images=images)["pets.probabilities"]
    for row, answer in zip(found, model.predict(photos), strict=True):
        assert float(row[0]) == pytest.approx(answer["pets"]["probabilities"]["cat"], abs=TOLERANCE)
    assert found.std(dim=0).max() > 10 * TOLERANCE


def test_a_composition_exports_by_itself(pixels: torch.Tensor) -> None:
    backbone = memoro.load_backbone(CASES[0].model(num_hidden_layers=1))
    model = memoro.compose(backbone, [random_task(backbone, "a"), random_task(backbone, "b", seed=1, from_layer=1)])
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (pixels,), dynamic_shapes={"pixel_values": {0: batch}})
    more = torch.randn(7, 3, 20, 20)
    found = program.module()(more)
    for name, out in model(more).items():
        assert torch.equal(found[name], out)  # the same operations


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "vit"], ids=lambda case: case.name)
def test_every_family_answers_as_memoro_does(case: Case, tmp_path: Path) -> None:
    model = compose_small(case)
    check_answers(Exported(model, model.export(tmp_path / "model.onnx")))


def test_what_cannot_be_one_file_is_refused(backbone: memoro.Backbone, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    small, large = random_task(backbone, "small"), random_task(backbone, "large")
    small.update_spec(preprocessing=replace(SMALL, resize=(12, 12)))
    large.update_spec(preprocessing=SMALL)
    with pytest.raises(CompositionError, match=r"its own file: small \(12x12\); large \(20x20\)"):
        memoro.compose(backbone, [small, large]).export(path)
    child = random_task(backbone, "child", extends=[small])
    child.update_spec(preprocessing=SMALL)
    with pytest.raises(CompositionError, match=r"'child' extends 'small', but .* retrain one of them"):
        memoro.compose(backbone, [small, child]).export(path)
    names = [random_task(backbone, name) for name in ("pets", "pets.probabilities")]
    with pytest.raises(CompositionError, match=r"'pets\.probabilities' names two parts"):
        memoro.compose(backbone, names).export(path)
    with pytest.raises(CompositionError, match="rename the task 'images'"):
        memoro.compose(backbone, [random_task(backbone, "images")]).export(path, images=True)
    assert not path.exists()


def test_a_model_that_torch_cannot_export_says_why(backbone: memoro.Backbone, tmp_path: Path) -> None:
    def embed(pixels: torch.Tensor) -> Any:
        if pixels.mean() > 0:  # a branch on values has no graph
            raise AssertionError
        return anatomy.embed(pixels)

    anatomy = backbone.anatomy
    odd = replace(backbone, take_apart=lambda module: replace(anatomy, embed=embed))
    with pytest.raises(BackboneError, match="torch cannot export ViTForImageClassification"):
        memoro.compose(odd).export(tmp_path / "model.onnx")


@pytest.mark.slow
def test_bench_rows() -> None:
    backbone = memoro.load_backbone(CASES[0].model(num_hidden_layers=1))
    (row,) = bench_export(backbone, counts=[2], cells=1, batch=3, rounds=1, seconds=60)
    assert row["tasks"] == 2
    assert row["torch"] > 0
    assert row["onnx"] > 0
    assert 0 < row["difference"] < TOLERANCE
    assert row["bytes"] > 10_000
