"""Logits become answers: labels with probabilities, or numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memoro.heads import HeadKind, probabilities


def read_answers(kind: HeadKind, labels: list[str], logits: Tensor) -> list[dict[str, Any]]:
    """One JSON-ready answer a row of logits (b, labels).

    softmax: `label`, its `probability`, and `probabilities` of all labels, best first. multilabel: `labels` at or
    above one half, and `probabilities`. regression: `values`.
    """
    answers: list[dict[str, Any]] = []
    for row in probabilities(kind, logits.detach()).cpu():
        if kind == "regression":
            answers.append({"values": dict(zip(labels, row.tolist(), strict=True))})
            continue
        order = torch.argsort(row, descending=True, stable=True).tolist()
        ranked = {labels[i]: float(row[i]) for i in order}
        if kind == "softmax":
            best = next(iter(ranked))
            answers.append({"label": best, "probability": ranked[best], "probabilities": ranked})
        else:
            answers.append({"labels": [label for label, p in ranked.items() if p >= 0.5], "probabilities": ranked})
    return answers
