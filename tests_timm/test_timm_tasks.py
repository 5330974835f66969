"""Tasks on timm's models: the engine against the slow oracle, alone against composed, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import hidden_states, pool_hidden_states, run_oracle
from timm_cases import CASES, Case, make_tasks

import memoro
from memoro.engine.streams import pool_pass
from memoro.tasks.mask import Lineage, trace_lineage
from memoro.tasks.task import Task

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Two formulations of the same sums, in float64.
CLOSE = 1e-10


def double(case: Case, fused: bool = True) -> memoro.Backbone:
    return memoro.load_backbone(case.model(fused).double())


def lineage_of(tasks: list[Task]) -> Lineage:
    return trace_lineage(
        [task.name for task in tasks],
        [[parent.name for parent in task.extends] for task in tasks],
        [task.from_layer for task in tasks],
    )


def assert_like_the_oracle(backbone: memoro.Backbone, tasks: list[Task], pixels: torch.Tensor) -> None:
    with torch.no_grad():
        answers = memoro.compose(backbone, tasks)(pixels)
        expected = run_oracle(backbone, tasks, lineage_of(tasks), pixels)
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert (answer - expected[name]).abs().max() < CLOSE, name


@every_case
def test_engine_is_the_oracle(case: Case) -> None:
    backbone = double(case)
    tasks = make_tasks(backbone, 14)
    assert {task.from_layer for task in tasks} == set(range(backbone.depth + 1))
    assert {task.cells for task in tasks} == {0, 1, 3}
    assert sum(bool(task.extends) for task in tasks) > 3
    assert_like_the_oracle(backbone, tasks, case.pixels(case.sizes[-1]).double())


@every_case
def test_statistics_are_those_of_the_plain_models_blocks(case: Case) -> None:
    backbone = double(case)
    for size in case.sizes:
        pixels = case.pixels(size).double()
        with torch.no_grad():
            expected = pool_hidden_states(hidden_states(backbone, pixels), backbone.anatomy)
            found = pool_pass(backbone.anatomy, pixels, 1)
        assert (found - expected[:, 1:]).abs().max() < CLOSE, size


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_engine_is_the_oracle_for_random_families(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(CASES))
    backbone = double(case, data.draw(st.booleans()))
    tasks: list[Task] = []
    for i in range(data.draw(st.integers(1, 6))):
        parents = data.draw(st.lists(st.sampled_from(tasks), unique_by=id, max_size=3)) if tasks else []
        fork, cells = data.draw(st.integers(0, backbone.depth)), data.draw(st.integers(0, 4))
        task = memoro.new_task(
            backbone, f"t{i}", ["a", "b"], cells=cells, from_layer=fork, extends=parents, init="normal", seed=i
        )
        with torch.no_grad():
            task.class_token.mul_(20)
            task.memory.mul_(20)
        tasks.append(task)
    assert_like_the_oracle(backbone, tasks, case.pixels().double())


@every_case
def test_a_task_among_a_hundred_is_the_task_alone(case: Case) -> None:
    backbone = double(case)
    tasks, pixels = make_tasks(backbone, 100), case.pixels().double()
    composition = memoro.compose(backbone, tasks)
    together = composition(pixels)
    for task in tasks[::9]:
        alone = composition.alone(task.name)(pixels)[task.name]
        assert (together[task.name] - alone).abs().max() < CLOSE
    child = next(task for task in tasks if task.extends and 0 < task.from_layer < backbone.depth)
    orphan = Task.from_tensors(child.spec, child.state_dict(), ())
    assert (memoro.compose(backbone, [orphan])(pixels)[child.name] - together[child.name]).abs().max() > 1e-3


@every_case
def test_every_tensor_of_a_task_gets_a_gradient_and_none_of_the_model(case: Case) -> None:
    model = case.model()
    backbone = memoro.load_backbone(model)
    tasks = [task for task in make_tasks(backbone, 12) if task.cells and task.from_layer < backbone.depth]
    used = [*tasks, *{parent for task in tasks for parent in task.extends if parent not in tasks}]
    answers = memoro.compose(backbone, used, live=True)(case.pixels())
    assert not answers["base"].requires_grad
    torch.stack([answers[task.name].square().sum() for task in tasks]).sum().backward()
    for task in tasks:
        for name, parameter in task.named_parameters():
            assert parameter.grad is not None, (task.name, name)
            assert parameter.grad.abs().sum() > 0, (task.name, name)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(tensor.grad is None for tensor in backbone.anatomy.tensors.values())


@every_case
def test_memory_has_the_keys_and_values_that_tokens_have(case: Case) -> None:
    for block in double(case).anatomy.blocks:
        cells = torch.randn(1, 5, 24, dtype=torch.float64)
        (_, *expected), found = block.qkv(cells), block.kv(cells)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < CLOSE
        assert (found[0] - found[1]).abs().max() > 1e-3


@every_case
def test_a_task_token_passes_what_the_class_token_passes(case: Case) -> None:
    """Before layer 0 its position and the pre-norm, after the last layer the final norm."""
    model = case.model().double()
    anatomy, pixels = memoro.load_backbone(model).anatomy, case.pixels().double()
    tokens, context = anatomy.embed(pixels)
    assert context.grid[0] * context.grid[1] == tokens.shape[1] - anatomy.prefix
    if anatomy.class_token is None:
        assert torch.equal(anatomy.start(tokens[0, :1]), model.norm_pre(tokens[0, :1]))
    else:
        start = anatomy.start(anatomy.class_token.unsqueeze(0))
        assert (tokens[:, 0] - start).abs().max() < CLOSE
        assert (tokens[:, 1] - start).abs().max() > 1e-3
    for layer, block in enumerate(anatomy.blocks):
        tokens, _, _ = block.run(tokens, context, layer)
    finished = anatomy.finish_token(tokens)
    if model.global_pool == "token" and not hasattr(model, "head_dist"):
        assert (model.head(finished[:, 0]) - model(pixels)).abs().max() < CLOSE
    assert torch.equal(finished, tokens) == (case.options.get("final_norm") is False)


def test_explain_adds_up() -> None:
    case = next(case for case in CASES if case.name == "registers")
    backbone = memoro.load_backbone(case.model())
    task = memoro.new_task(backbone, "birds", ["a", "b"], cells=3)
    seen = memoro.compose(backbone, [task]).explain(case.pixels(), "birds", normalised=True)
    assert seen.patches.shape == (5, 2, 3, 5, 5)
    assert seen.prefix.shape == (5, 2, 3, 3)
    whole = seen.patches.sum((-1, -2)) + seen.prefix.sum(-1) + seen.itself + seen.memory.sum(-1)
    assert (whole - 1).abs().max() < 1e-5  # float32
