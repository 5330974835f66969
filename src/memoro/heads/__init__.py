"""The kinds of heads: one class, several labels, numbers. All that depends on the kind is a method of `Head`."""

from __future__ import annotations

from collections.abc import Mapping

from memoro.errors import DataError
from memoro.heads.head import Head, HeadKind, Mistake, Table
from memoro.heads.multilabel import Multilabel
from memoro.heads.regression import Regression, Scale
from memoro.heads.softmax import Softmax, confusion

__all__ = ["HEADS", "Head", "HeadKind", "Mistake", "Scale", "Table", "confusion", "find_kind"]

HEADS: Mapping[HeadKind, Head] = {head.kind: head for head in (Softmax(), Multilabel(), Regression())}


def find_kind(name: str) -> HeadKind:
    """The kind that a user names: `class`, `labels` or `number`, or a kind of head."""
    for head in HEADS.values():
        if name in {head.plain, head.kind}:
            return head.kind
    raise DataError(
        f"unknown kind {name!r}: choose class (one label per image), labels (several) or number; softmax, multilabel "
        "and regression are accepted too."
    )
