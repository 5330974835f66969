"""Logits become answers: labels with probabilities, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from memoro.heads import HeadKind, probabilities
from memoro.images import Preprocessing, open_image
from memoro.tasks.spec import TaskModule

Picture = str | Path | Image.Image


def read_answers(kind: HeadKind, labels: list[str], logits: Tensor) -> list[dict[str, Any]]:
    """One JSON-ready answer per row of logits (b, labels).

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


def predict_images(
    images: Picture | Iterable[Picture],
    models: Mapping[str, TaskModule[Any]],
    passes: Mapping[Preprocessing, Sequence[str]],
    run: Callable[[Tensor, Sequence[str]], Mapping[str, Tensor]],
    batch_size: int,
) -> list[dict[str, dict[str, Any]]]:
    """Each image's answers by the name of the model, in the order of `models`.

    `passes` has the names that share a preprocessing, `run` gives their logits on a batch of pixels.
    """
    if isinstance(images, (str, Path, Image.Image)):
        images = [images]
    results: list[dict[str, dict[str, Any]]] = []
    batch: list[Image.Image] = []

    def flush() -> None:
        answers: dict[str, list[dict[str, Any]]] = {}
        for preprocessing, names in passes.items():
            pixels = torch.stack([preprocessing.to_tensor(image) for image in batch])
            with torch.no_grad():
                logits = run(pixels, names)
            answers |= {name: read_answers(models[name].kind, models[name].labels, logits[name]) for name in names}
        results.extend({name: answers[name][row] for name in models} for row in range(len(batch)))
        batch.clear()

    # Big JPEGs are decoded at a fraction of their size, as in training, where every pass allows it.
    edges = [preprocessing.draft for preprocessing in passes]
    draft = max((edge for edge in edges if edge is not None), default=None) if None not in edges else None
    for image in images:
        batch.append(open_image(image, draft=draft))
        if len(batch) == batch_size:
            flush()
    if batch:
        flush()
    return results
