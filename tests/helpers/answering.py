"""A server, and what the library itself answers for the same images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running, picture, serving

from memoro.backbones import Backbone

IMAGES = [picture(seed) for seed in range(5)]


@pytest.fixture(scope="module")
def server(backbone: Backbone, folder: Path) -> Iterator[Running]:
    with serving(backbone, folder, max_batch=4, max_delay_ms=20) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Running) -> list[dict[str, Any]]:
    """What the library itself answers, image by image."""
    return server.store.current.model.predict(IMAGES, batch_size=1)


def close(found: Any, right: Any) -> bool:
    """Equal but for rounding: another batch size sums in another order, by less than 1e-5 in float32 here."""
    if isinstance(right, dict):
        return set(found) == set(right) and all(close(found[key], right[key]) for key in right)
    return found == pytest.approx(right, abs=1e-5) if isinstance(right, float) else bool(found == right)
