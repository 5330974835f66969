"""What a task is, without its weights: sizes, read-out, and the shape of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memoro.backbones import Anatomy, Backbone
from memoro.errors import CompositionError
from memoro.tasks.spec import ModelSpec

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
