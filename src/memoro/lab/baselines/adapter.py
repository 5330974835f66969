"""`adapter`: a bottleneck after attention and after the MLP of each layer. `adapter+memory-full`: memory as well.

An adapter of width w is x + up(gelu(down(x))), before the residual sum, without biases: 2 * dim * w weights, so
depth * 2 * 2 * dim * w in all. On ViT-B with w = 5 that is 184,320. Table 4 of the paper says 737K for "bottleneck 5",
which is 737,280 to the unit, four times as many, and does not say why. Biases are not it (they would add 18,552). Three
readings give the number exactly: a bottleneck of 20; eight adapters a layer instead of two; or adapters as wide as the
MLP inside, 4 * dim. `width=20` has the paper's count, `width=5` its bottleneck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from memoro.backbones import Anatomy, Backbone, Block
from memoro.lab.baselines.baseline import BaselineRegime, Shapes
from memoro.lab.baselines.dense import Weights, run_dense
from memoro.lab.baselines.memory_full import shape_memory

PLACES = 2  # after attention, after the MLP


def _shape_adapters(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """They start with small values: near the identity, and yet with gradients to both matrices from the first step."""
    depth, dim, width = backbone.depth, backbone.dim, sizes["width"]
    return {"down": (depth, PLACES, width, dim), "up": (depth, PLACES, dim, width)}


def _shape_both(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return _shape_adapters(backbone, sizes) | shape_memory(backbone, sizes)


def _adapt(block: Block, down: Tensor, up: Tensor) -> Block:
    """The layer with its two adapters, (2, w, dim) and (2, dim, w)."""

    def adapter(change: Tensor, place: int) -> Tensor:
        inner = F.gelu(F.linear(change, down[place].to(change.dtype)))
        return change + F.linear(inner, up[place].to(change.dtype))

    return replace(
        block,
        scale1=lambda change: adapter(block.scale1(change), 0),
        scale2=lambda change: adapter(block.scale2(change), 1),
    )


def _run_adapted(anatomy: Anatomy, weights: Weights, pixels: Tensor) -> Tensor:
    layers = zip(anatomy.blocks, weights["down"], weights["up"], strict=True)
    adapted = replace(anatomy, blocks=tuple(_adapt(block, down, up) for block, down, up in layers))
    return run_dense(adapted, weights, pixels)


ADAPTER = BaselineRegime("adapter", ("width",), _shape_adapters, _run_adapted)
ADAPTER_MEMORY = BaselineRegime("adapter+memory-full", ("cells", "width"), _shape_both, _run_adapted)
