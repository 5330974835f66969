"""Logits become answers: labels with probabilities, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from memoro.heads import HeadKind, probabilities
from memoro.images import Preprocessing, open_image, shared_draft
from memoro.tasks.spec import TaskModule

Picture = str | Path | Image.Image


def read_answers(kind: HeadKind, labels: Sequence[str], logits: Tensor, top: int | None = None) -> list[dict[str, Any]]:
    """One JSON-ready answer per row of logits (b, labels).

    softmax: `label`, its `probability`, and `probabilities` of the `top` labels (of all without it), best first.
    multilabel: `labels` at or above one half, and `probabilities`. regression: `values`.
    """
    found = probabilities(kind, logits.detach()).cpu()
    if kind == "regression":
        return [{"values": dict(zip(labels, row, strict=True))} for row in found.tolist()]
    # Sorted for the whole batch at once: a row at a time takes as long as the pass itself where there are many tasks.
    order = torch.argsort(found, dim=-1, descending=True, stable=True)
    answers: list[dict[str, Any]] = []
    for best, values in zip(order.tolist(), found.gather(-1, order).tolist(), strict=True):
        ranked = {labels[i]: value for i, value in zip(best[:top], values[:top], strict=True)}
        if kind == "softmax":
            answers.append({"label": labels[best[0]], "probability": values[0], "probabilities": ranked})
        else:
            above = [labels[i] for i, value in zip(best, values, strict=True) if value >= 0.5]
            answers.append({"labels": above, "probabilities": ranked})
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
    draft = shared_draft(passes)
    for image in images:
        batch.append(open_image(image, draft=draft))
        if len(batch) == batch_size:
            flush()
    if batch:
        flush()
    return results
