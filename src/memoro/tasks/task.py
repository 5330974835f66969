"""A task: a class token, memory cells for each layer, and a head."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from memoro.backbones import Backbone, Fingerprint
from memoro.errors import TaskError
from memoro.heads import HeadKind
from memoro.images import Preprocessing

MemoryNorm = Literal["pre", "post"]

RESERVED = frozenset({"base"})
MAX_NAME = 120
MAX_CELLS = 4096
INIT_STD = 0.02  # PAPER: memory starts as N(0, 0.02); zeros would leave the cells of a layer identical for ever


@dataclass(frozen=True)
class BackboneRecord:
    """Which backbone a task belongs to."""

    name: str
    family: str
    dim: int
    depth: int
    fingerprint: Fingerprint

    @classmethod
    def of(cls, backbone: Backbone) -> BackboneRecord:
        return cls(backbone.name, backbone.family, backbone.dim, backbone.depth, backbone.fingerprint)


@dataclass(frozen=True)
class Parent:
    """A task that another one extends, by its name and what it held when the child was saved."""

    name: str
    content: str


@dataclass(frozen=True)
class TaskSpec:
    """What a task is, without its weights."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    from_layer: int
    cells: int
    memory_norm: MemoryNorm
    backbone: BackboneRecord
    preprocessing: Preprocessing | None = None
    """How its training images were prepared; None as long as nobody trained it: then the backbone's own."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Facts about its training (JSON values)."""
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Task(nn.Module):
    """What one question adds to a frozen backbone. `spec` says what it is; the parameters are what it learned."""

    def __init__(
        self,
        spec: TaskSpec,
        class_token: Tensor,
        memory: Tensor,
        head: nn.Linear,
        extends: Sequence[Task | Parent] = (),
    ) -> None:
        super().__init__()
        self.spec = spec
        self.class_token = nn.Parameter(class_token)
        self.memory = nn.Parameter(memory)
        self.head = head
        # A tuple, so that torch does not take the parents' parameters for this task's own.
        self.extends = tuple(extends)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def labels(self) -> list[str]:
        return list(self.spec.labels)

    @property
    def kind(self) -> HeadKind:
        return self.spec.kind

    @property
    def from_layer(self) -> int:
        return self.spec.from_layer

    @property
    def cells(self) -> int:
        return self.spec.cells

    @property
    def parents(self) -> tuple[Parent, ...]:
        """Name and content of each task that this one extends, as of now."""
        return tuple(
            parent if isinstance(parent, Parent) else Parent(parent.name, parent.content_hash())
            for parent in self.extends
        )

    def content_hash(self) -> str:
        """SHA-256 of all that decides this task's answers: weights, shape of the stream, labels, parents.

        Training facts and metrics are left out: a note added later does not make it another task.
        """
        spec = self.spec
        record = {
            "name": spec.name,
            "labels": spec.labels,
            "kind": spec.kind,
            "from_layer": spec.from_layer,
            "memory_norm": spec.memory_norm,
            "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
            "backbone": spec.backbone.fingerprint.digest,
            "parents": [asdict(parent) for parent in self.parents],
        }
        return hash_content(record, self.state_dict())

    def describe(self, **changes: Any) -> None:
        """Replaces fields of the spec that say how the task came about: preprocessing, training, metrics."""
        self.spec = replace(self.spec, **changes)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {len(self.labels)} labels, {self.cells} cells, from layer {self.from_layer}"


def new_task(
    backbone: Backbone,
    name: str,
    labels: Sequence[str],
    *,
    cells: int = 5,
    from_layer: int = 0,
    extends: Sequence[Task] = (),
    memory_norm: MemoryNorm = "pre",
    init: Literal["copy", "normal"] = "copy",
    head: HeadKind = "softmax",
    seed: int | None = None,
) -> Task:
    """An untrained task for `backbone`, on its device, in float32 (float64 on a float64 backbone).

    `from_layer` forks the stream off the base's class token there (0 is the paper, the backbone's depth a linear
    head). `init="copy"` starts from the pre-trained class token, which a fork does with a zero offset.
    """
    depth, dim = backbone.depth, backbone.dim
    check_name(name)
    checked = check_labels(labels, name)
    if head not in get_args(HeadKind):
        raise TaskError(f"{name!r}: head {head!r} is none of {', '.join(get_args(HeadKind))}.")
    if head == "softmax" and len(checked) < 2:
        raise TaskError(
            f"{name!r}: a softmax head needs two labels or more; for yes/no of one label take 'multilabel'."
        )
    if memory_norm not in get_args(MemoryNorm):
        raise TaskError(f"{name!r}: memory_norm {memory_norm!r} is neither 'pre' (the paper) nor 'post'.")
    if init not in {"copy", "normal"}:
        raise TaskError(f"{name!r}: init {init!r} is neither 'copy' nor 'normal'.")
    if not isinstance(from_layer, int) or not 0 <= from_layer <= depth:
        raise TaskError(f"{name!r}: from_layer {from_layer!r} is not a layer from 0 to {depth}, this backbone's depth.")
    if not isinstance(cells, int) or not 0 <= cells <= MAX_CELLS:
        raise TaskError(f"{name!r}: cells {cells!r} is not a number from 0 to {MAX_CELLS}.")
    for parent in extends:
        if not isinstance(parent, Task):
            raise TaskError(f"{name!r}: extends takes tasks, not {type(parent).__name__}; load_task() gives one.")
        if parent.name == name:
            raise TaskError(f"{name!r} cannot extend a task of its own name.")

    generator = torch.Generator()
    # Without a seed it is drawn, so that torch.manual_seed decides; torch.seed() would reseed the caller's generator.
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return (INIT_STD * torch.randn(shape, generator=generator, dtype=dtype)).to(backbone.device)

    pretrained = backbone.anatomy.class_token
    class_token = normal(dim)
    if init == "copy" and from_layer > 0:
        class_token = torch.zeros_like(class_token)
    elif init == "copy" and pretrained is not None:
        class_token = pretrained.detach().to(dtype, copy=True)
    linear = nn.Linear(dim, len(checked), device=backbone.device, dtype=dtype)
    with torch.no_grad():
        bound = 1 / math.sqrt(dim)
        for parameter in linear.parameters():
            values = torch.rand(parameter.shape, generator=generator, dtype=dtype) * 2 * bound - bound
            parameter.copy_(values)
    spec = TaskSpec(name, checked, head, from_layer, cells, memory_norm, BackboneRecord.of(backbone))
    return Task(spec, class_token, normal(depth - from_layer, cells, dim), linear, extends)


def hash_content(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of facts and weights."""
    whole = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {tuple(data.shape)} {data.dtype}\n".encode())
        whole.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def say_apart(name: str, regime: str) -> str:
    """Why what a baseline regime trained cannot be composed."""
    return (
        f"{name!r} was trained with regime {regime!r}, which changes the backbone's own tokens: it needs a pass of its "
        "own and cannot be composed with tasks. To compose, train it with regime 'memory' or 'head'."
    )


def check_name(name: object) -> str:
    """The name, if it can stand for a task in a dictionary, a table and a file name alike."""
    if not isinstance(name, str) or not name.strip():
        raise TaskError(f"a task's name is a piece of text, not {name!r}.")
    if name in RESERVED:
        raise TaskError(f"the name {name!r} is reserved for the backbone's own answer: choose another.")
    if name != name.strip() or len(name) > MAX_NAME:
        raise TaskError(f"name {name[:40]!r}: no spaces around it, and at most {MAX_NAME} characters.")
    if "/" in name or "\\" in name or name.startswith("."):
        raise TaskError(f"name {name!r} looks like a path: leave out slashes and leading dots.")
    if any(unicodedata.category(character).startswith("C") for character in name):
        raise TaskError(f"name {name!r} holds control characters: leave them out.")
    return name


def check_labels(labels: object, name: str) -> tuple[str, ...]:
    """The labels as a tuple, if they are text and no two are the same."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise TaskError(f"{name!r}: labels is a list of names, not {type(labels).__name__}.")
    if not labels:
        raise TaskError(f"{name!r}: there are no labels.")
    seen: set[str] = set()
    for label in labels:
        if not isinstance(label, str) or not label:
            raise TaskError(f"{name!r}: the label {label!r} is not a piece of text.")
        if label in seen:
            raise TaskError(f"{name!r}: the label {label!r} stands twice.")
        seen.add(label)
    return tuple(labels)
