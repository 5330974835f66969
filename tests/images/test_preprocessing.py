"""Normalisation: a byte gives the same float in training, predictions and on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memoro.images import Preprocessing
from memoro.images.preprocessing import _divides_exactly

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
EVERY = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3)


@pytest.mark.parametrize(
    ("steps", "exact"),
    [
        (Preprocessing(**IMAGENET), True),
        (Preprocessing(), True),
        (Preprocessing(scale=1.0), True),
        (Preprocessing(scale=0.0123, **IMAGENET), False),  # by a table
        (Preprocessing(scale=0.0), False),
    ],
)
def test_arithmetic_and_table_give_the_same_floats(steps: Preprocessing, exact: bool) -> None:
    assert _divides_exactly(steps, torch.device("cpu")) is exact
    levels = (np.arange(256) * steps.scale).astype(np.float32)
    expected = [(levels - np.float32(m)) / np.float32(s) for m, s in zip(steps.mean, steps.std, strict=True)]
    pixels = steps.normalise(EVERY)
    assert pixels.shape == (2, 3, 16, 16)
    assert pixels.is_contiguous()
    for channel, values in enumerate(expected):
        assert torch.equal(pixels[1, channel].flatten(), torch.from_numpy(values))
    assert torch.equal(steps.normalise(EVERY[0].numpy()), pixels[0])
