"""Calibration and familiarity in use: in answers, in reports, and in `memoro eval --others`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from families import FAMILIES, Case
from oracle import hidden_states, pool_hidden_states
from PIL import Image
from trust import colours, known, run

import memoro
from memoro.backbones import Backbone
from memoro.engine.streams import pool_pass
from memoro.errors import CompositionError, DataError
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Familiarity, FamiliarityBank, Others, fit_familiarity
from memoro.tasks.task import Task

__all__ = ["colours", "known"]  # fixtures


def pictures(count: int, seed: int) -> list[Image.Image]:
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(count)]


def strange(known: Familiarity) -> Familiarity:
    """The same description, to which every image is unfamiliar."""
    return replace(known, held_out=torch.full((5,), -1e6), images=5)


def test_predict_marks_drops_or_keeps(backbone: Backbone, known: Task) -> None:
    other = random_task(backbone, "rooms", seed=1)
    assert known.spec.familiarity is not None
    other.update_spec(familiarity=strange(known.spec.familiarity))
    before = known.spec.familiarity
    assert "coarse" not in memoro.compose(backbone, known).predict(pictures(1, seed=0))[0]["pets"]
    known.update_spec(familiarity=replace(before, noticed=0.4))
    assert memoro.compose(backbone, known).predict(pictures(1, seed=0))[0]["pets"]["coarse"] is True
    known.update_spec(familiarity=replace(before, held_out=torch.full((5,), 1e6), images=5))
    plain = random_task(backbone, "plain", seed=2)
    model = memoro.compose(backbone, [known, other, plain])
    images = pictures(3, seed=0)
    marked = model.predict(images)
    for answers in marked:
        assert (answers["pets"]["familiarity"], answers["pets"]["unfamiliar"]) == (1.0, False)
        assert (answers["rooms"]["familiarity"], answers["rooms"]["unfamiliar"]) == (0.0, True)
        assert answers["pets"]["score"] == pytest.approx(answers["rooms"]["score"])  # the same class means
        assert answers["pets"]["coarse"] is answers["rooms"]["coarse"] is True, "of five images"
        assert "familiarity" not in answers["plain"]
    assert [list(answers) for answers in model.predict(images, unfamiliar="drop")] == [["pets", "plain"]] * 3
    kept = model.predict(images, unfamiliar="keep")
    assert [list(answers) for answers in kept] == [["pets", "rooms", "plain"]] * 3
    assert "unfamiliar" not in kept[0]["rooms"]
    assert model.predict(images, false_alarms=0.0)[0]["rooms"]["unfamiliar"] is False
    with pytest.raises(CompositionError, match="mark, drop, keep"):
        model.predict(images, unfamiliar="hide")  # type: ignore[arg-type]
    alone = memoro.compose(backbone, [other]).predict(images, ["rooms"])
    assert alone[0]["rooms"]["score"] == pytest.approx(marked[0]["rooms"]["score"], abs=1e-3)


def test_probabilities_are_calibrated_and_logits_are_not(backbone: Backbone, known: Task) -> None:
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(3))
    raw = memoro.compose(backbone, [random_task(backbone, "pets")])
    model = memoro.compose(backbone, [known])
    assert torch.equal(model(pixels)["pets"], raw(pixels)["pets"])
    before, after = raw.predict(pictures(1, 0))[0]["pets"], model.predict(pictures(1, 0))[0]["pets"]
    assert after["label"] == before["label"]
    assert after["probability"] < before["probability"]
    powers = {label: p ** (1 / 1.7) for label, p in before["probabilities"].items()}
    assert after["probabilities"] == pytest.approx({k: v / sum(powers.values()) for k, v in powers.items()}, abs=1e-4)


def test_numbers_have_intervals_and_labels_thresholds(backbone: Backbone) -> None:
    age = random_task(backbone, "age", labels=["years"], head="regression")
    age.update_spec(calibration=Calibration((), (), (2.5,), 50, "validation"))
    tags = random_task(backbone, "tags", labels=["a", "b"], head="multilabel", seed=1)
    tags.update_spec(calibration=Calibration((1.0, 1.0), (1e-5, 1 - 1e-5), (), 50, "validation"))
    answers = memoro.compose(backbone, [age, tags]).predict(pictures(1, 0))[0]
    value = answers["age"]["values"]["years"]
    assert answers["age"]["intervals"]["years"] == pytest.approx([value - 2.5, value + 2.5])
    assert answers["tags"]["labels"] == ["a"]
    assert answers["tags"]["thresholds"] == {"a": 1e-5, "b": 1 - 1e-5}


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_images_are_judged_by_statistics_of_hidden_states(case: Case) -> None:
    """Tasks that read two layers, four or none, in one pass; those of SigLIP have two statistics."""
    backbone = memoro.load_backbone(case.model().double())
    pixels = torch.randn(90, 3, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        statistics = pool_hidden_states(hidden_states(backbone, pixels), backbone.anatomy).float()
    own, away, new = statistics[:40], statistics[40:80], statistics[80:]
    tasks = [random_task(backbone, name, seed=seed) for seed, name in enumerate(("four", "two", "none", "plain"))]
    for task, layers in zip(tasks, (4, 2, 0), strict=False):
        others = Others.of(away[:, -layers:]) if layers else None
        known = fit_familiarity(own[:, -max(layers, 2) :], torch.arange(40) % 3, others)
        assert known is not None
        task.update_spec(familiarity=known)
    with torch.no_grad():
        judged = memoro.compose(backbone, tasks).run(pixels[80:]).recognition
        some = memoro.compose(backbone, tasks).run(pixels[80:], ["two"]).recognition
    assert list(judged) == ["four", "two", "none"]
    assert list(some) == ["two"]
    assert torch.equal(some["two"].familiarity, judged["two"].familiarity)
    for task, layers in zip(tasks, (4, 2, 2), strict=False):
        assert task.spec.familiarity is not None
        shares = FamiliarityBank([task.spec.familiarity]).judge(new[:, -layers:])[1][:, 0]
        # A step function: rounding may move an image over one of its steps.
        assert float((judged[task.name].familiarity - shares).abs().max()) <= 1 / 40 + 1e-6
    assert not torch.allclose(judged["four"].familiarity, judged["none"].familiarity, atol=0.05)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("regime", ["side", "readout", "joint"])
def test_familiarity_is_about_the_training_images(colours: Path, tmp_path: Path, split: str, regime: str) -> None:
    """Calibrations are fitted on held-out images: the validation split, or training images left out in turn."""
    shutil.copytree(colours / "own" / "train", tmp_path / "own" / "train")
    shutil.copytree(colours / "own" / "val", tmp_path / "own" / split, dirs_exist_ok=True, copy_function=copy_new)
    quick: dict[str, Any] = {"workers": 0, "quiet": True, "image_size": 20, "regime": regime}
    if regime != "readout":
        quick |= {"epochs": 1, "folds": 2, "lr": [0.01, 0.1] if regime == "side" else 0.01}
    task = memoro.train(tmp_path / "own", backbone=str(colours / "vit"), task="own", **quick).task
    found, calibration = task.spec.familiarity, task.spec.calibration
    assert found is not None
    assert calibration is not None
    train = 64 if split == "train" else 40
    assert found.images == train
    assert found.coarse, "fewer than 100 images"
    left_out = {"side": "2 folds", "joint": "2 folds", "readout": "leave-one-out"}[regime]
    expected = (64, left_out) if split == "train" else (24, "validation")
    if regime == "readout":  # its answers without an image are known for all training images
        expected = (train, left_out)
    assert (calibration.images, calibration.source) == expected
    file = memoro.save_task(task, tmp_path / "own.safetensors")
    model = memoro.compose(memoro.load_backbone(str(colours / "vit")), [memoro.load_task(file)])
    files = sorted((colours / "own" / "test").rglob("*.png"))
    pixels = torch.stack([task.spec.preprocessing.to_tensor(Image.open(file)) for file in files])
    with torch.no_grad():
        judged = model.run(pixels).recognition["own"]
        scores, shares = FamiliarityBank([found]).judge(pool_pass(model.backbone.anatomy, pixels, 3))
    assert torch.equal(judged.familiarity, shares[:, 0])
    assert torch.equal(judged.score, scores[:, 0])


def copy_new(source: str, target: str) -> None:
    """A copy under a name that is still free."""
    shutil.copy(source, Path(target).with_stem(f"new-{Path(target).stem}"))


def test_from_training_to_the_report(colours: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    files = {}
    for name in ("own", "other"):
        files[name] = tmp_path / f"{name}.safetensors"
        task = memoro.train(colours / name, backbone=str(colours / "vit"), task=name, out=files[name], **quick).task
        assert task.spec.calibration is not None
        assert (task.spec.calibration.images, task.spec.calibration.source) == (24, "validation")
        assert task.spec.familiarity is not None
        assert (task.spec.familiarity.images, len(task.spec.familiarity.means)) == (40, 2)
        text = "40 training images, left out in turn, against no photographs"
        assert task.spec.training["familiarity"] == text
        assert "calibration_error_before" in task.spec.metrics
    back = ("-b", colours / "vit", "--json")
    found = json.loads(
        run("eval", colours / "own", "-t", files["own"], "--others", colours / "other", "--set", "workers=0", *back)
    )["own"]["trust"]
    assert found["others"]["other"]["familiarity"]["auroc"] > 0.99
    assert found["others"]["other"]["unfamiliar"] == 1.0
    assert {"calibration_error", "calibration_error_before"} <= set(found)
    sets = [f"{name}={colours / name}" for name in files]
    both = [word for name in files for word in ("-t", files[name])]
    metrics = json.loads(run("eval", *sets, *both, "--together", "--set", "workers=0", *back))
    for name in files:
        accuracy = metrics[name]["together"]
        assert (accuracy["right_task"], metrics[name]["images"]) == (1.0, 20)
        assert accuracy["alone"] == accuracy["composed"] == accuracy["routed"] == metrics[name]["accuracy"]
    apart = json.loads(run("eval", *sets, *both, "--set", "workers=0", *back))
    assert "together" not in apart["own"]
    shown = run("inspect", files["own"])
    assert "coarse" in shown
    assert "temperature" in shown
    answers = json.loads(
        run(
            "predict",
            colours / "other" / "test",
            "-t",
            files["own"],
            "--unfamiliar",
            "drop",
            "--format",
            "json",
            *back[:2],
        )
    )
    assert list(answers.values()) == [{}] * 20


@pytest.fixture(params=["relative", "absolute"])
def table(request: pytest.FixtureRequest, colours: Path, tmp_path: Path) -> Path:
    """The colours as a table whose columns have other names, with relative or absolute paths."""
    folder = "own" if request.param == "relative" else colours / "own"
    rows = [
        f"{folder}/{split}/{label}/{number}.png,{label},{split}"
        for split, count in (("train", 20), ("test", 10))
        for label in ("red", "blue")
        for number in range(count)
    ]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(["picture,tint,split", *rows]))
    (tmp_path / "own").symlink_to(colours / "own")
    return path


def test_every_command_reads_tables_with_other_columns_and_absolute_paths(
    colours: Path, table: Path, tmp_path: Path
) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    extra = ["--set", "image_column=picture"]
    if str(colours) in table.read_text():
        extra += ["--set", "allow_absolute=true"]
    how = {"image_column": "picture", "allow_absolute": "allow_absolute=true" in extra, "label_column": "tint"}
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    assert memoro.train(table, backbone=backbone, val_fraction=0, **how, **quick).task.labels == ["blue", "red"]
    task = random_task(backbone, "own", labels=["blue", "red"])
    task.update_spec(preprocessing=backbone.preprocessing)
    path = memoro.save_task(task, tmp_path / "own.safetensors")
    column = ("--label-column", "tint", *extra, "-b", colours / "vit")
    run("calibrate", path, table, *column)
    assert memoro.load_task(path).spec.calibration is not None
    words = ("eval", table, "-t", path, "--set", "workers=0", "--json", *column)
    assert json.loads(run(*words))["own"]["images"] == 20
    others = [colours / "other", shutil.copytree(colours / "other" / "val", tmp_path / "2025" / "other")]
    others.append(shutil.copytree(colours / "other" / "test", tmp_path / "2025" / "own"))
    found = json.loads(run(*words, *(word for other in others for word in ("--others", other))))["own"]["trust"]
    assert {name: one["images"] for name, one in found["others"].items()} == {
        str(others[0]): 20,
        str(others[1]): 24,
        "own": 20,
    }
    assert sum(found["histogram"]) == 20
    assert found["histogram"] != found["others"]["own"]["histogram"]


def test_other_images_need_no_labels(colours: Path, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    task = memoro.train(colours / "own", backbone=backbone, task="own", **quick).task
    one_class, plain = colours / "other" / "test", tmp_path / "plain"
    shutil.copytree(one_class / "red", tmp_path / "one" / "red")
    shutil.copytree(one_class / "red", plain)
    shutil.make_archive(str(plain), "zip", plain)
    (tmp_path / "paths.csv").write_text("path\n" + "".join(f"plain/{file.name}\n" for file in plain.iterdir()))
    places = {"one": tmp_path / "one", "plain": plain, "zip": f"{plain}.zip", "table": tmp_path / "paths.csv",
              "glob": f"{plain}/*.png"}  # fmt: skip
    found = memoro.evaluate(backbone, task, colours / "own", others=places, workers=0)["own"]["trust"]["others"]
    assert [record["images"] for record in found.values()] == [10] * 5
    for record in found.values():
        assert record["familiarity"] == found["one"]["familiarity"]
    said: list[str] = []
    some: dict[str, Any] = {"others": {"plain": plain}, "false_alarms": 0.5, "workers": 0, "log": said.append}
    half = memoro.evaluate(backbone, task, colours / "own", **some)["own"]["trust"]
    assert not any("familiarity" in text for text in said)
    said.clear()
    whole = memoro.evaluate(backbone, task, colours / "own", **{**some, "false_alarms": 0.01})["own"]["trust"]
    assert half["false_alarms"] > whole["false_alarms"]
    assert said[1:] == [
        "note: own: familiarity is based on 40 images, too few for a false-alarm rate of 0.01: only images more "
        "unusual than all of them are unfamiliar."
    ]
    for name in ("broken.png", "empty.png"):
        (plain / name).write_bytes(b"no image")
    said.clear()
    again = memoro.evaluate(backbone, task, colours / "own", **some)["own"]["trust"]
    assert again["others"]["plain"]["images"] == 10
    assert said[0] == "note: plain: 2 images that cannot be read were left out."
    with pytest.raises(DataError, match="no such file or folder"):
        memoro.evaluate(backbone, task, colours / "own", others={"gone": tmp_path / "gone"}, workers=0)
