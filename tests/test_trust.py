"""Calibration and familiarity: fitted, kept in task files, used in answers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_task
from families import CASES
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.engine.answers import Routing
from memoro.errors import CompositionError, DataError, TaskFileError
from memoro.evaluation.metrics import measure, measure_task
from memoro.evaluation.trust import auroc, calibrate, evaluate_trust, false_positives
from memoro.heads import HeadKind
from memoro.tasks.calibration import Calibration, fit_calibration
from memoro.tasks.familiarity import SHRINKAGE, Familiarity, FamiliarityBank, fit_familiarity
from memoro.tasks.task import Task
from memoro.training.trust import add_calibration


def draw(count: int, dim: int, classes: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Tokens of some classes, which differ in their means and share an uneven covariance."""
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    targets = torch.arange(count) % classes
    noise = torch.randn(count, dim, generator=generator) * torch.linspace(2.0, 0.1, dim)
    return means[targets] + noise + shift, targets


# ----------------------------------------------------------------------------------------------- familiarity


def fit(tokens: Tensor, classes: Tensor | None) -> Familiarity | None:
    return fit_familiarity(tokens, classes, torch.full(tokens.shape[1:], 9.0))


def test_the_distance_is_that_of_a_dense_gaussian() -> None:
    tokens, targets = draw(300, 13, 3, seed=0)
    background = torch.linspace(3, 5, 13)
    found = fit_familiarity(tokens, targets, background)
    assert found is not None
    assert len(found.directions) == 13  # all of them: nothing is left for the residual
    x = tokens.double()
    means = torch.stack([x[targets == label].mean(dim=0) for label in range(3)])
    within = x - means[targets]
    basis = found.directions.double()
    covariance = basis.T @ torch.diag((within @ basis.T).square().mean(dim=0)) @ basis
    average = within.square().sum(dim=1).mean() / 13
    precision = torch.linalg.inv((1 - SHRINKAGE) * covariance + SHRINKAGE * average * torch.eye(13))
    new, _ = draw(7, 13, 3, seed=1)
    away = new.double().unsqueeze(1) - means
    dense = torch.einsum("ncd,de,nce->nc", away, precision, away).amin(dim=1) / (new - background).norm(dim=1)
    measured = FamiliarityBank([found]).measure(new)[:, 0].double()
    assert torch.allclose(measured, dense, rtol=0.04), "directions are in half precision: lengths are off by 1e-3"


def test_own_images_are_familiar_and_others_are_not() -> None:
    found = fit(*draw(400, 29, 5, seed=0))
    assert found is not None
    assert found.images == 400
    bank = FamiliarityBank([found])
    own, other = draw(500, 29, 5, seed=1)[0], draw(500, 29, 5, seed=2, shift=2.0)[0]
    shares = bank.judge(own)[1][:, 0]
    assert abs(float(shares.mean()) - 0.5) < 0.05, "shares of own images are spread evenly"
    assert 0.0 <= float((shares < 0.01).double().mean()) < 0.03
    assert float((bank.judge(other)[1] < 0.01).double().mean()) > 0.95
    assert auroc(-bank.measure(own)[:, 0], -bank.measure(other)[:, 0]) > 0.99


def test_several_tasks_are_judged_as_each_alone() -> None:
    items = [fit(*draw(count, 29, classes, seed=count)) for count, classes in ((60, 2), (25, 3), (90, 1))]
    known = [item for item in items if item is not None]
    assert [item.means.shape for item in known] == [(2, 29), (3, 24), (1, 29)]  # few images have few directions
    new = draw(11, 29, 4, seed=5)[0]
    (scores, shares), distances = FamiliarityBank(known).judge(new), FamiliarityBank(known).measure(new)
    for at, one in enumerate(known):
        alone = FamiliarityBank([one])
        assert torch.allclose(distances[:, at], alone.measure(new)[:, 0], rtol=1e-4), "summed in another order"
        # A distance that differs in its last bits may change places with one of a held-out image.
        assert torch.allclose(shares[:, at], alone.judge(new)[1][:, 0], atol=0.05)
    assert not torch.allclose(scores[:, 0], scores[:, 1], atol=0.01)


def test_a_large_task_takes_memory_for_itself_only() -> None:
    small = fit(*draw(60, 29, 2, seed=0))
    assert small is not None
    means = torch.randn(5000, len(small.directions), generator=torch.Generator().manual_seed(1)).half()
    large = Familiarity(**{**small.tensors, "means": means}, residual=small.residual, images=60)
    bank = FamiliarityBank([*[small] * 50, large])
    held = sum(tensor.numel() for tensor in vars(bank).values())
    values = sum(tensor.numel() for one in (*[small] * 50, large) for tensor in one.tensors.values())
    assert held < 4 * values
    new = draw(11, 29, 4, seed=5)[0]
    for at, one in ((0, small), (50, large)):
        assert torch.allclose(bank.measure(new)[:, at], FamiliarityBank([one]).measure(new)[:, 0], rtol=1e-4), (
            "summed in another order"
        )


def test_near_identical_images_can_be_saved(backbone: Backbone, tmp_path: Path) -> None:
    tokens = torch.zeros(40, backbone.dim)
    tokens[0] = 100.0
    found = fit_familiarity(tokens, None, torch.zeros(backbone.dim))
    assert found is not None
    assert float(found.distances[-1]) == 1e6, "as far as a distance goes"
    task = random_task(backbone, "pets")
    task.describe(familiarity=found)
    path = memoro.save_task(task, tmp_path / "pets.safetensors")
    assert memoro.load_task(path).spec.familiarity is not None
    assert fit_familiarity(tokens * 1e5, None, torch.zeros(backbone.dim)) is None, "beyond what a file may hold"


def test_what_cannot_be_loaded_is_not_saved(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    before = path.read_bytes()
    assert known.spec.familiarity is not None
    tensors = {**known.spec.familiarity.tensors, "distances": torch.full((5,), 1e9)}
    known.describe(familiarity=Familiarity(**tensors, residual=1.0, images=5))
    with pytest.raises(TaskFileError, match="invalid values: compute it again"):
        memoro.save_task(known, path)
    assert path.read_bytes() == before


def test_values_are_checked_without_copies() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes = [one.numel() for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
            self.largest = max(self.largest, *sizes, 0)
            return out

    small = fit(*draw(60, 29, 2, seed=0))
    assert small is not None
    means = torch.zeros(5000, len(small.directions)).half()
    large = Familiarity(**{**small.tensors, "means": means}, residual=small.residual, images=60)
    with Watch() as watch:
        assert large.valid
    assert watch.largest < means.numel() / 10


@pytest.mark.parametrize("count", [3, 100, 512])
def test_the_limit_is_where_answers_are_marked(count: int) -> None:
    found = fit(*draw(60, 5, 2, seed=0))
    assert found is not None
    own = torch.arange(1.0, count + 1)
    found = Familiarity(**{**found.tensors, "distances": own}, residual=found.residual, images=count)
    shares = {distance: float((own >= distance).sum() / count) for distance in (*own.tolist(), count + 0.5)}
    for false_alarms in (0.0, 1e-9, 0.01, 0.07, 0.5, 1 / count, 1.0):
        routing, limit = Routing(false_alarms=false_alarms), found.limit(false_alarms)
        for distance, share in shares.items():
            assert routing.mark({"familiarity": share})["unfamiliar"] == (distance > limit), (false_alarms, distance)


def test_scores_tell_whose_image_it_is() -> None:
    """Scores are log-densities of mixtures with one covariance for all: the mean of the tasks' covariances."""
    parts = [draw(400, 11, classes, seed=classes, shift=classes) for classes in (2, 5)]
    known = [found for tokens, classes in parts if (found := fit(tokens[:300], classes[:300])) is not None]
    bank = FamiliarityBank(known)
    covariances = [
        one.directions.double().T @ torch.diag(one.variances.double()) @ one.directions.double() for one in known
    ]
    pooled = torch.stack(covariances).mean(dim=0)
    for at, (tokens, _) in enumerate(parts):
        new = tokens[300:]
        scores = bank.judge(new)[0]
        assert float((scores.argmax(dim=1) == at).double().mean()) > 0.95
        dense = []
        for one in known:
            means = one.means.double() @ one.directions.double() + one.center
            normal = torch.distributions.MultivariateNormal(means, pooled)
            dense.append(normal.log_prob(new.double().unsqueeze(1)).logsumexp(dim=1) - math.log(len(means)))
        expected = (dense[0] - dense[1]) / 11
        assert torch.allclose((scores[:, 0] - scores[:, 1]).double(), expected, rtol=0.02, atol=0.02), "half precision"


def test_a_description_is_small_enough_to_ship() -> None:
    tokens, targets = draw(1000, 768, 100, seed=0)
    found = fit(tokens, targets)
    assert found is not None
    assert found.bytes <= 64 << 10
    assert found.means.shape == (100, 31)
    assert len(found.distances) == 512


def test_too_little_to_describe() -> None:
    tokens, targets = draw(19, 5, 2, seed=0)
    assert fit(tokens, targets) is None
    assert fit(torch.full((30, 5), torch.nan), None) is None
    same = fit(torch.ones(30, 5), None)
    assert same is not None
    assert all(value.isfinite().all() for value in FamiliarityBank([same]).judge(torch.zeros(2, 5)))


def test_auroc_and_false_positives() -> None:
    own, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0])
    pairs = [(a > b) + 0.5 * (a == b) for a in own.tolist() for b in other.tolist()]
    assert auroc(own, other) == pytest.approx(sum(pairs) / len(pairs))
    assert false_positives(own, other, recall=1.0) == pytest.approx(2 / 3)


# ----------------------------------------------------------------------------------------------- calibration


def test_a_temperature_undoes_too_much_certainty() -> None:
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(2000, 4, generator=generator)
    targets = torch.multinomial(true.softmax(dim=-1), 1, generator=generator)[:, 0]
    logits, labels = 3 * true, list("abcd")
    found = fit_calibration("softmax", logits[:1000], targets[:1000], "validation")
    assert found is not None
    assert found.temperature[0] == pytest.approx(3, rel=0.15)
    before, after = (
        measure("softmax", labels, out, targets[1000:]) for out in (logits[1000:], found.apply(logits[1000:]))
    )
    assert after["calibration_error"] < before["calibration_error"] / 2
    assert after["accuracy"] == before["accuracy"]
    assert fit_calibration("softmax", logits[:19], targets[:19], "validation") is None


def test_answers_without_a_mistake_keep_a_temperature() -> None:
    targets = torch.arange(40) % 2
    found = fit_calibration("softmax", 4 * torch.eye(2)[targets], targets, "validation")
    assert found is not None
    assert 0.2 < found.temperature[0] < 1


def test_each_label_has_a_temperature_and_a_threshold() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3000, 3, generator=generator) * 2 - torch.tensor([3.0, 0.0, 0.0])
    targets = (torch.rand(3000, 3, generator=generator) < true.sigmoid()).float()
    targets[:, 2] = 0  # never seen: nothing can be fitted for it
    found = fit_calibration("multilabel", true * torch.tensor([2.0, 0.5, 1.0]), targets, "validation")
    assert found is not None
    assert found.temperature[:2] == pytest.approx((2.0, 0.5), rel=0.2)
    assert found.thresholds[0] < 0.45, "a rare label is worth giving at a lower probability"
    assert found.thresholds[2] == 0.5
    chosen = found.decide(true * torch.tensor([2.0, 0.5, 1.0])) >= 0
    by_hand = found.apply(true * torch.tensor([2.0, 0.5, 1.0])).sigmoid() >= torch.tensor(found.thresholds)
    assert float((chosen == by_hand).double().mean()) > 0.999


def test_the_record_says_why_there_is_no_calibration(backbone: Backbone) -> None:
    task = random_task(backbone, "pets")
    targets = torch.arange(30) % 3
    for held_out, words in (
        (None, "none: fewer than 20 images were held out"),
        ((torch.zeros(19, 3), targets[:19]), "none: fewer than 20 images were held out"),
        ((torch.full((30, 3), torch.inf), targets), "none: not all logits are finite"),
        ((torch.zeros(30, 3), targets), "30 held-out images (validation)"),
    ):
        add_calibration(task, held_out, "validation")
        assert task.spec.training["calibration"] == words


@pytest.mark.parametrize("kind", ["softmax", "multilabel"])
def test_a_calibration_is_not_judged_by_what_it_was_fitted_on(backbone: Backbone, kind: HeadKind) -> None:
    """Labels that have nothing to do with the answers: thresholds that suit them find nothing in new images."""
    generator, labels = torch.Generator().manual_seed(0), list("abcdef")
    logits = 3 * torch.randn(60, 6, generator=generator)
    yes = (torch.rand(60, 6, generator=generator) < 0.5).float()
    targets = yes if kind == "multilabel" else torch.arange(60) % 6
    task = random_task(backbone, "noise", labels=labels, head=kind)
    add_calibration(task, (logits, targets), "validation")
    assert task.spec.calibration is not None
    seen, unseen = (measure_task(task, logits, targets, fitted_on=fitted_on) for fitted_on in (False, True))
    changed = {name for name in seen if seen[name] != unseen[name]}
    if kind == "multilabel":
        assert changed <= {"f1", "exact_match", "label_accuracy"}
        assert unseen["f1"] < seen["f1"] - 0.02
    else:
        assert changed == {"calibration_error"}
    few = measure_task(task, logits[:24], targets[:24], fitted_on=True)
    assert few == measure(kind, labels, logits[:24], targets[:24]), "too few remain: not calibrated"


def test_without_a_test_split_a_calibration_is_judged_on_other_images(colours: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "image_size": 20, "backbone": colours / "vit"}
    shutil.copytree(colours / "own" / "train", tmp_path / "folds" / "train")
    shutil.copytree(tmp_path / "folds", tmp_path / "val")
    shutil.copytree(colours / "own" / "train", tmp_path / "val" / "val")
    for data, rates in ((tmp_path / "val", 0.1), (tmp_path / "folds", [0.05, 0.1])):
        done = memoro.train(data, task="own", lr=rates, **quick)
        assert done.logits is not None
        assert done.targets is not None
        found = measure_task(done.task, done.logits, done.targets, fitted_on=True)
        assert {name: done.metrics[name] for name in found} == found
        seen = measure_task(done.task, done.logits, done.targets)
        assert {name for name in found if seen[name] != found[name]} == {"calibration_error"}


def test_an_interval_covers_new_images() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = 10 * torch.randn(4000, 2, generator=generator)
    values = targets + torch.randn(4000, 2, generator=generator) * torch.tensor([1.0, 5.0])
    found = fit_calibration("regression", values[:2000], targets[:2000], "4 folds")
    assert found is not None
    covered = ((values - targets)[2000:].abs() <= torch.tensor(found.spread)).double().mean(dim=0)
    assert covered.tolist() == pytest.approx([0.9, 0.9], abs=0.02)


# ------------------------------------------------------------------------------------------------ task files


@pytest.fixture
def known(backbone: Backbone) -> Task:
    """A task with both sections."""
    task = random_task(backbone, "pets")
    familiarity = fit(*draw(150, backbone.dim, 3, seed=0))
    task.describe(calibration=Calibration((1.7,), (), (), 90, "4 folds"), familiarity=familiarity)
    return task


def test_sections_are_kept_and_leave_the_content_as_it_is(known: Task, tmp_path: Path) -> None:
    content, path = known.content_hash(), tmp_path / "pets.safetensors"
    memoro.save_task(known, path)
    back = memoro.load_task(path)
    assert back.spec.calibration == known.spec.calibration
    mine, kept = known.spec.familiarity, back.spec.familiarity
    assert mine is not None
    assert kept is not None
    assert all(torch.equal(mine.tensors[name], tensor) for name, tensor in kept.tensors.items())
    assert (kept.residual, kept.images) == (mine.residual, 150)
    assert memoro.save_task(back, tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    back.describe(calibration=None, familiarity=None)
    plain = memoro.load_task(memoro.save_task(back, path))
    assert (plain.spec.calibration, plain.spec.familiarity) == (None, None)
    assert plain.content_hash() == content


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
    "no object": (lambda record, tensors: record.update(familiarity=[]), "JSON object"),
    "no number": (lambda record, tensors: record.update(calibration=1), "JSON object"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_sections_are_refused(known: Task, tmp_path: Path, name: str) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    change, words = ATTACKS[name]
    rewrite(path, change)
    with pytest.raises(TaskFileError, match=words) as caught:
        memoro.load_task(path)
    assert str(path) in str(caught.value)


def test_rewriting_alone_is_no_attack(known: Task, tmp_path: Path) -> None:
    path = memoro.save_task(known, tmp_path / "pets.safetensors")
    rewrite(path, put("calibration", temperature=[2.5], source="elsewhere"))
    found = memoro.load_task(path)
    assert found.spec.calibration == Calibration((2.5,), (), (), 90, "elsewhere")
    assert found.content_hash() == known.content_hash()


# --------------------------------------------------------------------------------------------------- answers


def pictures(count: int, seed: int) -> list[Image.Image]:
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(count)]


def strange(known: Familiarity) -> Familiarity:
    """The same description, to which every image is unfamiliar."""
    return Familiarity(**{**known.tensors, "distances": torch.zeros(5)}, residual=known.residual, images=5)


def test_predict_marks_drops_or_keeps(backbone: Backbone, known: Task) -> None:
    other = random_task(backbone, "rooms", seed=1)
    assert known.spec.familiarity is not None
    other.describe(familiarity=strange(known.spec.familiarity))
    wide = Familiarity(
        **{**known.spec.familiarity.tensors, "distances": torch.full((5,), 1e6)},
        residual=known.spec.familiarity.residual, images=5,
    )  # fmt: skip
    known.describe(familiarity=wide)
    plain = random_task(backbone, "plain", seed=2)
    model = memoro.compose(backbone, [known, other, plain])
    images = pictures(3, seed=0)
    marked = model.predict(images)
    for answers in marked:
        assert (answers["pets"]["familiarity"], answers["pets"]["unfamiliar"]) == (1.0, False)
        assert (answers["rooms"]["familiarity"], answers["rooms"]["unfamiliar"]) == (0.0, True)
        assert answers["pets"]["score"] == pytest.approx(answers["rooms"]["score"])  # the same class means
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
    age.describe(calibration=Calibration((), (), (2.5,), 50, "validation"))
    tags = random_task(backbone, "tags", labels=["a", "b"], head="multilabel", seed=1)
    tags.describe(calibration=Calibration((1.0, 1.0), (1e-5, 1 - 1e-5), (), 50, "validation"))
    answers = memoro.compose(backbone, [age, tags]).predict(pictures(1, 0))[0]
    value = answers["age"]["values"]["years"]
    assert answers["age"]["intervals"]["years"] == pytest.approx([value - 2.5, value + 2.5])
    assert answers["tags"]["labels"] == ["a"]


# ------------------------------------------------------------------------------- training and the command line


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of noise around a colour, brighter or darker, with a validation split."""
    generator, root = np.random.default_rng(0), tmp_path_factory.mktemp("colours")
    for name, base in (("own", 60), ("other", 200)):
        for split, count in (("train", 20), ("val", 12), ("test", 10)):
            for label, tint in (("red", (40, 0, 0)), ("blue", (0, 0, 40))):
                folder = root / name / split / label
                folder.mkdir(parents=True)
                for number in range(count):
                    noise = generator.integers(-15, 15, (20, 20, 3))
                    Image.fromarray((base + np.array(tint) + noise).astype(np.uint8)).save(folder / f"{number}.png")
    CASES[0].model().save_pretrained(root / "vit")
    return root


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


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
        assert task.spec.training["familiarity"] == "40 training images, out of fold"
        assert "calibration_error_before" in task.spec.metrics
    back = ("-b", colours / "vit", "--json")
    found = json.loads(
        run("eval", colours / "own", "-t", files["own"], "--others", colours / "other", "--workers", 0,
            "--picture", tmp_path / "trust.png", *back)
    )["own"]["trust"]  # fmt: skip
    assert found["others"]["other"]["familiarity"]["auroc"] > 0.99
    assert found["others"]["other"]["unfamiliar"] == 1.0
    assert {"calibration_error", "calibration_error_before"} <= set(found)
    with Image.open(tmp_path / "trust.png") as picture:
        assert picture.size[0] > 500
    sets = [word for name in files for word in ("-t", files[name], "--data", f"{name}={colours / name}")]
    report = json.loads(run("verify", *sets, *back))
    assert report["base_equal"]
    for name in files:
        accuracy = report["accuracy"][name]
        assert (accuracy["right_task"], accuracy["images"]) == (1.0, 20)
        assert accuracy["alone"] == accuracy["composed"] == accuracy["routed"]
    shown = run("inspect", files["own"])
    assert "coarse" in shown
    assert "temperature" in shown
    answers = json.loads(run("predict", colours / "other" / "test", "-t", files["own"], "--unfamiliar", "drop", *back))
    assert list(answers.values()) == [{}] * 20


def test_calibrate_adds_what_an_old_file_lacks(colours: Path, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    task = random_task(backbone, "own", labels=["blue", "red"])
    task.describe(preprocessing=backbone.preprocessing, training={"data": "own"})
    path = memoro.save_task(task, tmp_path / "own.safetensors")
    assert "memoro calibrate" in run("inspect", path)
    run("calibrate", path, colours / "own", "-b", colours / "vit")
    found = memoro.load_task(path)
    assert found.content_hash() == task.content_hash()
    assert found.spec.calibration is not None
    assert (found.spec.calibration.images, found.spec.calibration.source) == (24, "own")
    assert found.spec.familiarity is not None
    assert found.spec.familiarity.images == 64
    assert found.spec.training["calibration"] == "24 held-out images (own)"
    assert found.spec.training["familiarity"] == "64 images of own, out of fold"
    assert "memoro calibrate" not in run("inspect", path)


def test_calibrate_recognises_the_images_of_the_training(colours: Path, tmp_path: Path) -> None:
    """By their content: names say nothing."""
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    backbone = memoro.load_backbone(str(colours / "vit"))
    shutil.copytree(colours / "own" / "train", tmp_path / "2024" / "pets")
    task = memoro.train(tmp_path / "2024" / "pets", backbone=backbone, val_fraction=0, **quick).task
    assert task.spec.calibration is None
    assert (task.spec.training["data"], len(task.spec.training["image_sketch"])) == ("pets", 40)

    def told(data: Path) -> str:
        task.describe(calibration=None)
        said: list[str] = []
        calibrate(backbone, task, data, workers=0, log=said.append)
        assert (task.spec.calibration is None) == any("the calibration stays as it is" in text for text in said)
        return " ".join(said)

    assert "learned from some of these images" in told(shutil.copytree(tmp_path / "2024" / "pets", tmp_path / "copy"))
    new = shutil.copytree(colours / "own" / "val", tmp_path / "2025" / "pets")
    assert "calibration: from 24 images" in told(new)
    assert task.spec.training["calibration"] == "24 held-out images (pets)"
    shutil.copy(tmp_path / "2024" / "pets" / "red" / "0.png", new / "red" / "seen.png")
    assert "learned from some of these images" in told(new)
    task.describe(training={"data": "pets"})  # as of an older version
    assert "rename the folder or file" in told(new)
    assert "calibration: from 25 images" in told(new.rename(tmp_path / "2025" / "newer"))


@pytest.fixture
def table(colours: Path, tmp_path: Path) -> Path:
    """The colours as a table whose column of labels has another name."""
    rows = [
        f"own/{split}/{label}/{number}.png,{label},{split}"
        for split, count in (("train", 20), ("test", 10))
        for label in ("red", "blue")
        for number in range(count)
    ]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(["path,tint,split", *rows]))
    (tmp_path / "own").symlink_to(colours / "own")
    return path


def test_tables_have_label_columns_everywhere(colours: Path, table: Path, tmp_path: Path) -> None:
    backbone = memoro.load_backbone(str(colours / "vit"))
    task = random_task(backbone, "own", labels=["blue", "red"])
    task.describe(preprocessing=backbone.preprocessing)
    path = memoro.save_task(task, tmp_path / "own.safetensors")
    column = ("--label-column", "tint", "-b", colours / "vit")
    run("calibrate", path, table, *column)
    assert memoro.load_task(path).spec.calibration is not None
    report = json.loads(run("verify", "-t", path, "--data", f"own={table}", *column, "--json"))
    assert report["accuracy"]["own"]["images"] == 20
    words = ("eval", table, "-t", path, "--workers", 0, "--json", *column)
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
    found = evaluate_trust(backbone, [task], colours / "own", places, workers=0)["own"]["others"]
    assert [record["images"] for record in found.values()] == [10] * 5
    for record in found.values():
        assert record["familiarity"] == found["one"]["familiarity"]
    (plain / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 11 images cannot be read.*broken\.png"):
        evaluate_trust(backbone, [task], colours / "own", {"plain": plain}, workers=0)
    with pytest.raises(DataError, match="no images there"):
        evaluate_trust(backbone, [task], colours / "own", {"gone": tmp_path / "gone"}, workers=0)


def test_baselines_are_left_out_of_what_others_compares(colours: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"epochs": 1, "workers": 0, "quiet": True, "lr": 0.1, "image_size": 20}
    files = []
    for name, regime in (("own", "head"), ("plain", "class-full")):
        files.append(tmp_path / f"{name}.safetensors")
        memoro.train(colours / "own", backbone=str(colours / "vit"), task=name, regime=regime, out=files[-1], **quick)
    words = ["eval", *(f"{file.stem}={colours / 'own'}" for file in files), "--others", colours / "other"]
    words += [word for file in files for word in ("-t", file)]
    done = CliRunner().invoke(app, [str(word) for word in (*words, "-b", colours / "vit", "--workers", 0, "--json")])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "plain is a baseline: --others compares tasks only" in done.stderr
    found = json.loads(done.stdout)
    assert ("trust" in found["own"], "trust" in found["plain"]) == (True, False)


def test_figures_are_those_that_eval_gives(colours: Path, tmp_path: Path) -> None:
    """After a training, in its record and in its report: all calibrated."""
    quick: dict[str, Any] = {"epochs": 2, "workers": 0, "quiet": True, "image_size": 20, "folder": tmp_path / "run"}
    backbone = memoro.load_backbone(str(colours / "vit"))
    shutil.copytree(colours / "own" / "train", tmp_path / "set" / "train")
    shutil.copytree(colours / "own" / "test", tmp_path / "set" / "test")
    for data, rates in ((colours / "own", 0.1), (tmp_path / "set", [0.05, 0.1])):  # a validation split, then folds
        done = memoro.train(data, backbone=backbone, task="own", lr=rates, **quick)
        assert done.task.spec.calibration is not None
        found = memoro.evaluate(backbone, [done.task], data, workers=0)["own"]
        assert found["calibration_error"] != found["calibration_error_before"]
        for key in ("accuracy", "calibration_error", "calibration_error_before", "loss"):
            assert done.metrics[key] == pytest.approx(found[key], abs=1e-5), "float32, in company"
            assert done.task.spec.metrics[key] == done.metrics[key]
