"""How long images are checked, the first time and again, and how soon a training takes its first step.

    python scripts/measure_data.py --out results/data.md
    python scripts/measure_data.py --table 300 --photographs 60 --rounds 1 --out /tmp/data.md            # a quick look

The table is a Parquet file of small PNG files, the photographs are JPEG files of 640 x 480 pixels in class folders;
both are drawn. Each measurement runs in a new process, with an empty cache the first time. To compare two versions, run
this file with each of them on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from reports import table, write_report

SETTLE = 3.0
"""Seconds after which a new file is old enough to be remembered."""


def encode(seed: int, size: tuple[int, int], form: str) -> bytes:
    """Coloured blocks, unlike those of any other seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize(size, Image.Resampling.BICUBIC).save(file, form)
    return file.getvalue()


def make_table(path: Path, images: int) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {
        "image": [encode(at, (8, 8), "PNG") for at in range(images)],
        "label": [f"label {at % 10}" for at in range(images)],
    }
    parquet.write_table(pyarrow.table(columns), path)


def make_photographs(folder: Path, images: int) -> None:
    for at in range(images):
        path = folder / f"label {at % 10}" / f"{at:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(at, (640, 480), "JPEG"))


def check(place: str) -> dict[str, float]:
    """Seconds to load a set without a validation split, and the peak of the process's memory."""
    from memoro.data import load_data

    start = time.perf_counter()
    load_data(place, val_fraction=0, quiet=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def first_step(place: str) -> dict[str, float]:
    """Seconds from the start of a training to its first optimiser step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import memoro

    torch.manual_seed(0)
    start = time.perf_counter()

    def stop(*given: Any) -> None:
        raise SystemExit

    register_optimizer_step_pre_hook(stop)
    try:
        memoro.train(place, backbone="memoro-tiny", regime="side", lr=0.001, epochs=1, image_size=64, quiet=True)
    except SystemExit:
        return {"seconds": time.perf_counter() - start}
    raise RuntimeError("the training ended without a step")


def measure(what: str, place: Path, cache: Path) -> dict[str, float]:
    """The measurement in a new process."""
    command = [sys.executable, __file__, "--measure", what, str(place)]
    done = subprocess.run(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=int, default=20_000, help="images of the table (default 20000)")
    parser.add_argument("--photographs", type=int, default=5_000, help="photographs of the training (default 5000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/data.md"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        what, place = args.measure
        print(json.dumps({"check": check, "step": first_step}[what](place)))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        root = Path(folder)
        make_table(root / "table.parquet", args.table)
        make_photographs(root / "photographs", args.photographs)
        time.sleep(SETTLE)
        for number in range(args.rounds):
            for what, place in (("check", "table.parquet"), ("step", "photographs")):
                for time_of in ("first", "second"):
                    one = measure(what, root / place, root / f"cache {number}")
                    found.setdefault(f"{what}, {time_of} time", []).append(one)
    middle = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    rows = [[name, f"{one['seconds']:.1f}", f"{one.get('megabytes', 0):.0f}"] for name, one in middle.items()]
    lines = [
        "# Checks of data",
        "",
        f"A table of {args.table:,} images of 8 pixels; {args.photographs:,} photographs of 640 x 480 until the first "
        f"step of a training with memoro-tiny. Medians of {args.rounds} rounds, {len(os.sched_getaffinity(0))} cores.",
        "",
        *table(["", "seconds", "peak MB"], rows),
    ]
    write_report(args.out, middle, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
