"""A task: a class token, memory cells and low-rank weights for each layer, and a head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone, BackboneRecord, require_backbone
from memoro.errors import DataError, TaskError
from memoro.heads import HEADS, find_kind
from memoro.options import plain_int, several
from memoro.tasks.spec import (
    INIT_STD,
    LOW_RANK,
    MAX_CELLS,
    MAX_RANK,
    READ_OUT,
    MemoryNorm,
    ReadOut,
    TaskModule,
    TaskSpec,
    Widths,
    check_labels,
    check_name,
    is_halved,
    make_linear,
    round_half,
)


@dataclass(frozen=True)
class Parent:
    """A task that another one extends: its name and its content hash."""

    name: str
    content: str


class Task(TaskModule[TaskSpec]):
    """What one task adds to a frozen backbone. `spec` says what it is; the parameters are what it learned."""

    def __init__(
        self,
        spec: TaskSpec,
        class_token: Tensor,
        memory: Tensor,
        head: nn.Linear,
        extends: Sequence[Task | Parent] = (),
        lora: Mapping[str, Tensor] | None = None,
        readout: nn.Linear | None = None,
    ) -> None:
        super().__init__(spec)
        self.class_token = nn.Parameter(class_token)
        self.memory = nn.Parameter(memory)
        self.head = head
        self.lora = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in (lora or {}).items()})
        """Low-rank weights: B @ A of each matrix, at each layer from the fork on; empty for rank 0."""
        self.readout = readout
        """From the base's pooled statistics (layers * statistics * dim) to what is added to the head's logits."""
        # A tuple, so that torch does not take the parents' parameters for this task's own.
        self.extends = tuple(extends)
        self._trained_with = {parent.name: parent.content for parent in extends if isinstance(parent, Parent)}

    @classmethod
    def from_tensors(cls, spec: TaskSpec, tensors: Mapping[str, Tensor], extends: Sequence[Task | Parent]) -> Task:
        """The task with the tensors of a state dict; they are not copied."""
        lora = {name.removeprefix(LOW_RANK): tensor for name, tensor in tensors.items() if name.startswith(LOW_RANK)}
        head = make_linear(tensors["head.weight"], tensors["head.bias"])
        readout = None
        if spec.readout is not None:
            readout = make_linear(tensors[f"{READ_OUT}weight"], tensors[f"{READ_OUT}bias"])
        return cls(spec, tensors["class_token"], tensors["memory"], head, extends, lora, readout)

    @property
    def from_layer(self) -> int:
        return self.spec.from_layer

    @property
    def cells(self) -> int:
        return self.spec.cells

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def members(self) -> int:
        return self.spec.members

    @property
    def parents(self) -> tuple[Parent, ...]:
        """Name and content hash of each task that this one extends: as it was trained with, else as of now."""
        return self.parents_among(content_hashes([parent for parent in self.extends if isinstance(parent, Task)]))

    def parents_among(self, hashes: Mapping[int, str]) -> tuple[Parent, ...]:
        """The same, given the hashes of the parents (see `content_hashes`)."""
        return tuple(
            Parent(parent.name, self._trained_with.get(parent.name) or hashes[id(parent)]) for parent in self.extends
        )

    def content_hash(self) -> str:
        """SHA-256 of all that decides this task's answers: weights, shape of the stream, labels, parents."""
        return content_hashes([self])[id(self)]

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "cells": self.cells,
            "rank": self.rank,
            "from_layer": self.from_layer,
            "memory_norm": self.spec.memory_norm,
            "extends": [parent.content for parent in self.parents],
        }

    def stored_tensors(self) -> dict[str, Tensor]:
        """Its weights as a file holds them: the largest as float16 if that changes no value of float32."""
        found: dict[str, Tensor] = self.state_dict()
        for name, tensor in found.items():
            half = tensor.half() if is_halved(name) and tensor.dtype == torch.float32 else tensor
            found[name] = half if torch.equal(half.to(tensor.dtype), tensor) else tensor
        return found

    @torch.no_grad()
    def attach_readout(self, reads: ReadOut, weight: Tensor, bias: Tensor) -> None:
        """Gives it a read-out, weight (labels, features) and bias (labels), of which `reads.share` counts. Of its head,
        the rest counts from then on."""
        self.detach_readout()
        for parameter in self.head.parameters():
            parameter.copy_(parameter * (1 - reads.share) + 0.0)  # no -0.0, which would be other content
        like = self.head.weight
        weight = round_half(weight * reads.share)  # as a file holds it: a smaller value may need more bits
        self.update_spec(readout=reads)
        self.readout = make_linear(weight.to(like), bias.to(like) * reads.share).requires_grad_(False)

    @torch.no_grad()
    def detach_readout(self) -> None:
        """Takes the read-out away: the head is what it was without one."""
        if self.spec.readout is not None and self.spec.readout.share < 1:
            for parameter in self.head.parameters():
                parameter.div_(1 - self.spec.readout.share)
        self.update_spec(readout=None)
        self.readout = None

    def finish_training(self) -> None:
        """Rounds low-rank weights to what float16 can hold: they are most of a task, and its file is half as large."""
        for name, parameter in self.named_parameters():
            if name.startswith(LOW_RANK) and parameter.dtype == torch.float32:
                rounded = parameter.detach().half().float()
                parameter.data = rounded if torch.isfinite(rounded).all() else parameter.data

    def prepare_training(self, backbone: Backbone) -> None:
        """Called when a training starts: moves the task to the backbone's device and records what it extends.

        From then on it belongs to these versions of its parents: `parents` does not follow their later training.
        """
        self.to(backbone.device)
        parents = [parent for parent in self.extends if isinstance(parent, Task)]
        hashes = content_hashes(parents)
        self._trained_with |= {parent.name: hashes[id(parent)] for parent in parents}

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        repo_id: str | None = None,
        license: str | None = None,
        base_model: str | None = None,
    ) -> Path:
        """Writes a folder as the hub keeps it: the task file, a model card and a picture; returns the folder.

        `repo_id` is the hub id that the card's example loads, `base_model` the backbone's, if the task records it
        under another name.
        """
        from memoro.tasks.hub import save_pretrained

        return save_pretrained([self], folder, repo_id=repo_id, license=license, base_model=base_model)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        device: torch.device | str | None = None,
        token: str | None = None,
    ) -> Task:
        """The task of a hub id, a folder or a file: `memoro.load_task` under the name that the hub's libraries use."""
        from memoro.tasks.taskfile import load_task

        return load_task(source, revision=revision, device=device, token=token)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        license: str | None = None,
        base_model: str | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes, into a repository that is created if needed; returns its address.

        The token is that of `hf auth login` unless another is given.
        """
        from memoro.tasks.hub import push_task

        return push_task(self, repo_id, token, private, revision, license, base_model)

    def extra_repr(self) -> str:
        own = f"{self.cells} cells, rank {self.rank}" if self.rank else f"{self.cells} cells"
        own = own if self.members == 1 else f"{self.members} members of {own}"
        return f"{self.name!r}, {len(self.labels)} labels, {own}, from layer {self.from_layer}"


def content_hashes(tasks: Iterable[Task]) -> dict[int, str]:
    """The content hashes of the tasks and of those that they depend on, by `id`; each is computed once."""
    hashes: dict[int, str] = {}
    waiting = list(tasks)
    while waiting:  # no recursion: chains may be long
        task = waiting[-1]
        unknown = [p for p in task.extends if isinstance(p, Task) and p.name not in task._trained_with]
        if missing := [parent for parent in unknown if id(parent) not in hashes]:
            waiting += missing
            continue
        waiting.pop()
        if id(task) not in hashes:
            hashes[id(task)] = task.spec.hash_content(
                task.state_dict(),
                **({} if task.spec.readout is None else {"readout": asdict(task.spec.readout)}),
                from_layer=task.from_layer,
                memory_norm=task.spec.memory_norm,
                parents=[asdict(parent) for parent in task.parents_among(hashes)],
            )
    return hashes


def check_sizes(backbone: Backbone, name: str, *, cells: int, rank: int, from_layer: int) -> None:
    """Raises if a backbone cannot have a task of these sizes."""
    for option, number, high in (
        ("from_layer", from_layer, backbone.depth),
        ("cells", cells, MAX_CELLS),
        ("rank", rank, min(MAX_RANK, backbone.dim)),
    ):
        if not isinstance(number, int) or not 0 <= number <= high:
            raise TaskError(f"{name!r}: `{option}` must be between 0 and {high}, not {number!r}.")
    if rank and from_layer == backbone.depth:
        raise TaskError(
            f"{name!r}: from_layer={from_layer} is a linear head on the backbone's last token: no layer is left that "
            f"rank {rank} could change. Choose an earlier layer, or rank 0."
        )


def new_task(
    backbone: Backbone,
    name: str,
    labels: Sequence[str],
    *,
    cells: int = 5,
    rank: int = 0,
    from_layer: int = 0,
    extends: Task | Iterable[Task] = (),
    memory_norm: MemoryNorm = "pre",
    init: Literal["copy", "normal"] = "copy",
    head: str = "softmax",
    seed: int | None = None,
) -> Task:
    """An untrained task for `backbone`, on its device, in float32 (float64 on a float64 backbone).

        backbone = memoro.load_backbone()
        pets = memoro.new_task(backbone, "pets", ["cat", "dog"], cells=0, rank=8, from_layer=8)

    `rank` gives the task low-rank weights of its own at each layer from the fork on; base tokens do not see them.
    They start at zero. `from_layer` forks the stream off the base's class token there (0 is the paper, the backbone's
    depth a linear head). `init="copy"` starts from the pre-trained class token; a fork then starts with a zero offset.
    `head` is `class` (softmax), `labels` (multilabel) or `number` (regression).
    """
    require_backbone(backbone)
    depth, dim = backbone.depth, backbone.dim
    cells, rank, from_layer = map(plain_int, (cells, rank, from_layer))
    extends = several(extends)
    try:
        kind = find_kind(head)
    except DataError as error:
        raise TaskError(f"{name!r}: {error}") from None
    spec = TaskSpec(
        name=check_name(name),
        labels=check_labels(labels, name),
        kind=kind,
        backbone=BackboneRecord.of(backbone),
        from_layer=from_layer,
        cells=cells,
        memory_norm=memory_norm,
        rank=rank,
        widths=Widths.of(backbone.anatomy) if rank else None,
    )
    choices = {"memory_norm": (memory_norm, get_args(MemoryNorm)), "init": (init, ("copy", "normal"))}
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            raise TaskError(f"{name!r}: {option} must be one of {', '.join(allowed)}, not {value!r}.")
    if HEADS[kind].has_classes and len(spec.labels) < 2:
        raise TaskError(f"{name!r}: a softmax head needs at least two labels; for yes/no use head='multilabel'.")
    check_sizes(backbone, name, cells=cells, rank=rank, from_layer=from_layer)
    for parent in extends:
        if not isinstance(parent, Task):
            raise TaskError(f"{name!r}: extends takes tasks (load_task() returns one), not {type(parent).__name__}.")
        if parent.name == name:
            raise TaskError(f"{name!r} cannot extend a task with the same name.")
        reads = parent.spec.readout
        if reads is not None and reads.share == 1 and parent.from_layer == depth:
            raise TaskError(
                f"{name!r} cannot extend {parent.name!r}, which is a read-out alone: it has no token to attend to. "
                "Train it with regime 'joint' or 'side', or leave out extends."
            )

    generator = torch.Generator("cpu")
    # Without a seed it is drawn, so that torch.manual_seed decides; torch.seed() would reseed the caller's generator.
    generator.manual_seed(int(torch.randint(2**62, (), device="cpu") if seed is None else seed))
    dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
    bound = 1 / math.sqrt(dim)

    def normal(shape: Sequence[int]) -> Tensor:
        return INIT_STD * torch.randn(shape, generator=generator, dtype=dtype, device="cpu")

    def uniform(shape: Sequence[int]) -> Tensor:  # as nn.Linear starts
        return torch.rand(shape, generator=generator, dtype=dtype, device="cpu") * 2 * bound - bound

    class_token, pretrained = normal((dim,)), backbone.anatomy.class_token
    if init == "copy" and from_layer > 0:
        class_token = torch.zeros_like(class_token)
    elif init == "copy" and pretrained is not None:
        class_token = pretrained.detach().to(dtype, copy=True)
    tensors = {"class_token": class_token}
    for part, draw in (("head.weight", uniform), ("head.bias", uniform), ("memory", normal)):
        tensors[part] = draw(spec.shapes[part])
    for part, shape in spec.shapes.items():
        if part.endswith("_A"):  # as PEFT's: uniform like nn.Linear's weights
            drawn = torch.rand(shape, generator=generator, dtype=dtype, device="cpu")
            tensors[part] = (drawn * 2 - 1) / math.sqrt(shape[-1])
        elif part.endswith("_B"):
            tensors[part] = torch.zeros(shape, dtype=dtype, device="cpu")
    return Task.from_tensors(spec, {part: tensor.to(backbone.device) for part, tensor in tensors.items()}, extends)


def split_members(task: Task) -> list[Task]:
    """What the engine computes: a task of one token for each member, with its part of the head."""
    if task.members == 1:
        return [task]
    spec, states = replace(task.spec, members=1, readout=None), task.state_dict()
    parts = {name: states[name] for name in states if name in {"class_token", "memory"} or name.startswith(LOW_RANK)}
    weights = states["head.weight"].chunk(task.members, dim=1)
    return [
        Task.from_tensors(
            spec,
            {
                **{name: tensor[member] for name, tensor in parts.items()},
                "head.weight": weights[member],
                "head.bias": states["head.bias"] / task.members,
            },
            task.extends,
        ).requires_grad_(False)
        for member in range(task.members)
    ]
