"""`propagated`: memory goes from layer to layer like any token, as in the Memory Transformer.

`propagated-additive` adds learned values to it before each further layer. The paper found that both generally hurt.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from memoro.backbones import Anatomy, Backbone
from memoro.lab.baselines.baseline import BaselineRegime, Shapes
from memoro.lab.baselines.dense import Weights, dense_attention, embed_tokens, read_token
from memoro.lab.baselines.memory_full import shape_memory


def _shape_once(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """One memory for all layers."""
    return {**shape_memory(backbone, sizes), "memory": (1, sizes["cells"], backbone.dim)}


def _run(anatomy: Anatomy, weights: Weights, pixels: Tensor) -> Tensor:
    """The final-normed token (b, dim); `memory` (1 or depth, m, dim) has the values that enter at each layer."""
    tokens, context = embed_tokens(anatomy, pixels, weights.get("class_token"))
    memory = weights["memory"].to(tokens.dtype)
    own, cells = tokens.shape[1], memory.shape[1]
    tokens = torch.cat([tokens, memory[0].expand(len(tokens), -1, -1)], dim=1)
    for layer, block in enumerate(anatomy.blocks):
        if 0 < layer < len(memory):
            tokens = torch.cat([tokens[:, :own], tokens[:, own:] + memory[layer]], dim=1)
        seen = dense_attention(
            block, context, layer, tokens, extra=cells, pad_bias=lambda bias: F.pad(bias, (0, cells, 0, cells))
        )
        tokens = block.mix(tokens, seen)
    return read_token(anatomy, tokens[:, :own])


PROPAGATED = BaselineRegime("propagated", ("cells",), _shape_once, _run)
PROPAGATED_ADDITIVE = BaselineRegime("propagated-additive", ("cells",), shape_memory, _run)
