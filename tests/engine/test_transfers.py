"""What a batch costs besides its pass: one copy to the host for all tasks, one pass for all images of a size."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from conftest import random_task
from prediction_inputs import picture
from torch import Tensor
from trust import add_readout, draw, fit, photographs

import memoro
from memoro.backbones import Backbone
from memoro.engine.answers import Outputs, Recognition
from memoro.images import Preprocessing

READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu", "to"}
"""Methods that wait for a device."""


class Watched(Tensor):
    """A tensor that stands for one on a GPU: it records what waits for it, until it is on the CPU."""

    reads: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in READS and not (name == "to" and args[1:] and isinstance(args[1], torch.dtype)):
            cls.reads.append(name)
            return out.as_subclass(Tensor) if isinstance(out, Tensor) else out
        return out


def watch(outputs: Outputs) -> Outputs:
    def there(tensor: Tensor) -> Tensor:
        return tensor.as_subclass(Watched)

    return Outputs(
        {name: there(one) for name, one in outputs.logits.items()},
        {name: Recognition(*map(there, one)) for name, one in outputs.recognition.items()},
        {name: there(one) for name, one in outputs.tokens.items()},
    )


@pytest.fixture
def model(backbone: Backbone) -> memoro.Composition:
    kinds = ("softmax", "multilabel", "regression")
    tasks = [random_task(backbone, f"t{at}", seed=at, head=kinds[at % 3], cells=at % 2) for at in range(30)]
    for at in (0, 4):
        add_readout(backbone, tasks[at])
        tasks[at].update_spec(familiarity=fit(*draw(150, backbone.dim, 3, seed=at), photographs(backbone.dim)))
    return memoro.compose(backbone, tasks)


def test_a_batch_is_copied_once_for_all_tasks(model: memoro.Composition, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(seed) for seed in range(5)]
    wanted = model.predict(images, batch_size=3)
    assert any("familiarity" in answer for answer in wanted[0].values())
    run = memoro.Composition.run
    monkeypatch.setattr(memoro.Composition, "run", lambda self, *given, **how: watch(run(self, *given, **how)))
    Watched.reads = []
    assert model.predict(images, batch_size=3) == wanted
    assert Watched.reads == ["cpu"] * 2


def test_the_server_copies_once_too(model: memoro.Composition, pixels: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from memoro.serve.batching import run_pass

    wanted, _ = run_pass(model, pixels, model.names)
    run = memoro.Composition.run
    monkeypatch.setattr(memoro.Composition, "run", lambda self, *given, **how: watch(run(self, *given, **how)))
    Watched.reads = []
    found, _ = run_pass(model, pixels, model.names)
    assert Watched.reads == ["cpu"]
    assert set(found.logits) == {"base", *model.names}
    assert all(torch.equal(one, wanted.logits[name]) for name, one in found.logits.items())
    assert {type(one) for one in found.logits.values()} == {Tensor}


def test_images_of_one_size_share_a_pass(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    task = random_task(backbone, "pets")
    task.update_spec(preprocessing=Preprocessing(resize=20))
    model = memoro.compose(backbone, [task])
    images = [picture(seed, *((20, 20) if seed % 3 else (20, 28))) for seed in range(9)]
    wanted = [model.predict([image])[0] for image in images]
    assert len({str(one) for one in wanted}) == 9
    sizes: list[int] = []
    run = memoro.Composition.run

    def count(self: Any, pixels: Tensor, *given: Any, **how: Any) -> Outputs:
        sizes.append(len(pixels))
        return run(self, pixels, *given, **how)

    monkeypatch.setattr(memoro.Composition, "run", count)
    found = model.predict(images, batch_size=9)
    assert sorted(sizes) == [3, 6]
    for one, other in zip(found, wanted, strict=True):
        assert one["pets"]["label"] == other["pets"]["label"]
        assert one["pets"]["probability"] == pytest.approx(other["pets"]["probability"], abs=1e-5)  # another batch


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_bytes_are_pinned_and_copied_while_a_gpu_works(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pin(self: Tensor) -> Tensor:
        calls.append("pinned")
        return self

    def move(self: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
        calls.append((str(device), self.dtype, non_blocking))
        return self

    images, steps = torch.randint(256, (2, 20, 20, 3), dtype=torch.uint8), Preprocessing(resize=20)
    wanted = steps.normalise(images)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(Tensor, "to", move)
        patch.setattr(Preprocessing, "normalise", lambda self, given: given)
        there = steps.on(images, torch.device(kind))
    assert torch.equal(there, images)
    assert calls == [*(["pinned"] if kind == "cuda" else []), (kind, torch.uint8, kind == "cuda")]
    assert torch.equal(steps.on(images, torch.device("cpu")), wanted)
