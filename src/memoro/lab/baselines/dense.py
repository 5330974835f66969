"""The plain pass in which every token attends to every other, and to memory: what most baselines run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memoro.backbones import Anatomy, Block, Context
from memoro.errors import CompositionError
from memoro.tasks.spec import by_name

if TYPE_CHECKING:
    from memoro.lab.baselines.baseline import Baseline

Weights = Mapping[str, Tensor]


def run_dense(anatomy: Anatomy, weights: Weights, pixels: Tensor) -> Tensor:
    """The final-normed token (b, dim) of a pass with `class_token` (dim) and `memory` (depth, m, dim), where given."""
    tokens, context = embed_tokens(anatomy, pixels, weights.get("class_token"))
    memory = weights.get("memory")
    for layer, block in enumerate(anatomy.blocks):
        cells = None if memory is None else memory[layer]
        tokens = block.mix(tokens, dense_attention(block, context, layer, tokens, memory=cells))
    return read_token(anatomy, tokens)


def run_copy(anatomy: Anatomy, weights: Weights, pixels: Tensor, *, checkpointing: bool = False) -> Tensor:
    """The same for a copy of the backbone, which has its weights in its own modules.

    With `checkpointing`, activations are kept between layers only, and computed again for the gradient: a third more
    time, and a fraction of the memory.
    """
    if not (checkpointing and torch.is_grad_enabled()):
        return run_dense(anatomy, {}, pixels)
    tokens, context = anatomy.embed(pixels)

    def run_layer(tokens: Tensor, layer: int) -> Tensor:
        block = anatomy.blocks[layer]
        return block.mix(tokens, dense_attention(block, context, layer, tokens))

    for layer in range(anatomy.depth):
        tokens = checkpoint(run_layer, tokens, layer, use_reentrant=False)
    return read_token(anatomy, tokens)


def embed_tokens(anatomy: Anatomy, pixels: Tensor, class_token: Tensor | None) -> tuple[Tensor, Context]:
    """The tokens (b, n, dim) that enter layer 0, with `class_token` in the place of the pre-trained one."""
    tokens, context = anatomy.embed(pixels)
    if class_token is None:
        return tokens, context
    first = anatomy.start(class_token.to(tokens.dtype).unsqueeze(0)).expand(len(tokens), 1, -1)
    return torch.cat([first, tokens[:, 1:]], dim=1), context


def dense_attention(
    block: Block,
    context: Context,
    layer: int,
    tokens: Tensor,
    *,
    memory: Tensor | None = None,
    extra: int = 0,
    pad_bias: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """What tokens (b, n, dim) take from each other and from memory (m, dim), without a mask: (b, n, h * d).

    The last `extra` tokens are none of the backbone's own: they are not rotated, and `pad_bias` gives them score
    biases, (1, h, n - extra, n - extra) to (1, h, n, n). Memory is not rotated and has a bias of zero.
    """
    q, k, v = block.qkv(block.norm1(tokens))
    if context.rotate is not None:
        own = tokens.shape[1] - extra
        turned = context.rotate(q[:, :, :own], k[:, :, :own])
        q, k = turned if not extra else (torch.cat([t, o[:, :, own:]], 2) for t, o in zip(turned, (q, k), strict=True))
    bias = None if context.biases is None else context.biases[layer]
    if bias is not None and pad_bias is not None:
        bias = pad_bias(bias)
    if memory is not None and len(memory):
        # Norm([tokens; memory]) as in the paper, since the norm is of each token by itself.
        cells = block.kv(block.norm1(memory.to(tokens.dtype).unsqueeze(0)))
        k, v = (torch.cat([t, c.expand(len(t), -1, -1, -1)], dim=2) for t, c in zip((k, v), cells, strict=True))
        bias = None if bias is None else F.pad(bias, (0, len(memory)))
    return block.attend(q, k, v, bias)


def read_token(anatomy: Anatomy, tokens: Tensor) -> Tensor:
    """What a head reads (b, dim): the class token through the final norm, or the mean where there is none."""
    return anatomy.finish_token(anatomy.base_token(tokens))


class NaiveConcatenation:
    """The memories of separately trained `memory-full` models of one backbone together, without masks.

    Every class token, patch and memory cell sees every other, so each model sees keys and values that it was never
    trained with. The paper shows how that fails (section 4.4); it is here to be measured, not to be used. With one
    model it is that model.
    """

    def __init__(self, models: Sequence[Baseline]) -> None:
        if not models:
            raise CompositionError("pass at least one model to concatenate.")
        for model in models:
            if model.regime != "memory-full":
                raise CompositionError(
                    f"{model.name!r} has regime {model.regime!r}: naive concatenation needs 'memory-full' models."
                )
            if model.backbone is not models[0].backbone:
                raise CompositionError(
                    f"{model.name!r} was built or loaded with another backbone object than {models[0].name!r}: load "
                    "all models with the same one."
                )
        self.backbone = models[0].backbone
        self.models = by_name(models)

    def __call__(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Each model's logits, by name, for a batch of normalised images."""
        anatomy, models = self.backbone.anatomy, list(self.models.values())
        pixels = self.backbone.check_pixels(pixel_values)
        classes = [] if anatomy.class_token is None else [model.get_parameter("class_token") for model in models]
        # The first takes the place of the pre-trained class token, the others come after the patches.
        tokens, context = embed_tokens(anatomy, pixels, classes[0] if classes else None)
        own, extra = tokens.shape[1], max(0, len(classes) - 1)
        if extra:
            others = anatomy.start(torch.stack(tuple(classes[1:])).to(tokens.dtype))
            tokens = torch.cat([tokens, others.expand(len(tokens), -1, -1)], dim=1)
        places = torch.tensor([*range(own), *[0] * extra], device=tokens.device)
        memory = torch.cat([model.get_parameter("memory") for model in models], dim=1)
        for layer, block in enumerate(anatomy.blocks):
            seen = dense_attention(
                block,
                context,
                layer,
                tokens,
                memory=memory[layer],
                extra=extra,
                pad_bias=lambda bias: bias[:, :, places][..., places],  # each class token has the class token's biases
            )
            tokens = block.mix(tokens, seen)
        answers: dict[str, Tensor] = {}
        for number, model in enumerate(models):
            token = anatomy.base_token(tokens) if number == 0 or not classes else tokens[:, own + number - 1]
            answers[model.name] = model.head(anatomy.finish_token(token).to(model.head.weight.dtype))
        return answers
