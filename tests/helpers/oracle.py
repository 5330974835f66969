"""The paper's mask, the slow and obvious way: one dense attention over base tokens, task tokens and memory.

Rows of Table 1: patches and the class token see base tokens only; a task's token sees base tokens, itself, its own
memory, and token and memory of every task that it extends. Everything is one matrix a layer. A task with low-rank
weights takes its token through a copy of the model with B @ A added to its matrices. A read-out is computed from the
hidden states that the plain model reports.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Anatomy, Backbone
from memoro.tasks.mask import Lineage
from memoro.tasks.task import Task


def run_oracle(backbone: Backbone, tasks: Sequence[Task], lineage: Lineage, pixels: Tensor) -> dict[str, Tensor]:
    """`{"base": …, task name: logits}`, as a composition's call gives."""
    anatomy = backbone.anatomy
    merged = {index: merge(backbone, task) for index, task in enumerate(tasks) if task.rank}
    sequence, context = anatomy.embed(pixels)
    batch, base_count, _ = sequence.shape
    alive: list[int] = []  # task of each token after the base tokens
    for layer, block in enumerate(anatomy.blocks):
        sequence, alive = _fork(backbone, tasks, sequence, alive, layer, base_count)
        memory, owner = [], []  # owner: task of each cell
        for index in alive:
            cells = tasks[index].memory[layer - tasks[index].from_layer]
            memory.append(block.norm1(cells) if tasks[index].spec.memory_norm == "pre" else cells)
            owner += [index] * len(cells)
        normed = block.norm1(sequence)
        q, k, v = block.qkv(normed)
        own = {base_count + row: merged[index].blocks[layer] for row, index in enumerate(alive) if index in merged}
        for at, other in own.items():
            parts = other.qkv(other.norm1(sequence[:, at : at + 1]))
            q, k, v = (
                torch.cat([t[:, :, :at], p, t[:, :, at + 1 :]], 2) for t, p in zip((q, k, v), parts, strict=True)
            )
        if context.rotate is not None:  # the rotation is for base tokens
            base_q, base_k = context.rotate(q[:, :, :base_count], k[:, :, :base_count])
            q, k = torch.cat([base_q, q[:, :, base_count:]], 2), torch.cat([base_k, k[:, :, base_count:]], 2)
        if memory and owner:
            memory_k, memory_v = block.kv(torch.cat(memory).expand(batch, -1, -1))
            k, v = torch.cat([k, memory_k], 2), torch.cat([v, memory_v], 2)

        # What each column of the matrix is: None for a base token, else the task that it belongs to.
        columns = [None] * base_count + alive + owner
        allowed = torch.zeros(base_count + len(alive), len(columns), dtype=torch.bool)
        for column, task in enumerate(columns):
            allowed[:, column] = task is None
            for row, reader in enumerate(alive):
                if task is not None and task in lineage.visible(reader, layer):
                    allowed[base_count + row, column] = True

        scores = q @ k.transpose(-1, -2) * block.scaling
        if context.biases is not None:
            bias = context.biases[layer].detach()
            full = scores.new_zeros(1, anatomy.heads, len(allowed), len(columns))
            full[..., :base_count, :base_count] = bias
            full[..., base_count:, :base_count] = bias[..., :1, :]
            full[..., base_count:, base_count : base_count + len(alive)] = bias[..., :1, :1]
            scores = scores + full
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        attended = (weights @ v).transpose(1, 2).flatten(2)
        mixed = block.mix(sequence, attended)
        for at, other in own.items():
            token = other.mix(sequence[:, at : at + 1], attended[:, at : at + 1])
            mixed = torch.cat([mixed[:, :at], token, mixed[:, at + 1 :]], 1)
        sequence = mixed
    sequence, alive = _fork(backbone, tasks, sequence, alive, anatomy.depth, base_count)
    answers = {"base": anatomy.finish(sequence[:, :base_count])}
    pooled = pool_hidden_states(hidden_states(backbone, pixels), anatomy)
    for row, index in enumerate(alive):
        task = tasks[index]
        answers[task.name] = task.head(anatomy.finish_token(sequence[:, base_count + row]))
        if task.readout is not None and task.spec.readout is not None:
            features = pooled[:, task.spec.readout.from_layer :].flatten(1)
            answers[task.name] = answers[task.name] + features @ task.readout.weight.T + task.readout.bias
    return answers


def hidden_states(backbone: Backbone, pixels: Tensor) -> Tensor:
    """The tokens (layers, b, n, dim) after each layer, as the plain model reports them."""
    model, how = copy.deepcopy(backbone.model).eval(), dict[str, Any]()
    if not hasattr(model, "config"):  # timm's models report what their blocks return to hooks only
        states: list[Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda block, args, output: states.append(output))
        model(pixels)
        return torch.stack(states)
    kind = model.config.model_type
    if pixels.shape[-1] != model.config.image_size and not kind.startswith(("dinov2", "dinov3", "beit")):
        how["interpolate_pos_encoding"] = True
    if kind == "vit_mae":  # it drops patches at random
        model.config.mask_ratio = 0.0
        patches = (pixels.shape[-1] // model.config.patch_size) ** 2
        how["noise"] = torch.arange(patches).expand(len(pixels), -1)
    return torch.stack(model(pixels, output_hidden_states=True, **how).hidden_states[1:])


def pool_hidden_states(states: Tensor, anatomy: Anatomy) -> Tensor:
    """(b, layers, statistics, dim): class token, mean and standard deviation of the patch tokens, which are the last
    ones; a model without a class token has the last two."""
    pooled = []
    for tokens in states:
        own = tokens[:, anatomy.prefix :]
        mean = own.sum(1) / own.shape[1]
        deviation = ((own - mean[:, None]) ** 2).sum(1).div(own.shape[1]).sqrt()
        pooled.append(torch.stack([*([] if anatomy.class_token is None else [tokens[:, 0]]), mean, deviation], 1))
    return torch.stack(pooled, 1)


def merge(backbone: Backbone, task: Task) -> Anatomy:
    """The anatomy of a copy of the backbone with the task's low-rank weights added to its matrices."""
    anatomy = backbone.take_apart(backbone.trainable_copy())
    with torch.no_grad():
        for layer in range(task.from_layer, backbone.depth):
            low = {name: tensor[layer - task.from_layer] for name, tensor in task.lora.items()}
            change = {name: low[f"{name}_B"] @ low[f"{name}_A"] for name in ("qkv", "project", "expand", "contract")}
            own = f"blocks.{layer}."
            for name, part in zip("qkv", change["qkv"], strict=True):
                anatomy.tensors[f"{own}{name}.0"].add_(part)
            anatomy.tensors[f"{own}project.0"].add_(change["project"])
            mlp = [t for name, t in anatomy.tensors.items() if name.startswith(f"{own}mlp.") and t.ndim == 2]
            *expand, contract = mlp
            contract.add_(change["contract"])
            for matrix, part in zip(expand, change["expand"].chunk(len(expand)), strict=True):
                matrix.add_(part)
    return anatomy


def _fork(
    backbone: Backbone, tasks: Sequence[Task], sequence: Tensor, alive: list[int], layer: int, base_count: int
) -> tuple[Tensor, list[int]]:
    """The sequence with the tokens of the tasks that start here."""
    for index, task in enumerate(tasks):
        if task.from_layer != layer:
            continue
        if layer == 0:
            token = backbone.anatomy.start(task.class_token).expand(len(sequence), 1, -1)
        else:
            base = sequence[:, :base_count]
            start = base.mean(1, keepdim=True) if backbone.anatomy.class_token is None else base[:, :1]
            token = start + task.class_token
        sequence, alive = torch.cat([sequence, token], 1), [*alive, index]
    return sequence, alive
