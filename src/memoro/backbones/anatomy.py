"""The protocol through which memoro sees every Vision Transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]
Update = Callable[[str, Tensor], Tensor]
"""What is added to the output of a matrix ("qkv", "project", "expand" or "contract"), given the matrix's input."""


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Context:
    """What one pass carries besides its tokens."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Rotary positions of queries and keys (b, h, n, d) of base tokens; task tokens and memory are not rotated."""
    biases: tuple[Tensor, ...] | None = None
    """One (1, h, n, n) score bias a layer; a task token takes the class token's row."""


class QueryKeyValue(Protocol):
    """Normed tokens (b, n, dim) to queries, keys and values (b, h, n, d)."""

    def __call__(self, tokens: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`added` (b, n, 3 * h * d) is added to the outputs of the three matrices, one after the other."""


@dataclass(frozen=True)
class MlpParts:
    """The model's MLP in three steps, for tokens whose matrices have updates."""

    expand: Map
    activate: Map
    contract: Map
    expanded: int
    """Width after `expand`: of a gated MLP, the gate and what it gates, one after the other."""
    hidden: int
    """Width before `contract`."""


def split_mlp(expand: Sequence[nn.Linear], activation: Map, contract: nn.Linear, norm: Map = identity) -> MlpParts:
    """The parts of an MLP: two matrices in `expand` are a gate and what it gates; `norm` comes after the activation."""

    def activate(expanded: Tensor) -> Tensor:
        if len(expand) == 1:
            return norm(activation(expanded))
        gate, value = expanded.chunk(2, dim=-1)
        return norm(activation(gate) * value)

    first, *gated = expand
    return MlpParts(
        first if not gated else lambda tokens: torch.cat([matrix(tokens) for matrix in expand], dim=-1),
        activate,
        contract,
        sum(matrix.out_features for matrix in expand),
        contract.in_features,
    )


@dataclass(frozen=True)
class Block:
    """One transformer layer, by its parts. Each part is the model's own module: no weight is copied."""

    norm1: Map
    qkv: QueryKeyValue
    kv: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The same without queries, for memory."""
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """The model's own attention implementation: q, k, v, bias to (b, n, h * d)."""
    scaling: float
    head_width: int
    project: Map
    scale1: Map
    norm2: Map
    mlp: Map
    mlp_parts: MlpParts
    scale2: Map
    attention_norm: Map = identity
    """Between attention and `project`, if the model has a norm there."""
    residual_first: bool = False
    """The order of the operands in the original's sums: a sum takes its memory layout from the first, and by that
    torch picks the order in which a later mean over tokens is added up."""

    def mix(self, tokens: Tensor, attended: Tensor, update: Update | None = None) -> Tensor:
        """The rest of the layer after attention, for base tokens (b, n, dim) and task tokens alike."""
        attended = self.attention_norm(attended)
        projected = self.project(attended)
        if update is not None:
            projected = projected + update("project", attended)
        tokens = self._add(tokens, self.scale1(projected))
        normed = self.norm2(tokens)
        return self._add(tokens, self.scale2(self.mlp(normed) if update is None else self._updated_mlp(normed, update)))

    def _updated_mlp(self, normed: Tensor, update: Update) -> Tensor:
        parts = self.mlp_parts
        hidden = parts.activate(parts.expand(normed) + update("expand", normed))
        return parts.contract(hidden) + update("contract", hidden)

    def _add(self, residual: Tensor, change: Tensor) -> Tensor:
        return residual + change if self.residual_first else change + residual

    def run(self, tokens: Tensor, context: Context, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The layer as the original computes it: the next tokens (b, n, dim), and its keys and values (b, h, n, d)."""
        q, k, v = self.qkv(self.norm1(tokens))
        if context.rotate is not None:
            q, k = context.rotate(q, k)
        bias = None if context.biases is None else context.biases[layer]
        return self.mix(tokens, self.attend(q, k, v, bias)), k, v


@dataclass(frozen=True)
class Anatomy:
    """A Vision Transformer taken apart. Base tokens are ordered class token (if any), other prefix tokens, patches."""

    dim: int
    heads: int
    patch: tuple[int, int]
    prefix: int
    """Tokens before the patches: class token, registers, distillation token."""
    blocks: tuple[Block, ...]
    embed: Callable[[Tensor], tuple[Tensor, Context]]
    """Pixels (b, 3, height, width) to the tokens (b, n, dim) that enter layer 0."""
    start: Map
    """A task's token (t, dim) through all that the class token passes before layer 0: position, pre-norm."""
    finish: Map
    """Base tokens after the last layer to the original model's own answer."""
    finish_token: Map
    """Task tokens (…, dim) after the last layer through the class token's final norm."""
    class_token: Tensor | None
    """The pre-trained class token (dim) without its position, None if the family has none."""
    tensors: Mapping[str, Tensor]
    """The encoder's weights under memoro's own names, without heads and poolers."""

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def base_token(self, tokens: Tensor) -> Tensor:
        """Where a fork starts from, (b, dim): the base's class token, or the mean of its tokens if it has none."""
        return tokens.mean(dim=1) if self.class_token is None else tokens[:, 0]

    @property
    def statistics(self) -> int:
        """How many vectors `pool` gives."""
        return 2 if self.class_token is None else 3

    def pool(self, tokens: Tensor) -> Tensor:
        """The statistics of a layer's tokens (b, n, dim) that read-outs read, (b, statistics, dim) in float32 at least:
        the class token, and the mean and the standard deviation of the patch tokens. Families without a class token
        have the last two."""
        tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
        std, mean = torch.std_mean(tokens[:, self.prefix :], dim=1, correction=0)
        return torch.stack([mean, std] if self.class_token is None else [tokens[:, 0], mean, std], dim=1)


def name_tensors(parts: Mapping[str, nn.Module | Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a model's parts under memoro's own names. A module's are numbered in its order, so that the names
    inside do not matter."""
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            tensors[name] = part
        elif part is not None:
            tensors |= {f"{name}.{number}": tensor for number, tensor in enumerate(part.parameters())}
    return tensors
