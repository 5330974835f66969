"""Tasks with low-rank weights of their own, and the regime `side` that trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_task
from families import CASES, Case
from safetensors.torch import load_file
from squares import save_squares
from task_files import rewrite

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskError, TaskFileError, TrainingError
from memoro.evaluation.inspect import describe_task
from memoro.regimes import REGIMES, TaskPlan

LABELS = ["a", "b", "c"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_parts_of_an_mlp_are_the_whole(case: Case) -> None:
    for block in memoro.load_backbone(case.model().double()).anatomy.blocks:
        tokens, parts = torch.randn(2, 5, 24, dtype=torch.float64), block.mlp_parts
        expanded = parts.expand(tokens)
        hidden = parts.activate(expanded)
        assert (expanded.shape[-1], hidden.shape[-1]) == (parts.expanded, parts.hidden)
        assert (parts.contract(hidden) - block.mlp(tokens)).abs().max() < 1e-12


def test_new_low_rank_weights_change_nothing_yet(backbone: Backbone, pixels: torch.Tensor) -> None:
    task = memoro.new_task(backbone, "side", LABELS, cells=2, rank=4, from_layer=3, seed=1)
    plain = memoro.new_task(backbone, "plain", LABELS, cells=2, from_layer=3, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        start = memoro.compose(backbone, [task, plain])(pixels)
        assert torch.allclose(start["side"], start["plain"], atol=1e-6)
        for name, tensor in task.lora.items():
            before = tensor.clone()
            if name.endswith("_B"):
                tensor.add_(torch.randn(tensor.shape, generator=generator))
                moved = memoro.compose(backbone, [task, plain])(pixels)
                assert (moved["side"] - start["side"]).abs().max() > 1e-3, name
                assert torch.equal(moved["plain"], start["plain"])
                tensor.copy_(before)


def test_rank_zero_is_a_task_as_before(backbone: Backbone) -> None:
    task = random_task(backbone, "plain", cells=2)
    assert set(task.state_dict()) == {"class_token", "memory", "head.weight", "head.bias"}
    assert task.content_hash() == memoro.new_task(backbone, "plain", LABELS, cells=2, seed=0).spec.hash_content(
        task.state_dict(), from_layer=0, memory_norm="pre", parents=[]
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2, "from_layer": 5}, "linear head"),
        ({"rank": -1}, "`rank` must be"),
        ({"rank": 2000}, "`rank` must be"),
    ],
)
def test_impossible_ranks(backbone: Backbone, options: dict[str, int], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        memoro.new_task(backbone, "t", LABELS, **options)


@pytest.mark.parametrize("regime", ["memory", "head"])
def test_regimes_without_low_rank_weights_say_so(backbone: Backbone, regime: str) -> None:
    with pytest.raises(TrainingError, match="Use regime 'side'"):
        REGIMES[regime].build(backbone, TaskPlan("t", LABELS, rank=4))


def test_the_sizes_of_side_follow_the_backbone(backbone: Backbone) -> None:
    task = REGIMES["side"].build(backbone, TaskPlan("t", LABELS))
    assert (task.rank, task.cells, task.from_layer) == (4, 0, 3)
    assert REGIMES["side"].build(backbone, TaskPlan("t", LABELS, rank=2, cells=3, from_layer=1)).cells == 3


def test_a_subset_picks_its_own_weights(backbone: Backbone, pixels: torch.Tensor) -> None:
    tasks = [
        random_task(backbone, str(i), seed=i, cells=0, rank=(2, 2, 3, 0)[i % 4], from_layer=(3, 1)[i % 2])
        for i in range(9)
    ]
    model = memoro.compose(backbone, tasks)
    with torch.no_grad():
        whole = model(pixels)
        for names in (["4"], ["8", "0"], ["1", "2", "3"]):
            part = model(pixels, names)
            assert list(part) == ["base", *names]
            for name in names:
                assert torch.allclose(part[name], whole[name], atol=1e-4)


def test_a_child_sees_what_its_parents_weights_make(backbone: Backbone, pixels: torch.Tensor) -> None:
    parent = random_task(backbone, "parent", cells=0, rank=2)
    child = random_task(backbone, "child", seed=1, cells=0, rank=2, extends=[parent])
    with torch.no_grad():
        before = memoro.compose(backbone, [parent, child])(pixels)["child"]
        parent.lora["qkv_B"].add_(0.5)
        changed = random_task(backbone, "child", seed=1, cells=0, rank=2, extends=[parent])
        after = memoro.compose(backbone, [parent, changed])(pixels)["child"]
    assert (after - before).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------- files


def test_files_keep_low_rank_weights(backbone: Backbone, pixels: torch.Tensor, tmp_path: Path) -> None:
    task = random_task(backbone, "side", cells=1, rank=3, from_layer=2)
    path = memoro.save_task(task, tmp_path / "side.safetensors")
    loaded = memoro.load_task(path)
    assert (loaded.rank, loaded.content_hash()) == (3, task.content_hash())
    with torch.no_grad():
        expected, found = (memoro.compose(backbone, [one])(pixels)["side"] for one in (task, loaded))
    assert torch.equal(found, expected)
    # In half precision the file is half as big and answers the same up to rounding.
    half = memoro.save_task(memoro.load_task(path).half(), tmp_path / "half.safetensors")
    assert half.stat().st_size < 0.7 * path.stat().st_size
    with torch.no_grad():
        close = memoro.compose(backbone, [memoro.load_task(half)])(pixels)["side"].float()
    assert (close - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("dtype", "change", "words"),
    [
        (torch.float16, lambda tensor: tensor.float().fill_(1e30), "values beyond torch.float16"),
        (torch.float64, lambda tensor: tensor.half(), r"torch.float16 in a task of torch.float64"),
    ],
)
def test_low_rank_weights_of_a_hostile_dtype_are_refused(
    backbone: Backbone, tmp_path: Path, dtype: torch.dtype, change: Any, words: str
) -> None:
    task = random_task(backbone, "side", rank=2).to(dtype)
    path = memoro.save_task(task, tmp_path / "side.safetensors")
    assert memoro.load_task(path).content_hash() == task.content_hash()
    name = "0.lora.project_B"
    rewrite(path, lambda record, tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(TaskFileError, match=words):
        memoro.load_task(path)


def test_training_rounds_low_rank_weights_and_files_hold_them_as_float16(backbone: Backbone, tmp_path: Path) -> None:
    squares = save_squares(tmp_path / "squares")
    task = memoro.train(squares, backbone=backbone, lr=0.003, epochs=1, image_size=20, workers=0, quiet=True).task
    assert task.rank == 4
    file = memoro.save_task(task, tmp_path / "task.safetensors")
    dtypes = {
        name.split(".")[1]: tensor.dtype for name, tensor in load_file(file).items() if ".familiarity" not in name
    }
    assert dtypes == {
        "class_token": torch.float32,
        "memory": torch.float32,
        "head": torch.float32,
        "lora": torch.float16,
        "readout": torch.float16,
    }
    parts = describe_task(task)["parts"]
    assert sum(parts.values()) == sum(
        tensor.numel() * tensor.element_size() for name, tensor in load_file(file).items() if ".familiarity" not in name
    )
    again = memoro.load_task(file)
    assert {tensor.dtype for tensor in again.state_dict().values()} == {torch.float32}
    assert again.content_hash() == task.content_hash()
    fine = random_task(backbone, "fine", rank=2, from_layer=3)  # values between those of float16 are kept as they are
    assert load_file(memoro.save_task(fine, file))["0.lora.qkv_A"].dtype == torch.float32


def test_format_1_still_loads(backbone: Backbone, tmp_path: Path) -> None:
    task = random_task(backbone, "old", cells=2)
    path = memoro.save_task(task, tmp_path / "old.safetensors")

    def downgrade(record: Any, tensors: Any) -> None:
        assert record["format"] == 2
        record["format"] = 1
        assert not {"rank", "widths"} & set(record["tasks"][0])

    rewrite(path, downgrade)
    assert memoro.load_task(path).content_hash() == task.content_hash()


@pytest.mark.parametrize(
    "change",
    [
        lambda r, t: r["tasks"][0].update(rank=4),
        lambda r, t: r["tasks"][0].update(rank=0),
        lambda r, t: r["tasks"][0].update(rank=True),
        lambda r, t: r["tasks"][0].update(rank=10**9),
        lambda r, t: r["tasks"][0].update(from_layer=5),
        lambda r, t: r["tasks"][0].pop("rank"),
        lambda r, t: r["tasks"][0].pop("widths"),
        lambda r, t: r["tasks"][0]["widths"].update(hidden=2**40),
        lambda r, t: r["tasks"][0]["widths"].update(attention="24"),
        lambda r, t: r["tasks"][0]["widths"].pop("expanded"),
        lambda r, t: t.pop("0.lora.qkv_A"),
        lambda r, t: t.update({"0.lora.other_A": torch.zeros(1)}),
        lambda r, t: t["0.lora.expand_B"].fill_(float("nan")),
        lambda r, t: t["0.lora.expand_B"].add_(1),
    ],
)
def test_hostile_low_rank_weights_are_refused(backbone: Backbone, tmp_path: Path, change: Any) -> None:
    path = memoro.save_task(random_task(backbone, "side", rank=3, from_layer=2), tmp_path / "side.safetensors")
    rewrite(path, change)
    with pytest.raises(TaskFileError):
        memoro.load_task(path)


def test_weights_for_other_widths_are_refused(backbone: Backbone, tmp_path: Path) -> None:
    """The fingerprint would be right, the widths are not: such a task cannot be computed."""
    task = random_task(backbone, "side", cells=0, rank=3, from_layer=2)
    path = memoro.save_task(task, tmp_path / "side.safetensors")

    def narrow(record: Any, tensors: Any) -> None:
        record["tasks"][0]["widths"]["hidden"] = 7
        tensors["0.lora.contract_A"] = tensors["0.lora.contract_A"][..., :7].contiguous()
        spec = memoro.load_task(path).spec
        own = {name.removeprefix("0."): tensor for name, tensor in tensors.items()}
        record["tasks"][0]["content"] = spec.hash_content(own, from_layer=2, memory_norm="pre", parents=[])

    rewrite(path, narrow)
    with pytest.raises(memoro.errors.CompositionError, match="Widths"):
        memoro.compose(backbone, [memoro.load_task(path)])
