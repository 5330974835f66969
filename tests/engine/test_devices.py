"""Devices and dtypes: tasks follow the backbone, and nothing that a user holds is moved. `meta` stands for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from baseline_models import build
from conftest import random_task
from families import FAMILIES, Case
from reproduction_checkpoint import save_checkpoint
from squares import save_squares
from test_train_numbers import save_table
from torch import nn
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.backbones.fingerprint import take_fingerprint
from memoro.lab import train_baseline

families = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


def devices(module: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in module.state_dict().values()}


def pair(backbone: Backbone) -> list[memoro.Task]:
    parent = random_task(backbone, "a.parent", cells=2)
    child = random_task(backbone, "child", seed=1, cells=1, from_layer=2, extends=[parent])
    return [parent, add_readout(backbone, child)]


@families
def test_tasks_follow_the_backbone(case: Case, tmp_path: Path, pixels: torch.Tensor) -> None:
    model = case.model()
    backbone = memoro.load_backbone(model)
    loaded = memoro.load_tasks(memoro.save_tasks(pair(backbone), tmp_path / "two.safetensors"))
    there = backbone.to("meta")
    composed = memoro.compose(there, loaded)
    assert {name: out.device.type for name, out in composed(pixels).items()} == dict.fromkeys(
        ["base", "a.parent", "child"], "meta"
    )
    assert devices(composed) == {"meta"}
    assert [devices(task) for task in loaded] == [{"cpu"}] * 2
    assert devices(model) == {"cpu"}


def test_loading_onto_a_device(backbone: Backbone, tmp_path: Path) -> None:
    path = memoro.save_tasks(pair(backbone)[:1], tmp_path / "one.safetensors")
    assert devices(memoro.load_task(path)) == {"cpu"}
    assert devices(memoro.load_task(path, device="meta")) == {"meta"}
    assert [devices(task) for task in memoro.load_tasks(path, device=torch.device("meta"))] == [{"meta"}]
    assert memoro.load_backbone(backbone, device="meta").device.type == "meta"
    assert memoro.load_backbone(backbone) is backbone


def test_a_loaded_checkpoint_is_moved_and_a_users_model_is_not(vit: Any, tmp_path: Path) -> None:
    vit.save_pretrained(tmp_path)
    loaded = memoro.load_backbone(tmp_path, device="meta")
    assert (loaded.device.type, devices(loaded.model), devices(loaded.module)) == ("meta", {"meta"}, {"meta"})
    given = memoro.load_backbone(vit, device="meta")
    assert given.device.type == "meta"
    assert devices(vit) == {"cpu"}


def test_imported_tasks_are_where_the_backbone_is(backbone: Backbone, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model.pt", backbone, tasks=2)
    backbone.fingerprint  # noqa: B018  (taken of the weights; `meta` has none)
    assert [devices(task) for task in memoro.import_tasks(backbone, path)] == [{"cpu"}] * 2
    assert [devices(task) for task in memoro.import_tasks(backbone.to("meta"), path)] == [{"meta"}] * 2


@families
def test_a_moved_backbone_is_a_new_one(case: Case, pixels: torch.Tensor) -> None:
    model = case.model()
    backbone = memoro.load_backbone(model)
    composed = memoro.compose(backbone, pair(backbone))
    with torch.no_grad():
        before, original = composed(pixels), backbone.original(pixels)
        half = backbone.to(dtype=torch.bfloat16)
        moved = backbone.to("meta")
        assert (half.dtype, backbone.dtype) == (torch.bfloat16, torch.float32)
        assert (moved.device.type, backbone.device.type) == ("meta", "cpu")
        assert half.original(pixels).dtype == torch.bfloat16
        assert torch.equal(memoro.compose(half)(pixels)["base"], half.original(pixels))
        after = composed(pixels)
        assert torch.equal(original, backbone.original(pixels))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert devices(model) == {"cpu"}
    assert moved.fingerprint == backbone.fingerprint
    assert half.fingerprint.match(backbone.fingerprint) == "same up to rounding"


@families
def test_a_composition_is_moved_in_place_and_its_backbone_is_not(case: Case, pixels: torch.Tensor) -> None:
    model = case.model()
    backbone = memoro.load_backbone(model)
    tasks = pair(backbone)
    composed, half = memoro.compose(backbone, tasks), memoro.compose(backbone, tasks)
    with torch.no_grad():
        before = composed(pixels)
        assert half.to(torch.bfloat16) is half
        wanted = memoro.compose(memoro.load_backbone(model, dtype="bfloat16"), tasks)(pixels)
        assert all(torch.equal(out, wanted[name]) for name, out in half(pixels).items())
        assert half.attach(random_task(half.backbone, "third", extends=[tasks[0]])).names == [*half.names, "third"]
        double = memoro.compose(backbone, tasks).double()(pixels)["base"]
        assert torch.equal(double, backbone.to(dtype=torch.float64).original(pixels))
        after = composed(pixels)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(half(pixels)["child"], before["child"])
    composed.to("meta")
    assert (devices(composed), devices(model)) == ({"meta"}, {"cpu"})
    assert [devices(task) for task in tasks] == [{"cpu"}] * 2


def test_a_composition_inside_another_module_moves_with_it(backbone: Backbone, pixels: torch.Tensor) -> None:
    composed = memoro.compose(backbone, pair(backbone))
    whole = torch.nn.ModuleDict({"composed": composed}).double()
    assert composed(pixels.double())["base"].dtype == torch.float64
    assert devices(whole.to("meta")) == devices(composed) == {"meta"}
    assert (backbone.dtype, backbone.device.type) == (torch.float32, "cpu")


def test_tasks_start_alike_whatever_the_default_device(backbone: Backbone, vit: Any) -> None:
    plain = memoro.new_task(backbone, "pets", ["a", "b"], rank=2, seed=1)
    with torch.device("meta"):
        task = memoro.new_task(backbone, "pets", ["a", "b"], rank=2, seed=1)
        assert build(backbone, "vpt").content_hash() == build(backbone, "vpt").content_hash()
    assert task.content_hash() == plain.content_hash()


class NoDouble(torch.Tensor):
    """As on MPS: float64 is an error until the tensor is on the CPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return out.as_subclass(torch.Tensor)
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError("MPS has no float64")
        return out


def test_fingerprint_and_verification_need_no_float64_on_the_device(
    backbone: Backbone, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = dict(backbone.anatomy.tensors)
    there = {name: tensor.detach().as_subclass(NoDouble) for name, tensor in tensors.items()}
    assert take_fingerprint(there, heads=2) == take_fingerprint(tensors, heads=2)
    with pytest.raises(TypeError, match="float64"):
        next(iter(there.values())).double()
    model = memoro.compose(backbone, pair(backbone))
    found = model.verify(pixels)
    forward = memoro.Composition.forward

    def on_device(self: Any, *given: Any, **options: Any) -> dict[str, torch.Tensor]:
        return {name: out.as_subclass(NoDouble) for name, out in forward(self, *given, **options).items()}

    monkeypatch.setattr(memoro.Composition, "forward", on_device)
    assert model.verify(pixels) == found


# ------------------------------------------------------------------------------------------------ as an nn.Module


@families
def test_a_composition_is_a_module(case: Case, pixels: torch.Tensor) -> None:
    backbone = memoro.load_backbone(case.model())
    tasks = pair(backbone)
    model = memoro.compose(backbone, tasks)
    assert isinstance(model, nn.Module)
    state = model.state_dict()
    for number, task in enumerate(tasks):
        for name, tensor in task.state_dict().items():
            assert torch.equal(state[f"{number}.{name}"], tensor)
    owned = {tensor.data_ptr() for name, tensor in state.items() if name.startswith("base.")}
    assert all(tensor.untyped_storage().data_ptr() in owned for tensor in backbone.anatomy.tensors.values())
    assert state.keys() == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]} & state.keys()
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if name[0].isdigit())


@pytest.mark.parametrize(
    "name", [pytest.param("vit", marks=pytest.mark.slow), "dinov3", "beit"]
)  # rotary, score biases
def test_a_composition_can_be_exported(name: str, pixels: torch.Tensor) -> None:
    backbone = memoro.load_backbone(next(case for case in FAMILIES if case.name == name).model())
    model = memoro.compose(backbone, pair(backbone))
    with torch.no_grad():
        program = torch.export.export(model, (pixels,))
        other = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(9))
        expected, found = model(other), program.module()(other)
    assert list(found) == ["base", "a.parent", "child"]
    for name, out in expected.items():
        assert torch.allclose(found[name], out, atol=1e-5)  # the same operations, perhaps in another kernel


def test_a_composition_cannot_be_changed(vit: Any, pixels: torch.Tensor) -> None:
    backbone = memoro.load_backbone(vit)
    task = pair(backbone)[0]
    model = memoro.compose(backbone, [task])
    with torch.no_grad():
        before = model(pixels)
        for change in (
            lambda: model.tasks.update(x=task),  # type: ignore[attr-defined]
            lambda: model.tasks.__setitem__("x", task),  # type: ignore[attr-defined]
            lambda: setattr(model, "tasks", {}),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: model.requires_grad_(),
        ):
            with pytest.raises((AttributeError, TypeError, memoro.CompositionError)):
                change()
        assert model.train() is model
        assert not any(module.training for module in model.modules())
        after = model(pixels)
    assert list(model.tasks) == model.names == ["a.parent"]
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(after["base"], vit(pixels).logits)


def everything(backbone: Backbone, root: Path, out: Path, pixels: torch.Tensor) -> dict[str, Any]:
    """What comes out of each of the usual calls, with kept features, worker processes, folds and a checkpoint."""
    squares, table, fresh = root / "squares", root / "numbers" / "table.csv", backbone.to()
    quick: dict[str, Any] = {"image_size": 20, "batch_size": 7, "epochs": 2, "quiet": True}
    side = memoro.train(squares, backbone=fresh, workers=1, folds=3, views=2, folder=out / "run", **quick)
    again = memoro.train(squares, backbone=fresh, workers=0, folds=3, views=2, folder=out / "run", resume=True, **quick)
    numbers = memoro.train(table, backbone=fresh, workers=0, **quick)
    whole = train_baseline(squares, "full", backbone=fresh, lr=0.01, workers=0, **quick)
    task = memoro.load_task(memoro.save_task(side.task, out / "squares.safetensors"))
    child = memoro.new_task(fresh, "child", task.labels, cells=1, extends=[task], seed=1)
    data = memoro.load_data(squares, workers=0, quiet=True)
    memoro.fit(fresh, child, data, workers=0, cache=False, **quick)
    model = memoro.compose(fresh, [task, child])
    images = sorted(squares.rglob("*.png"))[:3]
    with torch.no_grad():
        verified = model.verify(pixels)
        assert verified.base_equal
        assert verified.tasks_equal
        return {
            "hashes": [one.content_hash() for one in (side.task, again.task, numbers.task, whole.task, child)],
            "metrics": [one.metrics for one in (side, again, numbers, whole)],
            "answers": [model.predict(images), whole.task.predict(images)],
            "evaluated": memoro.evaluate(fresh, [task, child], squares, workers=0),
            "explained": model.explain(images, "child").shares(),
            "logits": {name: logits.tolist() for name, logits in model(pixels).items()},
        }


def test_a_default_device_changes_nothing(
    backbone: Backbone, tmp_path: Path, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another device than the backbone's: what is computed stays with the backbone, the rest on the CPU."""
    save_squares(tmp_path / "squares", {"blue": 12, "green": 9, "red": 9})
    save_table(tmp_path / "numbers")
    found = []
    for name in ("cpu", "meta"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name / "cache"))
        torch.set_default_device(name)
        try:
            assert torch.ones(2).device.type == name
            found.append(everything(backbone, tmp_path, tmp_path / name, pixels))
        finally:
            torch.set_default_device(None)
        assert (tmp_path / name / "run" / "report.html").is_file()
    assert found[0] == found[1]
