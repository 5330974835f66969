"""Naive concatenation: the memories of separately trained `memory-full` models together, without masks.

Every class token, patch and memory cell sees every other, so each model sees keys and values that it was never trained
with. The paper shows how that fails (section 4.4); it is here to be measured, not to be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memoro.errors import CompositionError
from memoro.lab.baselines.baseline import Baseline
from memoro.lab.baselines.dense import dense_attention, embed_tokens
from memoro.tasks.spec import by_name


class NaiveConcatenation:
    """`memory-full` models of one backbone in one pass. With one model it is that model."""

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
