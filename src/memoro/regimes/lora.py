"""`lora`: PEFT's LoRA on the queries and values of a copy of the encoder, and a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memoro.backbones import Backbone, TrainableCopy
from memoro.errors import BackboneError
from memoro.extras import need
from memoro.regimes.baseline import Method, Parts, Shapes
from memoro.regimes.dense import run_copy
from memoro.regimes.regime import TaskPlan

TARGETS = ("q", "v")


def _shapes(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    shapes: Shapes = {}
    for place in _places(backbone):
        out, inner = backbone.anatomy.tensors[f"{place}.0"].shape
        shapes[f"{place}.lora_A"] = (sizes["rank"], inner)
        shapes[f"{place}.lora_B"] = (out, sizes["rank"])
    return shapes


def _places(backbone: Backbone) -> list[str]:
    return [f"blocks.{layer}.{target}" for layer in range(backbone.depth) for target in TARGETS]


def _copy(backbone: Backbone, plan: TaskPlan, dtype: torch.dtype) -> Parts:
    need("peft", extra="lora")
    from peft import LoraConfig, inject_adapter_in_model

    made = backbone.trainable_copy()
    targets = _find_targets(backbone, made)
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
    return Parts(made.anatomy, parameters)


def _find_targets(backbone: Backbone, made: TrainableCopy) -> dict[str, str]:
    """Where the module of each query and value matrix is, by the anatomy's names."""
    owners = {
        id(parameter): path
        for path, module in made.module.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    weights = {place: made.anatomy.tensors[f"{place}.0"] for place in _places(backbone)}
    if any(id(weight) not in owners for weight in weights.values()):
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) stores queries, keys and values in one matrix, but LoRA needs "
            "separate ones. Load the same weights with transformers."
        )
    return {place: owners[id(weight)] for place, weight in weights.items()}


LORA = Method("lora", "PEFT's LoRA on queries and values of each layer, and head", ("rank",), _shapes, run_copy, _copy)
