"""`lora`: PEFT's LoRA on the queries and values of a copy of the encoder, and a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone, TrainableCopy
from memoro.errors import BackboneError
from memoro.extras import need
from memoro.regimes.baseline import Method, Parts, Shapes, Weights
from memoro.regimes.dense import run_dense
from memoro.regimes.regime import TaskPlan
from memoro.tasks.task import Task

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


def _parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    need("peft", extra="lora")
    from peft import LoraConfig, inject_adapter_in_model

    trainable_copy = backbone.trainable_copy()
    targets = _find_targets(backbone, trainable_copy)
    # alpha = rank: the update counts in full, whatever the rank.
    config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=list(targets.values()))
    with torch.random.fork_rng(devices=[]):  # PEFT draws from the global generator
        torch.manual_seed(plan.seed)
        inject_adapter_in_model(config, trainable_copy.module)
    parameters: dict[str, nn.Parameter] = {}
    for place, path in targets.items():
        layer: Any = trainable_copy.module.get_submodule(path)
        for name in ("lora_A", "lora_B"):
            matrix = getattr(layer, name)["default"].to(start.head.weight.dtype)
            parameters[f"{place}.{name}"] = matrix.weight

    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return run_dense(trainable_copy.anatomy, pixels)

    return Parts(parameters, encode)


def _find_targets(backbone: Backbone, trainable_copy: TrainableCopy) -> dict[str, str]:
    """Where the module of each query and value matrix is, by the anatomy's names."""
    owners = {
        id(parameter): path
        for path, module in trainable_copy.module.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    weights = {place: trainable_copy.anatomy.tensors[f"{place}.0"] for place in _places(backbone)}
    if any(id(weight) not in owners for weight in weights.values()):
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) keeps queries, keys and values in one matrix: LoRA on queries and "
            "values needs them apart. Load the same weights through transformers."
        )
    return {place: owners[id(weight)] for place, weight in weights.items()}


LORA = Method("lora", "PEFT's LoRA on queries and values of each layer, and head", ("rank",), _shapes, _parts)
