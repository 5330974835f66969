"""How long a search takes in an index of many images, and that it finds the right one: random vectors, no images.

OMP_NUM_THREADS=2 python scripts/search_speed.py 1000000
"""

from __future__ import annotations

import sys
import time

import torch
from torch.nn.functional import normalize

from memoro.clock import best_times
from memoro.similar import MOST_VALUES, search_vectors


def main(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(min(65536, count - at), MOST_VALUES, generator=generator) for at in range(0, count, 65536)]
    vectors = torch.cat([normalize(part, dim=1).half() for part in parts])
    started = time.perf_counter()
    wanted = vectors[[count // 3, count - 1]].float()
    best, place = search_vectors(vectors, wanted, 10)
    print(f"first search: {time.perf_counter() - started:.2f} s")
    assert place[:, 0].tolist() == [count // 3, count - 1]
    assert best[:, 0].min() > 0.99
    times = best_times({"one": lambda: search_vectors(vectors, wanted[:1], 10)}, 5)
    print(
        f"{count:,} images of {vectors.shape[1] * 2} bytes ({vectors.numel() * 2 / 1e9:.2f} GB): {times['one']:.3f} s"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
