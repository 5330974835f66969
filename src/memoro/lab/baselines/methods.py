"""All baselines by name, and what each of them trains.

`memory-full`: patches and class token attend to memory too, as in the paper before it masks. `class-full`: the model's
own class token alone. `vpt`: prompts for each layer (VPT-deep). `propagated`: memory goes from layer to layer like any
token, as in the Memory Transformer; `propagated-additive` adds learned values to it before each further layer. The
paper found that both generally hurt.

`adapter`: a bottleneck after attention and after the MLP of each layer. `adapter+memory-full`: memory as well. An
adapter of width w is x + up(gelu(down(x))), before the residual sum, without biases: 2 * dim * w weights, so
depth * 2 * 2 * dim * w in all. On ViT-B with w = 5 that is 184,320. Table 4 of the paper says 737K for "bottleneck 5",
which is 737,280 to the unit, four times as many, and does not say why. Biases are not it (they would add 18,552). Three
readings give the number exactly: a bottleneck of 20; eight adapters a layer instead of two; or adapters as wide as the
MLP inside, 4 * dim. `width=20` has the paper's count, `width=5` its bottleneck.

`full`: a copy of the whole encoder. `lora` and `lora-all`: PEFT's LoRA on queries and values, or all matrices, of a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoro.backbones import Anatomy, Backbone, Block
from memoro.errors import BackboneError, need
from memoro.lab.baselines.baseline import BaselineRegime, Parts, Shapes
from memoro.lab.baselines.dense import Weights, dense_attention, embed_tokens, read_token, run_copy, run_dense
from memoro.regimes.regime import RATES, TaskPlan


def _shape_memory(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """Class token (except where the family has none, as SigLIP) and memory: dim + depth * cells * dim, Table 5."""
    token: Shapes = {} if backbone.anatomy.class_token is None else {"class_token": (backbone.dim,)}
    return token | _shape_prompts(backbone, sizes)


def _shape_prompts(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    # VPT-deep drops what a layer makes of its prompts, so only their keys and values count: they are memory.
    return {"memory": (backbone.depth, sizes["cells"], backbone.dim)}


def _shape_class(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    if backbone.anatomy.class_token is None:
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) has no class token, which regime 'class-full' trains. Use "
            "'head', 'vpt', or 'memory' with 0 cells, which adds a class token."
        )
    return {"class_token": (backbone.dim,)}


def _shape_once(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """One memory for all layers."""
    return {**_shape_memory(backbone, sizes), "memory": (1, sizes["cells"], backbone.dim)}


def _run_propagated(anatomy: Anatomy, weights: Weights, pixels: Tensor) -> Tensor:
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


PLACES = 2  # after attention, after the MLP


def _shape_adapters(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """They start with small values: near the identity, and yet with gradients to both matrices from the first step."""
    depth, dim, width = backbone.depth, backbone.dim, sizes["width"]
    return {"down": (depth, PLACES, width, dim), "up": (depth, PLACES, dim, width)}


def _shape_both(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return _shape_adapters(backbone, sizes) | _shape_memory(backbone, sizes)


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


def _shape_full(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in backbone.anatomy.tensors.items()}


def _copy_full(backbone: Backbone, plan: TaskPlan, dtype: torch.dtype) -> Parts:
    """The copy stays in eval mode: with dropout it would be another comparison."""
    module = backbone.trainable_copy(dtype)
    anatomy = backbone.take_apart(module)
    owners = {parameter.untyped_storage().data_ptr(): parameter for parameter in module.parameters()}
    names: dict[int, str] = {}
    for name, tensor in anatomy.tensors.items():
        names.setdefault(tensor.untyped_storage().data_ptr(), name)  # the first of those that are parts of a parameter
    weights = {name: owners[place] for place, name in names.items()}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    return Parts(anatomy, weights, stored=anatomy.tensors)


Places = Mapping[str, Tensor]
"""The matrices that LoRA changes, by the names that a file has for them."""


def _attention_places(anatomy: Anatomy) -> Places:
    names = [f"blocks.{layer}.{target}" for layer in range(anatomy.depth) for target in ("q", "v")]
    return {name: anatomy.tensors[f"{name}.0"] for name in names}


def _all_places(anatomy: Anatomy) -> Places:
    """All matrices of the layers. The MLP's are numbered: what they are called differs between families."""
    found: dict[str, Tensor] = {}
    for name, tensor in anatomy.tensors.items():
        part = name.split(".")[2:]
        if tensor.ndim == 2 and name.startswith("blocks.") and part[0] in {"q", "k", "v", "project", "mlp"}:
            found[name if part[0] == "mlp" else name.removesuffix(".0")] = tensor
    return found


def _shape_lora(places: Places, rank: int) -> Shapes:
    shapes: Shapes = {}
    for place, matrix in places.items():
        out, inner = matrix.shape
        shapes[f"{place}.lora_A"] = (rank, inner)
        shapes[f"{place}.lora_B"] = (out, rank)
    return shapes


def _copy_lora(backbone: Backbone, plan: TaskPlan, dtype: torch.dtype, places: Callable[[Anatomy], Places]) -> Parts:
    need("peft", extra="lora")
    from peft import LoraConfig, inject_adapter_in_model

    assert plan.rank is not None
    module = backbone.trainable_copy()
    targets = _find_targets(backbone, module, places(backbone.take_apart(module)))
    # alpha = rank: the update counts in full, whatever the rank.
    config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=list(targets.values()))
    with torch.random.fork_rng(devices=[]):  # PEFT draws from the global generator
        torch.manual_seed(plan.seed)
        inject_adapter_in_model(config, module)
    parameters: dict[str, nn.Parameter] = {}
    for place, path in targets.items():
        layer: Any = module.get_submodule(path)
        for name in ("lora_A", "lora_B"):
            parameters[f"{place}.{name}"] = getattr(layer, name)["default"].to(dtype).weight
    return Parts(backbone.take_apart(module), parameters)  # anew: PEFT has put its own modules in


def _find_targets(backbone: Backbone, model: nn.Module, places: Places) -> dict[str, str]:
    """Where the module of each matrix is, by the file's names."""
    owners = {
        id(parameter): path for path, module in model.named_modules() for parameter in module.parameters(recurse=False)
    }
    if any(id(weight) not in owners for weight in places.values()):
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) stores queries, keys and values in one matrix, but LoRA needs "
            "separate ones. Load the same weights with transformers."
        )
    return {place: owners[id(weight)] for place, weight in places.items()}


def _lora(name: str, places: Callable[[Anatomy], Places]) -> BaselineRegime:
    return BaselineRegime(
        name,
        ("rank",),
        lambda backbone, sizes: _shape_lora(places(backbone.anatomy), sizes["rank"]),
        run_copy,
        lambda backbone, plan, dtype: _copy_lora(backbone, plan, dtype, places),
        recipe="default",
    )


BASELINES: dict[str, BaselineRegime] = {
    regime.name: regime
    for regime in (
        BaselineRegime("memory-full", ("cells",), _shape_memory, run_dense),
        BaselineRegime("class-full", (), _shape_class, run_dense),
        BaselineRegime("vpt", ("cells",), _shape_prompts, run_dense),
        BaselineRegime("adapter", ("width",), _shape_adapters, _run_adapted),
        BaselineRegime("adapter+memory-full", ("cells", "width"), _shape_both, _run_adapted),
        BaselineRegime("propagated", ("cells",), _shape_once, _run_propagated),
        BaselineRegime("propagated-additive", ("cells",), _shape_memory, _run_propagated),
        BaselineRegime("full", (), _shape_full, run_copy, _copy_full, {**RATES, "adamw": (0.00001, 0.00003, 0.0001)}),
        _lora("lora", _attention_places),
        _lora("lora-all", _all_places),
    )
}
