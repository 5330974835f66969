"""Full attention, the slow and obvious way: memory cells are tokens of the layer like all others, then dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from memoro.backbones import Backbone, Block, Context


def run_layer(block: Block, context: Context, layer: int, sequence: Tensor, like: list[int | None]) -> Tensor:
    """One layer in which every token sees every other. `like` names the base token whose place each one has, if any."""
    q, k, v = block.qkv(block.norm1(sequence))
    base = [place for number, place in enumerate(like) if place == number]
    if context.rotate is not None:
        turned_q, turned_k = context.rotate(q[:, :, : len(base)], k[:, :, : len(base)])
        q = torch.cat([turned_q, q[:, :, len(base) :]], 2)
        k = torch.cat([turned_k, k[:, :, len(base) :]], 2)
    scores = q @ k.transpose(-1, -2) * block.scaling
    if context.biases is not None:
        bias = torch.zeros_like(scores[:1])
        for row, reader in enumerate(like):
            for column, seen in enumerate(like):
                if reader is not None and seen is not None:
                    bias[..., row, column] = context.biases[layer][..., reader, seen].detach()
        scores = scores + bias
    return block.mix(sequence, (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def run_dense_oracle(
    backbone: Backbone, pixels: Tensor, classes: list[Tensor], memory: Tensor, *, carry: bool = False
) -> list[Tensor]:
    """The final-normed token for each of the class tokens (their mean of tokens where the family has none).

    The first stands for the pre-trained one. Memory (depth, m, dim) is new at each layer; with `carry` what became of
    it stays, and memory[layer] is added.
    """
    anatomy = backbone.anatomy
    sequence, context = anatomy.embed(pixels)
    own, batch = sequence.shape[1], len(sequence)
    sequence = sequence.clone()
    like: list[int | None] = list(range(own))
    for number, token in enumerate(classes):
        started = anatomy.start(token).expand(batch, 1, -1)
        if number == 0:
            sequence[:, :1] = started
        else:
            sequence, like = torch.cat([sequence, started], 1), [*like, 0]
    count, carried = len(like), torch.zeros_like(memory[0]).expand(batch, -1, -1)
    for layer, block in enumerate(anatomy.blocks):
        cells = memory[layer] + carried
        whole = run_layer(block, context, layer, torch.cat([sequence, cells], 1), [*like, *[None] * memory.shape[1]])
        sequence = whole[:, :count]
        carried = whole[:, count:] if carry else torch.zeros_like(cells)
    if not classes:
        return [anatomy.finish_token(sequence.mean(1))]
    return [anatomy.finish_token(sequence[:, place]) for place in (0, *range(own, count))]
