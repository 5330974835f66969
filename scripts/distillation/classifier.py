"""The classifier that the student is shipped with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillation.linear import set_linear
from distillation.sources import Source
from distillation.views import View, cut_views, to_tensor


def solve_classifier(features: Tensor, labels: Tensor, classes: int, c: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of multinomial logistic regression; `c` is what scikit-learn calls C."""
    mean, std = features.mean(0), features.std(0) + 1e-6
    inputs = (features - mean) / std
    weight = torch.zeros(classes, inputs.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer: Any = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * c * len(inputs))
        loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    scaled = weight.detach() / std
    return scaled, bias.detach() - scaled @ mean


def add_classifier(student: Any, source: Source, seed: int) -> None:
    """Give the student a classifier of its own on its frozen class token: folders are classes."""
    plan = [View(0, name, 0) for name in source.names]
    readable, pixels = cut_views([source], plan, range(len(plan)), student.config.image_size, seed)
    names = [Path(name).parent.name for name, good in zip(source.names, readable, strict=True) if good]
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    with torch.no_grad():
        batches = torch.from_numpy(pixels[readable]).split(64)
        features = torch.cat([student.vit(to_tensor(batch)).last_hidden_state[:, 0] for batch in batches])
    held, scores = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) < 0.1, {}
    for strength in (0.003, 0.01, 0.03, 0.1, 0.3):
        weight, bias = solve_classifier(features[~held], labels[~held], len(classes), strength)
        guesses = F.linear(features[held], weight, bias).argmax(1)
        scores[strength] = float((guesses == labels[held]).float().mean())
    best = max(scores, key=lambda strength: scores[strength])
    print(f"classifier: {scores[best]:.3f} of held-out training images right, with C = {best}", flush=True)
    student.classifier = nn.Linear(features.shape[1], len(classes))
    set_linear(student.classifier, *solve_classifier(features, labels, len(classes), best))
    student.num_labels = student.config.num_labels = len(classes)
    student.config.id2label = dict(enumerate(classes))
    student.config.label2id = {name: index for index, name in enumerate(classes)}
