"""A listing: what a source says it holds, before anything is checked, numbered or split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memoro.data.imageset import Skipped, Source

if TYPE_CHECKING:
    from memoro.task import HeadKind

Role = Literal["train", "val", "test"]
Value = str | tuple[str, ...] | tuple[float, ...]

# Names under which splits go in the wild.
ROLES: dict[str, Role] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def role_of(split: str) -> Role | None:
    """What a split of this name is for; `train[:10%]` is a part of train."""
    return ROLES.get(split.split("[")[0].strip().lower())


@dataclass(frozen=True)
class Part:
    """The images of one split: their rows in a source, and what each shows (a class, labels, or numbers)."""

    source: Source
    rows: Sequence[int]
    values: Sequence[Value]


@dataclass(frozen=True)
class Listing:
    """All parts of a set. `labels` are the names in order where the source fixes them."""

    kind: HeadKind
    parts: dict[Role, Part]
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def left_out(count: int, what: str, where: str = "") -> str:
    """`1 image was left out`, `3 images were left out`: the beginning of a note."""
    return f"1 {what}{where} was left out" if count == 1 else f"{count} {what}s{where} were left out"
