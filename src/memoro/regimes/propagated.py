"""`propagated`: memory goes from layer to layer like any token, as in the Memory Transformer.

`propagated-additive` adds learned values to it before each further layer. The paper found that both generally hurt.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoro.backbones import Anatomy, Backbone
from memoro.regimes.baseline import Method, Parts, Shapes, Weights
from memoro.regimes.dense import dense_attention, embed_tokens, read_token
from memoro.regimes.memory_full import shape_memory, start_memory
from memoro.regimes.regime import TaskPlan
from memoro.tasks.task import Task


def _shape_once(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """One memory for all layers."""
    return {**shape_memory(backbone, sizes), "memory": (1, sizes["cells"], backbone.dim)}


def _run(anatomy: Anatomy, pixels: Tensor, class_token: Tensor | None, memory: Tensor) -> Tensor:
    """The final-normed token (b, dim); memory (1 or depth, m, dim) has the values that enter at each layer."""
    tokens, context = embed_tokens(anatomy, pixels, class_token)
    memory = memory.to(tokens.dtype)
    own, cells = tokens.shape[1], memory.shape[1]
    tokens = torch.cat([tokens, memory[0].expand(len(tokens), -1, -1)], dim=1)
    for layer, block in enumerate(anatomy.blocks):
        if 0 < layer < len(memory):
            tokens = torch.cat([tokens[:, :own], tokens[:, own:] + memory[layer]], dim=1)
        seen = dense_attention(
            block, context, layer, tokens, extra=cells, spread=lambda bias: F.pad(bias, (0, cells, 0, cells))
        )
        tokens = block.mix(tokens, seen)
    return read_token(anatomy, tokens[:, :own])


def _parts_with(backbone: Backbone, parameters: dict[str, nn.Parameter]) -> Parts:
    def encode(weights: Weights, pixels: Tensor) -> Tensor:
        return _run(backbone.anatomy, pixels, weights.get("class_token"), weights["memory"])

    return Parts(parameters, encode)


def _once_parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    first = nn.Parameter(start.memory.detach()[:1].clone())
    return _parts_with(backbone, {**start_memory(backbone, start), "memory": first})


def _additive_parts(backbone: Backbone, plan: TaskPlan, start: Task) -> Parts:
    return _parts_with(backbone, start_memory(backbone, start))


PROPAGATED = Method(
    "propagated", "class token, memory that goes from layer to layer, head", ("cells",), _shape_once, _once_parts
)
PROPAGATED_ADDITIVE = Method(
    "propagated-additive",
    "the same, with learned values added to memory at each layer",
    ("cells",),
    shape_memory,
    _additive_parts,
)
