"""Narrowing: the student starts as a narrow copy of the teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillation.linear import least_squares, normal_equations, set_linear
from distillation.tokencache import Teacher
from distillation.views import to_tensor


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def best_heads(context: Tensor, update: Tensor, weights: Tensor, heads: int, keep: int) -> list[int]:
    """The `keep` heads from whose outputs the attention's whole update can be predicted best."""
    gram, cross = normal_equations(context, update, weights)
    columns = torch.arange(len(gram)).unflatten(0, (heads, -1))

    def explained(chosen: Iterable[int]) -> float:
        at = columns[list(chosen)].flatten()
        return float((cross[at] * torch.linalg.solve(gram[at][:, at], cross[at])).sum())

    return list(max(itertools.combinations(range(heads), keep), key=explained))


@torch.no_grad()
def shrink(teacher: Teacher, student: Any, images: np.ndarray) -> None:
    """Make the student a narrow copy of a DINOv2-like teacher of the same depth.

    The teacher's residual stream is projected onto the directions that matter most over all layers. Then,
    layer by layer, the student gets the teacher's most useful heads and neurons, and each linear layer is
    solved for what the teacher computes there, given what the student has *so far*. Later layers thus
    make good for errors of earlier ones, for missing heads and neurons, and for missing register tokens.
    """
    config, big, count = student.config, teacher.model, teacher.grid**2 + 1
    if getattr(big, "encoder", None) is None or len(big.encoder.layer) != config.num_hidden_layers:
        raise SystemExit("the teacher is not DINOv2-like or not as deep as the student: use --start random")
    views, pixels = to_tensor(images, teacher.mean, teacher.std), to_tensor(images)
    keep = torch.tensor([0, *range(1 - count, 0)])  # all tokens but registers
    weights = torch.ones(len(images), count)
    weights[:, 0] = 16.0  # one class token against many patches, but it is what heads will read

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def set_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
        """Give every channel mean 0 and spread 1: directions differ a hundredfold in size, and gradient steps
        that suit the quiet ones would tear the loud ones apart."""
        normed = norm(x).flatten(0, 1)
        layer.weight.copy_(1 / (normed.std(0) + 1e-3))
        layer.bias.copy_(-normed.mean(0) * layer.weight)
        return layer(x)

    # directions: principal components of the normed stream over all layers, the last class token above all
    moment = torch.zeros(teacher.dim, teacher.dim)
    for batch in views[:256].split(64):
        states = [norm(h[:, keep]) for h in big(pixel_values=batch, output_hidden_states=True).hidden_states]
        for state in states:
            weighted = state * weights[: len(state), :, None] / weights[0].sum()
            moment += state.flatten(0, 1).T @ weighted.flatten(0, 1)
        moment += len(states) * states[-1][:, 0].T @ states[-1][:, 0]
    down = torch.linalg.eigh(moment).eigenvectors[:, -config.hidden_size :].T.flip(0)
    down = down @ (torch.eye(teacher.dim) - 1 / teacher.dim)

    x = torch.cat([big.embeddings(batch) for batch in views.split(64)])
    position = big.embeddings.interpolate_pos_encoding(x[:1, keep], teacher.side, teacher.side)
    mine = student.vit.embeddings
    mine.position_embeddings.copy_(position @ down.T)
    mine.cls_token.copy_(big.embeddings.cls_token @ down.T)
    patches = F.unfold(pixels, config.patch_size, stride=config.patch_size).transpose(1, 2)
    target = (x[:, keep] - position)[:, 1:] @ down.T
    set_linear(mine.patch_embeddings.projection, *least_squares(patches, target, weights[:, 1:]))
    z = torch.cat([mine(batch) for batch in pixels.split(64)])

    heads, kept_heads = big.config.num_attention_heads, config.num_attention_heads
    for number, (theirs, ours) in enumerate(zip(big.encoder.layer, student.vit.layers, strict=True)):
        given, of, to = theirs.norm1(x), theirs.attention, ours.attention
        parts = of.q_proj(given), of.k_proj(given), of.v_proj(given)
        context = attend(*parts, heads)
        update = theirs.layer_scale1(of.o_proj(context))
        chosen = best_heads(context[:, keep], update[:, keep] @ down.T, weights, heads, kept_heads)
        own = set_norm(ours.layernorm_before, z)
        for part, layer in zip(parts, (to.q_proj, to.k_proj, to.v_proj), strict=True):
            target = part[:, keep].unflatten(-1, (heads, -1))[:, :, chosen].flatten(2)
            set_linear(layer, *least_squares(own, target, weights))
        context = attend(to.q_proj(own), to.k_proj(own), to.v_proj(own), kept_heads)
        x = x + update
        set_linear(to.o_proj, *least_squares(context, x[:, keep] @ down.T - z, weights))
        z = z + to.o_proj(context)

        inner = theirs.mlp.fc1(theirs.norm2(x))
        active = theirs.mlp.activation_fn(inner)
        effect = (down @ (theirs.layer_scale2.lambda1[:, None] * theirs.mlp.fc2.weight)).norm(dim=0)
        neurons = (active[:, keep].flatten(0, 1).std(0) * effect).topk(config.intermediate_size).indices
        x = x + theirs.layer_scale2(theirs.mlp.fc2(active))
        own = set_norm(ours.layernorm_after, z)
        set_linear(ours.mlp.fc1, *least_squares(own, inner[:, keep][..., neurons], weights))
        active = ours.mlp.activation_fn(ours.mlp.fc1(own))
        set_linear(ours.mlp.fc2, *least_squares(active, x[:, keep] @ down.T - z, weights))
        z = z + ours.mlp.fc2(active)
        error = (z - x[:, keep] @ down.T).square().sum() / (x[:, keep] @ down.T).square().sum()
        print(f"shrink: layer {number}, heads {chosen}, relative error {error:.3f}", flush=True)
    set_norm(student.vit.layernorm, z[:, :1])
