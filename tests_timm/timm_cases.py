"""Tiny random VisionTransformers of timm, one for each way to build it: the registry that drives these tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import memoro
from memoro.tasks.task import Task

# dim, heads, depth, patch and image size are all different, so that swapped axes cannot pass.
SMALL: dict[str, Any] = {
    "img_size": 20,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 5,
    "num_heads": 3,
    "mlp_ratio": 2,
    "num_classes": 7,
}
DROPOUT: dict[str, Any] = {
    f"{name}_rate": 0.3 for name in ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")
}


def randomise(model: nn.Module, seed: int = 7) -> Any:
    """The model in eval mode with every weight random: zero-initialised ones would hide mistakes."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def set_fused(model: nn.Module, fused: bool) -> None:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: type[nn.Module] = VisionTransformer
    sizes: tuple[tuple[int, int], ...] = ((20, 20),)
    """Image sizes that the model takes."""

    def model(self, fused: bool = True, seed: int = 7) -> Any:
        model = randomise(self.kind(**{**SMALL, **self.options}), seed)
        set_fused(model, fused)
        return model

    def pixels(self, size: tuple[int, int] | None = None, seed: int = 3) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        channels = self.options.get("in_chans", 3)
        return torch.randn(2, channels, *(size or self.sizes[0]), generator=generator)

    def answer(self, out: Tensor) -> Tensor:
        """What memoro calls `base`, of the forward's output: the class token, or mean, where nothing pools."""
        unpooled = self.options.get("global_pool") == "" and self.options.get("num_classes") == 0
        if not unpooled:
            return out
        return out[:, 0] if self.options.get("class_token", True) else out.mean(1)


CASES = [
    Case("plain", DROPOUT),
    Case("features", {"num_classes": 0}),
    Case("one-channel", {"in_chans": 1}),
    Case("oblong", {"img_size": (20, 12), "patch_size": (4, 2)}, sizes=((20, 12),)),
    Case("remainder", {"img_size": 22}, sizes=((22, 22),)),
    Case("average", {"global_pool": "avg", **DROPOUT}),
    Case("average-without-class", {"global_pool": "avg", "class_token": False}),
    Case("average-with-prefix", {"global_pool": "avg", "pool_include_prefix": True, "reg_tokens": 2}),
    Case("average-max", {"global_pool": "avgmax"}),
    Case("average-final-norm", {"global_pool": "avg", "fc_norm": False}),
    Case("map", {"global_pool": "map"}),
    Case("map-without-class", {"global_pool": "map", "class_token": False, "num_classes": 0}),
    Case("map-fc-norm", {"global_pool": "map", "fc_norm": True}),
    Case("refined", {"global_pool": "prr"}),
    Case("unpooled", {"global_pool": "", "num_classes": 0}),
    Case("unpooled-without-class", {"global_pool": "", "num_classes": 0, "class_token": False}),
    Case("unpooled-classifier", {"global_pool": ""}),
    Case("fc-norm", {"fc_norm": True}),
    Case("no-final-norm", {"final_norm": False}),
    Case("registers", {"reg_tokens": 2}),
    Case("registers-without-positions", {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.5}),
    Case("registers-without-class", {"reg_tokens": 2, "class_token": False, "global_pool": "avg"}),
    Case("class-without-position", {"no_embed_class": True}),
    Case("no-positions", {"pos_embed": "none"}),
    Case("no-positions-dynamic", {"pos_embed": "none", "dynamic_img_size": True}, sizes=((20, 20), (24, 12))),
    Case("pre-norm", {"pre_norm": True, "act_layer": "quick_gelu"}),
    Case("qk-norm", {"qk_norm": True}),
    Case("scale-norms", {"scale_attn_norm": True, "scale_mlp_norm": True}),
    Case("rms-norms", {"norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm", "qk_norm": True}),
    Case("no-biases", {"qkv_bias": False, "proj_bias": False}),
    Case("layer-scale", {"init_values": 0.1, **DROPOUT}),
    Case("swiglu", {"mlp_layer": SwiGLU}),
    Case("swiglu-packed", {"mlp_layer": SwiGLUPacked}),
    Case("dynamic", {"dynamic_img_size": True, "reg_tokens": 1}, sizes=((20, 20), (24, 12), (12, 32))),
    Case("dynamic-without-prefix", {"dynamic_img_size": True, "no_embed_class": True}, sizes=((20, 20), (24, 12))),
    Case("padded", {"dynamic_img_size": True, "dynamic_img_pad": True}, sizes=((20, 20), (23, 14))),
    Case("distilled", DROPOUT, kind=VisionTransformerDistilled),
    Case("distilled-features", {"num_classes": 0}, kind=VisionTransformerDistilled),
]


def make_tasks(backbone: memoro.Backbone, count: int) -> list[Task]:
    """Tasks with all forks and 0, 1 or 3 cells; every fourth extends its neighbour, every eighth that one in turn."""
    tasks: list[Task] = []
    for i in range(count):
        task = memoro.new_task(
            backbone,
            f"task {i}",
            ["a", "b", "c"],
            cells=(0, 1, 3)[i % 3],
            rank=(0, 2)[i % 2] if i % (backbone.depth + 1) < backbone.depth else 0,
            from_layer=i % (backbone.depth + 1),
            extends=[tasks[-1]] if i % 4 == 3 or i % 8 == 4 else [],
            memory_norm="post" if i % 5 == 2 else "pre",
            init="normal",
            seed=i,
        )
        with torch.no_grad():
            for name, parameter in task.named_parameters():  # far from the start, so that every part of a task counts
                if name.endswith("_B"):
                    parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(i))
                elif not name.startswith("lora."):
                    parameter.mul_(20)
        tasks.append(task)
    return tasks
