"""What models and tasks are, without their weights: names, labels, backbone, sizes, the shape of each tensor."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from memoro.backbones import Anatomy, Backbone, BackboneRecord
from memoro.errors import CompositionError, TaskError
from memoro.heads import HEADS, Head, HeadKind
from memoro.images import Preprocessing
from memoro.tasks.calibration import Calibration
from memoro.tasks.familiarity import Familiarity
from memoro.tasks.mask import index_names

RESERVED = frozenset({"base"})
MAX_NAME = 120
MAX_NAME_BYTES = 200
"""In UTF-8: file names end at 255, and have a suffix."""
MAX_CELLS = 4096
MAX_RANK = 1024
MAX_MEMBERS = 64
INIT_STD = 0.02  # PAPER: memory starts as N(0, 0.02); with zeros the cells of a layer would stay identical


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model of one task is, without its weights."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    backbone: BackboneRecord
    preprocessing: Preprocessing | None = None
    """How its training images were prepared; None before training: then the backbone's own."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Facts about its training (JSON values)."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    familiarity: Familiarity | None = None

    def hash_content(self, tensors: Mapping[str, Tensor], **own: Any) -> str:
        """SHA-256 of all that decides the answers: these facts, `own` (those of the kind of model) and the weights.

        Training facts and metrics are left out: a note added later does not make it another model.
        """
        record = {
            "name": self.name,
            "labels": self.labels,
            "kind": self.kind,
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_json(),
            "backbone": self.backbone.fingerprint.digest,
            **own,
        }
        return hash_record(record, tensors)

    def check_backbone(self, backbone: Backbone) -> None:
        """Raises if the model was made for another backbone."""
        backbone.check_unchanged()
        made, here = self.backbone, backbone.fingerprint
        if (made.dim, made.depth) != (backbone.dim, backbone.depth):
            why = f"{made.depth} layers of {made.dim}; this one has {backbone.depth} of {backbone.dim}"
        elif made.fingerprint.match(here) == "different":
            why = f"fingerprint {made.fingerprint.short}; this one has other weights, {here.short}"
        else:
            return
        raise CompositionError(
            f"{self.name!r} was trained for {made.name} ({made.family}, {why}). Load that backbone, or train the task "
            "again on this one."
        )


def hash_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a JSON record and of tensors: their names, shapes, dtypes and values."""
    whole = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().cpu().contiguous()
        whole.update(f"{name} {tuple(data.shape)} {data.dtype}\n".encode())
        whole.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


Spec = TypeVar("Spec", bound=ModelSpec)


class TaskModule(nn.Module, Generic[Spec]):
    """A module with a spec and a head: all that a training asks of what it trains (see `memoro.regimes.regime`)."""

    head: nn.Linear
    extends: tuple[Any, ...] = ()
    """The tasks that it extends."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

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
    def cells(self) -> int:
        return 0

    @property
    def rank(self) -> int:
        return 0

    @property
    def from_layer(self) -> int:
        return 0

    def content_hash(self) -> str:
        """SHA-256 of all that decides its answers."""
        return self.spec.hash_content(self.state_dict())

    def identity(self) -> dict[str, Any]:
        """What must be the same for a training to be resumed, JSON-ready."""
        return {"name": self.name, "labels": self.labels, "kind": self.kind}

    @property
    def head_kind(self) -> Head:
        """What depends on the kind of its head."""
        return HEADS[self.kind]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Its logits (…, labels) as probabilities, which are calibrated if the task is; a regression's numbers as they
        are."""
        calibration = self.spec.calibration
        return self.head_kind.probabilities(logits if calibration is None else calibration.apply(logits.float()))

    def prepare_training(self, backbone: Backbone) -> None:
        """Called when a training starts."""

    def finish_training(self) -> None:
        """Called when its best weights are back, before it is measured."""

    def update_spec(self, **changes: Any) -> None:
        """Replaces fields of the spec that do not decide the logits: training, metrics, calibration, familiarity; and
        the preprocessing."""
        self.spec = replace(self.spec, **changes)

    def rename(self, name: str) -> Self:
        """Gives it another name; returns it. Tasks that extend it know it by the old one, and do not find it."""
        self.update_spec(name=check_name(name))
        return self


Model: TypeAlias = TaskModule[Any]
"""A Task, or what another regime trains."""
AnyModule = TypeVar("AnyModule", bound=Model)


def by_name(models: Sequence[AnyModule]) -> dict[str, AnyModule]:
    """Models that answer side by side, each under its own name."""
    return dict(zip(index_names(model.name for model in models), models, strict=True))


def check_name(name: object) -> str:
    """The name, if it can be used in a dictionary, a table and a file name alike."""
    if not isinstance(name, str) or not name.strip():
        raise TaskError(f"a task's name must be a non-empty string, not {name!r}.")
    if name in RESERVED:
        raise TaskError(f"the name {name!r} is reserved for the backbone's own output; choose another.")
    if name != name.strip() or len(name) > MAX_NAME:
        raise TaskError(f"name {name[:40]!r}: remove spaces at its ends; at most {MAX_NAME} characters are allowed.")
    if "/" in name or "\\" in name or name.startswith("."):
        raise TaskError(f"name {name!r} looks like a path: leave out slashes and leading dots.")
    if any(unicodedata.category(character).startswith("C") for character in name):
        raise TaskError(f"name {name!r} contains control characters: leave them out.")
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise TaskError(f"name {name[:40]!r} takes {size} bytes in UTF-8: at most {MAX_NAME_BYTES} fit in a file name.")
    return name


def check_labels(labels: object, name: str) -> tuple[str, ...]:
    """The labels as a tuple, if they are text and no two are the same."""
    labels = labels.tolist() if hasattr(labels, "tolist") else labels  # an array, or a column of a table
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise TaskError(f"{name!r}: labels must be a list of strings, not {type(labels).__name__}.")
    if not labels:
        raise TaskError(f"{name!r}: labels must not be empty.")
    seen: set[str] = set()
    for label in labels:
        if not isinstance(label, str) or not label:
            raise TaskError(f"{name!r}: labels must be non-empty strings, not {label!r}.")
        if any(unicodedata.category(character) == "Cs" for character in label):
            raise TaskError(f"{name!r}: label {label!r} contains a lone surrogate: leave it out.")
        if label in seen:
            raise TaskError(f"{name!r}: labels must be unique: {label!r} appears twice.")
        seen.add(label)
    return tuple(labels)


MemoryNorm = Literal["pre", "post"]
LOW_RANK = "lora."
"""The prefix of the names of low-rank weights."""
MAX_STATISTICS = 3
"""The most vectors that are pooled from one layer."""
READ_OUT = "readout."
"""The prefix of the names of a read-out's weights."""


@dataclass(frozen=True)
class Widths:
    """The widths inside a backbone's layers, which are all alike."""

    attention: int
    """The width of queries, of keys and of values: heads * head width."""
    expanded: int
    """The width after the first matrix of the MLP."""
    hidden: int
    """The width before its last matrix; a gate makes it narrower than `expanded`."""

    @classmethod
    def of(cls, anatomy: Anatomy) -> Widths:
        block = anatomy.blocks[0]
        return cls(anatomy.heads * block.head_width, block.mlp_parts.expanded, block.mlp_parts.hidden)


@dataclass(frozen=True)
class ReadOut:
    """What a task's read-out reads from the base: statistics of the tokens after each layer (`Anatomy.pool`)."""

    from_layer: int
    """The first layer, counted from 0; it reads all later ones, too."""
    statistics: int
    """Vectors per layer."""
    share: float = 1.0
    """The weight of its logits in the task's logits; the head's have the rest. Both are already scaled by it."""

    @classmethod
    def of(cls, anatomy: Anatomy, share: float = 1.0) -> ReadOut:
        """A read-out of the upper two thirds of the layers."""
        return cls(anatomy.depth // 3, anatomy.statistics, share)

    def features(self, dim: int, depth: int) -> int:
        return (depth - self.from_layer) * self.statistics * dim


@dataclass(frozen=True, kw_only=True)
class TaskSpec(ModelSpec):
    """What a task is, without its weights."""

    from_layer: int
    cells: int
    memory_norm: MemoryNorm
    rank: int = 0
    """The rank of the weights that are added to the matrices of each layer from the fork on, for the task's token
    alone; 0: it has none."""
    widths: Widths | None = None
    """None for rank 0, which does not depend on them."""
    members: int = 1
    """How many tokens an ensemble has, each with its own memory and low-rank weights. The head reads all of them."""
    readout: ReadOut | None = None
    """None if the task answers with its token alone."""

    def check_backbone(self, backbone: Backbone) -> None:
        super().check_backbone(backbone)
        if self.widths is not None and self.widths != (here := Widths.of(backbone.anatomy)):
            raise CompositionError(
                f"{self.name!r} has low-rank weights for layers of {self.widths}, {backbone.name} has {here}: its file "
                "is damaged. Train the task again."
            )
        own = backbone.anatomy.statistics
        layers, odd = divmod(0 if self.familiarity is None else len(self.familiarity.reader), own * backbone.dim)
        if (self.readout is not None and self.readout.statistics != own) or odd or layers > backbone.depth:
            raise CompositionError(
                f"{self.name!r} does not read {own} vectors a layer, as {backbone.name} has: its file is damaged. "
                "Train the task again."
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors."""
        dim, classes, layers = self.backbone.dim, len(self.labels), self.backbone.depth - self.from_layer
        each = (self.members,) if self.members > 1 else ()
        shapes: dict[str, tuple[int, ...]] = {
            "class_token": (*each, dim),
            "memory": (*each, layers, self.cells, dim),
            "head.weight": (classes, self.members * dim),
            "head.bias": (classes,),
        }
        if self.rank and self.widths is not None:
            inner, expanded, hidden = self.widths.attention, self.widths.expanded, self.widths.hidden
            # Queries, keys and values are three matrices of one input.
            for name, three, read, written in (
                ("qkv", (3,), dim, inner),
                ("project", (), inner, dim),
                ("expand", (), dim, expanded),
                ("contract", (), hidden, dim),
            ):
                shapes[f"{LOW_RANK}{name}_A"] = (*each, layers, *three, self.rank, read)
                shapes[f"{LOW_RANK}{name}_B"] = (*each, layers, *three, written, self.rank)
        if self.readout is not None:
            shapes[f"{READ_OUT}weight"] = (classes, self.readout.features(dim, self.backbone.depth))
            shapes[f"{READ_OUT}bias"] = (classes,)
        return shapes


def make_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer of these tensors, which are not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def round_half(weight: Tensor) -> Tensor:
    """A matrix in float32, rounded to what float16 can hold if that is close: rows may be far from 1."""
    rounded = weight.half().float()
    close = (rounded - weight).abs() <= weight.abs().amax(dim=1, keepdim=True) / 1024
    return rounded if bool(close.all()) else weight.float()


def is_halved(name: str) -> bool:
    """Whether a file may hold this tensor as float16."""
    return name.startswith(LOW_RANK) or name == f"{READ_OUT}weight"
