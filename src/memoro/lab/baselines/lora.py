"""`lora` and `lora-all`: PEFT's LoRA on queries and values, or all matrices, of a copy of the encoder, and a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Anatomy, Backbone, TrainableCopy
from memoro.errors import BackboneError, need
from memoro.lab.baselines.baseline import BaselineRegime, Parts, Shapes
from memoro.lab.baselines.dense import run_copy
from memoro.regimes.regime import TaskPlan

Places = Mapping[str, Tensor]
"""The matrices that LoRA changes, by the names that a file has for them."""


def _attention_places(anatomy: Anatomy) -> Places:
    names = [f"blocks.{layer}.{target}" for layer in range(anatomy.depth) for target in ("q", "v")]
    return {name: anatomy.tensors[f"{name}.0"] for name in names}


def _all_places(anatomy: Anatomy) -> Places:
    """All matrices of the layers. The MLP's are numbered: what they are called differs between families."""
    found: dict[str, Tensor] = {}
    for name, tensor in anatomy.tensors.items():
        part = name.split(".")[2:]
        if tensor.ndim == 2 and name.startswith("blocks.") and part[0] in {"q", "k", "v", "project", "mlp"}:
            found[name if part[0] == "mlp" else name.removesuffix(".0")] = tensor
    return found


def _shapes(places: Places, rank: int) -> Shapes:
    shapes: Shapes = {}
    for place, matrix in places.items():
        out, inner = matrix.shape
        shapes[f"{place}.lora_A"] = (rank, inner)
        shapes[f"{place}.lora_B"] = (out, rank)
    return shapes


def _copy(backbone: Backbone, plan: TaskPlan, dtype: torch.dtype, places: Callable[[Anatomy], Places]) -> Parts:
    need("peft", extra="lora")
    from peft import LoraConfig, inject_adapter_in_model

    assert plan.rank is not None
    made = backbone.trainable_copy()
    targets = _find_targets(backbone, made, places(made.anatomy))
    # alpha = rank: the update counts in full, whatever the rank.
    config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=list(targets.values()))
    with torch.random.fork_rng(devices=[]):  # PEFT draws from the global generator
        torch.manual_seed(plan.seed)
        inject_adapter_in_model(config, made.module)
    parameters: dict[str, nn.Parameter] = {}
    for place, path in targets.items():
        layer: Any = made.module.get_submodule(path)
        for name in ("lora_A", "lora_B"):
            parameters[f"{place}.{name}"] = getattr(layer, name)["default"].to(dtype).weight
    return Parts(backbone.take_apart(made.module), parameters)  # anew: PEFT has put its own modules in


def _find_targets(backbone: Backbone, made: TrainableCopy, places: Places) -> dict[str, str]:
    """Where the module of each matrix is, by the file's names."""
    owners = {
        id(parameter): path
        for path, module in made.module.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    if any(id(weight) not in owners for weight in places.values()):
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) stores queries, keys and values in one matrix, but LoRA needs "
            "separate ones. Load the same weights with transformers."
        )
    return {place: owners[id(weight)] for place, weight in places.items()}


def _regime(name: str, places: Callable[[Anatomy], Places]) -> BaselineRegime:
    return BaselineRegime(
        name,
        ("rank",),
        lambda backbone, sizes: _shapes(places(backbone.anatomy), sizes["rank"]),
        run_copy,
        lambda backbone, plan, dtype: _copy(backbone, plan, dtype, places),
        recipe="default",
    )


LORA = _regime("lora", _attention_places)
LORA_ALL = _regime("lora-all", _all_places)
