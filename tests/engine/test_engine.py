"""The engine against the oracle, and against itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES, FAMILIES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import hidden_states, pool_hidden_states, run_oracle
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.engine.streams import pool_pass
from memoro.tasks.mask import trace_lineage
from memoro.tasks.task import Task

# Two formulations of the same arithmetic in float64.
TOLERANCE = 1e-10
ALONE = (5, (1, 1.0))
"""Fork and read-out of a task that has nothing else."""


def lineage_of(tasks: list[Task]) -> Any:
    parents = [[parent.name for parent in task.extends] for task in tasks]
    return trace_lineage([task.name for task in tasks], parents, [task.from_layer for task in tasks])


@st.composite
def families_of_tasks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Plans of up to six tasks: any DAG, forks, cell counts, ranks, both places of the memory, read-outs."""
    count = draw(st.integers(1, 6))
    return [
        {
            "parents": draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set(),
            "from_layer": (from_layer := draw(st.integers(0, 5))),
            "cells": draw(st.sampled_from([0, 1, 2, 5])),
            "rank": draw(st.sampled_from([0, 1, 3])) if from_layer < 5 else 0,
            "memory_norm": draw(st.sampled_from(["pre", "post"])),
            "labels": [str(label) for label in range(draw(st.integers(2, 4)))],
            "readout": draw(st.sampled_from([None, None, (0, 0.5), ALONE[1], (3, 0.25)])),
        }
        for i in range(count)
    ]


def build(backbone: Backbone, plans: list[dict[str, Any]]) -> list[Task]:
    tasks: list[Task] = []
    for number, plan in enumerate(plans):
        # A read-out alone has no token to extend.
        extends = [tasks[p] for p in sorted(plan["parents"]) if (plans[p]["from_layer"], plans[p]["readout"]) != ALONE]
        options = {key: value for key, value in plan.items() if key not in {"parents", "readout"}}
        task = random_task(backbone, f"task {number}", seed=number, extends=extends, **options)
        if plan["readout"] is not None:
            first, share = plan["readout"]
            add_readout(backbone, task, seed=number, from_layer=first, share=share)
        tasks.append(task)
    return tasks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@settings(max_examples=10, deadline=None)
@given(plans=families_of_tasks(), shuffle=st.randoms(use_true_random=False))
def test_engine_agrees_with_the_oracle(case: Case, plans: list[dict[str, Any]], shuffle: Any) -> None:
    # sdpa: the eager attention of transformers rounds its softmax to float32, even in a float64 model.
    backbone = memoro.load_backbone(case.model("sdpa").double())
    tasks = build(backbone, plans)
    shuffle.shuffle(tasks)
    pixels = torch.randn(2, 3, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = memoro.compose(backbone, tasks)(pixels)
        expected = run_oracle(backbone, tasks, lineage_of(tasks), pixels)
    assert set(out) == set(expected)
    for name, answer in expected.items():
        assert (out[name] - answer).abs().max() < TOLERANCE, name


@pytest.mark.parametrize("size", [20, 28])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_statistics_are_those_of_the_plain_models_hidden_states(case: Case, size: int) -> None:
    backbone = memoro.load_backbone(case.model().double())
    pixels = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        states = hidden_states(backbone, pixels)
        expected = pool_hidden_states(states, backbone.anatomy)
        found = pool_pass(backbone.anatomy, pixels, 1)
    statistics = 2 if case.name.startswith("siglip") else 3
    assert found.shape == (2, 4, statistics, 24)
    assert backbone.anatomy.statistics == statistics
    assert (found - expected[:, 1:]).abs().max() < TOLERANCE
    if statistics == 3:
        assert torch.equal(found[:, :, 0], states[1:, :, 0].transpose(0, 1)), "no other operation"
    assert len({float(value) for value in found.flatten(0, 2).sum(-1)}) == 2 * 4 * statistics, "all differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_in_float32_at_least(vit: Any, dtype: torch.dtype, pixels: torch.Tensor) -> None:
    full = memoro.load_backbone(vit)
    half = full.to(dtype=dtype)
    task = add_readout(full, random_task(full, "one"), share=1.0)
    found = pool_pass(half.anatomy, pixels.to(dtype), 0)
    assert found.dtype == torch.float32
    assert far(found, pool_pass(full.anatomy, pixels, 0)) < 0.2, "8 bits, and random weights amplify"
    answers = [memoro.compose(backbone, task)(pixels)["one"] for backbone in (full, half)]
    assert answers[1].dtype == torch.float32, "as the task's weights, which keep their dtype"
    assert (answers[1] - answers[0]).norm() < 0.1 * answers[0].norm()


def far(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


class Calls(TorchDispatchMode):
    """Counts how often an operation is called."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation, self.count = operation, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.operation in str(function)
        return function(*args, **(kwargs or {}))


def test_layers_are_pooled_once_for_all_tasks_and_only_if_they_are_read(
    backbone: Backbone, pixels: torch.Tensor
) -> None:
    tasks = [add_readout(backbone, random_task(backbone, f"{first}", seed=first), from_layer=first) for first in (1, 4)]
    tasks += [add_readout(backbone, random_task(backbone, f"again {n}", seed=n), from_layer=3) for n in (5, 6)]
    model = memoro.compose(backbone, [*tasks, random_task(backbone, "plain", seed=7)])
    for names, layers in ((None, 4), (["1"], 4), (["4"], 1), (["4", "again 6"], 2), (["plain"], 0), ([], 0)):
        with Calls("std_mean") as mode, torch.no_grad():
            model(pixels, names)
        assert mode.count == layers, names
    with torch.no_grad():
        everything = model(pixels)
        for name in ("1", "4", "again 5", "again 6", "plain"):
            assert far(model(pixels, [name])[name], everything[name]) < 1e-5
            assert far(model.alone(name)(pixels)[name], everything[name]) < 1e-5
    assert far(everything["again 5"], everything["again 6"]) > 0.1


def test_the_oracle_can_fail(backbone: Backbone, pixels: torch.Tensor) -> None:
    """An oracle that ignores parents disagrees, so agreement means something."""
    parent = random_task(backbone, "parent")
    child = random_task(backbone, "child", seed=1, extends=[parent])
    orphan = Task(child.spec, child.class_token.data, child.memory.data, child.head)
    with torch.no_grad():
        out = memoro.compose(backbone, [parent, child])(pixels)
        wrong = run_oracle(backbone, [parent, orphan], lineage_of([parent, orphan]), pixels)
    assert torch.allclose(out["parent"], wrong["parent"], atol=1e-4)
    assert not torch.allclose(out["child"], wrong["child"], atol=1e-2)


def test_the_oracle_of_read_outs_can_fail(backbone: Backbone, pixels: torch.Tensor) -> None:
    """The same weights on the layers in another order."""
    task, turned = (add_readout(backbone, random_task(backbone, "one")) for _ in range(2))
    assert task.readout is not None
    assert turned.readout is not None
    with torch.no_grad():
        turned.readout.weight.copy_(task.readout.weight.unflatten(1, (4, -1)).flip(1).flatten(1))
        out = memoro.compose(backbone, task)(pixels)["one"]
        right, wrong = (run_oracle(backbone, [one], lineage_of([one]), pixels)["one"] for one in (task, turned))
    assert torch.allclose(out, right, atol=1e-4)
    assert not torch.allclose(out, wrong, atol=1e-2)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_a_task_among_a_hundred_equals_the_task_alone(case: Case) -> None:
    backbone = memoro.load_backbone(case.model().double())
    tasks = [
        random_task(backbone, f"task {i}", seed=i, cells=(0, 1, 5)[i % 3], rank=(2, 0, 3)[i % 3], from_layer=i % 5)
        for i in range(98)
    ]
    for i in range(1, 98, 2):
        add_readout(backbone, tasks[i], seed=i, from_layer=i % 4, share=(0.5, 1.0)[i % 3 == 0])
    parent = random_task(backbone, "parent", seed=98, cells=2, rank=2)
    child = random_task(backbone, "child", seed=99, cells=3, extends=[parent])
    pixels = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    with torch.no_grad():
        together = memoro.compose(backbone, [*tasks[:50], parent, *tasks[50:], child])(pixels)
        for task in (*tasks[:7], parent):
            alone = memoro.compose(backbone, [task])(pixels)[task.name]
            assert (together[task.name] - alone).abs().max() < TOLERANCE
        alone = memoro.compose(backbone, [parent, child])(pixels)["child"]
        assert (together["child"] - alone).abs().max() < TOLERANCE
        # A parent does move its child.
        other = random_task(backbone, "parent", seed=5, cells=2, rank=2)
        moved = memoro.compose(backbone, [other, random_task(backbone, "child", seed=99, cells=3, extends=[other])])
        assert (moved(pixels)["child"] - alone).abs().max() > 1e-3


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
@pytest.mark.parametrize("from_layer", [0, 3, 5])
@pytest.mark.parametrize("memory_norm", ["pre", "post"])
def test_every_tensor_of_a_task_gets_a_gradient(case: Case, from_layer: int, memory_norm: Any) -> None:
    model = case.model().requires_grad_(True)
    backbone = memoro.load_backbone(model)
    parent = random_task(backbone, "parent", cells=2)
    options = {"cells": 2, "rank": 2 if from_layer < 5 else 0, "from_layer": from_layer, "memory_norm": memory_norm}
    task = random_task(backbone, "child", extends=[parent], **options)
    out = memoro.compose(backbone, [parent, task], live=True)(torch.randn(2, 3, 20, 20))
    out["child"].square().sum().backward()
    for name, parameter in task.named_parameters():
        if parameter.numel():  # a linear head has no layers for memory
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    if from_layer < 5:
        assert parent.memory.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_read_out_is_trained_only_if_it_is_asked_for(backbone: Backbone, pixels: torch.Tensor) -> None:
    task = add_readout(backbone, random_task(backbone, "one"))
    assert task.readout is not None
    model = memoro.compose(backbone, task, live=True)
    model(pixels)["one"].square().sum().backward()
    assert task.readout.weight.grad is None
    assert task.class_token.grad is not None
    task.readout.requires_grad_(True)
    model(pixels)["one"].square().sum().backward()
    assert task.readout.weight.grad is not None
    per_layer = task.readout.weight.grad.unflatten(1, (4, 3, 24)).abs().sum(dim=(0, 3))
    assert bool((per_layer > 0).all())
    assert task.readout.bias.grad is not None
    assert task.readout.bias.grad.abs().sum() > 0


def test_gradients_agree_with_finite_differences() -> None:
    backbone = memoro.load_backbone(next(c for c in CASES if c.name == "dinov2").model().double())
    parent = random_task(backbone, "parent", cells=1)
    child = random_task(backbone, "child", cells=2, from_layer=2, extends=[parent])
    model = memoro.compose(backbone, [parent, child], live=True)
    pixels = torch.randn(1, 3, 20, 20, dtype=torch.float64)

    def run(memory: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"1.memory": memory, "1.class_token": token}, (pixels,))["child"]

    inputs = (child.memory.detach().requires_grad_(), child.class_token.detach().requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, atol=1e-6)


def test_a_training_loop_of_ones_own(backbone: Backbone, pixels: torch.Tensor) -> None:
    task = memoro.new_task(backbone, "pets", ["cat", "dog"], cells=0, rank=2, from_layer=2)
    model = memoro.compose(backbone, task, live=True)
    optimizer, targets = torch.optim.AdamW(task.parameters(), lr=1e-2), torch.arange(len(pixels)) % 2
    base, losses = model(pixels)["base"], []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(pixels)["pets"], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert torch.equal(model(pixels)["base"], base)
    assert torch.equal(memoro.compose(backbone, task)(pixels)["pets"], model(pixels)["pets"])


def test_gradients_reach_the_pixels_when_asked_for(backbone: Backbone, pixels: torch.Tensor) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "one")])
    wanted = pixels.clone().requires_grad_()
    out = model(wanted)
    out["one"].sum().backward()
    assert wanted.grad is not None
    assert wanted.grad.abs().sum() > 0
    assert not model(pixels)["one"].requires_grad
    alone = add_readout(backbone, random_task(backbone, "alone", from_layer=5), share=1.0)
    wanted.grad = None
    memoro.compose(backbone, alone)(wanted)["alone"].square().sum().backward()
    assert wanted.grad is not None
    assert wanted.grad.abs().sum() > 0


def flops(model: memoro.Composition, pixels: torch.Tensor, tasks: list[str] | None) -> int:
    with FlopCounterMode(display=False) as counter:
        model(pixels, tasks)
    return counter.get_total_flops()


def test_a_subset_computes_only_what_it_needs(backbone: Backbone, pixels: torch.Tensor) -> None:
    parent = random_task(backbone, "parent")
    child = random_task(backbone, "child", seed=1, extends=[parent])
    other = add_readout(backbone, random_task(backbone, "other", seed=2, cells=1))
    model = memoro.compose(backbone, [other, parent, child])
    everything, subset = model(pixels), model(pixels, tasks=["child"])
    assert list(subset) == ["base", "child"]
    assert torch.allclose(subset["child"], everything["child"], atol=1e-5)
    assert torch.equal(subset["base"], everything["base"])
    assert flops(model, pixels, ["child"]) == flops(memoro.compose(backbone, [parent, child]), pixels, ["child"])
    assert flops(model, pixels, []) < flops(model, pixels, ["child"]) < flops(model, pixels, None)
    assert list(model(pixels, tasks=[])) == ["base"]
    assert list(model(pixels, tasks=["other", "parent"])) == ["base", "other", "parent"]


def test_a_composition_is_a_snapshot(backbone: Backbone, pixels: torch.Tensor) -> None:
    task = add_readout(backbone, random_task(backbone, "one"))
    assert task.readout is not None
    for parameter in (task.memory, task.head.bias, task.readout.weight):
        model, live = memoro.compose(backbone, [task]), memoro.compose(backbone, [task], live=True)
        before = model(pixels)["one"]
        with torch.no_grad():
            parameter.add_(1)
        assert torch.equal(model(pixels)["one"], before)
        assert not torch.allclose(live(pixels)["one"], before)


def test_threads_share_a_composition(backbone: Backbone) -> None:
    parent = random_task(backbone, "parent")
    model = memoro.compose(backbone, [parent, random_task(backbone, "child", seed=1, extends=[parent])])
    inputs = [torch.randn(2, 3, 20, 20) for _ in range(16)]
    subsets = [["parent"], ["child"], ["parent", "child"], []]
    expected = [model(x, subsets[i % 4]) for i, x in enumerate(inputs)]
    fresh = memoro.compose(backbone, list(model.tasks.values()))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda item: fresh(item[1], subsets[item[0] % 4]), enumerate(inputs)))
    for result, right in zip(results, expected, strict=True):
        assert all(torch.equal(result[name], right[name]) for name in right)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_autocast(case: Case) -> None:
    backbone = memoro.load_backbone(case.model())
    parent = random_task(backbone, "parent")
    child = add_readout(backbone, random_task(backbone, "child", seed=1, cells=2, extends=[parent]))
    model = memoro.compose(backbone, [parent, child])
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        full = model(pixels)
        with torch.autocast("cpu", torch.bfloat16):
            half = model(pixels)
            original = backbone.original(pixels)
    assert torch.equal(half["base"], original)
    for name in ("parent", "child"):
        # bfloat16 keeps 8 bits, and random weights amplify; a wrong formula would be off by far more
        assert (half[name].float() - full[name]).norm() < 0.25 * full[name].norm()


def test_a_thousand_tasks_and_a_long_chain(backbone: Backbone, pixels: torch.Tensor) -> None:
    tasks = [random_task(backbone, f"task {i}", seed=i, cells=i % 4, from_layer=i % 6) for i in range(1000)]
    for number, task in enumerate(tasks):
        add_readout(backbone, task, seed=number)
    with torch.no_grad():
        out = memoro.compose(backbone, tasks)(pixels)
        assert len(out) == 1001
        assert torch.allclose(out["task 637"], memoro.compose(backbone, [tasks[637]])(pixels)["task 637"], atol=1e-4)
        chain: list[Task] = []
        for i in range(60):
            chain.append(random_task(backbone, f"link {i}", seed=i, cells=1, extends=chain[-1:]))
        assert len(memoro.compose(backbone, chain[::-1])(pixels)) == 61


def test_nothing_of_size_tasks_by_tokens_by_tokens(backbone: Backbone, pixels: torch.Tensor) -> None:
    """No tensor of a pass with 200 tasks may have 200 x 26 x 26 entries for each image and head."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    tasks = [random_task(backbone, f"task {i}", seed=i, cells=5) for i in range(200)]
    model = memoro.compose(backbone, tasks)
    with torch.no_grad(), Watch():
        model(pixels)
    tokens, heads, batch = 26, 3, 2
    assert 0 < largest < batch * heads * 200 * tokens * tokens / 2
