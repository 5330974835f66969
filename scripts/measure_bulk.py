"""Bulk prediction with memoro-tiny: its throughput against the engine's own, and whether its memory grows.

    python scripts/measure_bulk.py --out results/bulk.md
    python scripts/measure_bulk.py --images 200,600 --throughput 512 --rounds 1 --out /tmp/bulk.md       # a quick look

Throughput: a folder of 64-pixel JPEGs is answered into Parquet shards, with decoder processes. The engine's own images
per second are those of the same composition on batches of pixels that are decoded already, in the same process, before
and after it. Memory: the peak of a new process that answers as many images as --images says, each drawn and encoded
when it is read.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memoro.cli.options import share_cores

share_cores()  # before torch is imported, as `memoro predict` does

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

import memoro  # noqa: E402
from memoro.data.open import open_source  # noqa: E402
from memoro.data.workers import worker_count  # noqa: E402
from memoro.engine.answers import AnswerOptions  # noqa: E402
from memoro.evaluation.bulk import Job, answer_here, begin  # noqa: E402
from memoro.evaluation.predictions import Predictor  # noqa: E402
from reports import table, write_report  # noqa: E402

SIDE = 64
LABELS = [f"label {i}" for i in range(10)]


@dataclass(frozen=True)
class Drawn:
    """Images that exist only while they are read."""

    count: int

    def keys(self) -> Iterator[int]:
        return iter(range(self.count))

    def read(self, keys: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
        return ((f"drawn {key}", draw(key)) for key in keys)

    def describe(self) -> list[dict[str, Any]]:
        return [{"drawn": self.count}]


def draw(seed: int) -> bytes:
    """A JPEG of coloured blocks with a little noise, about as big as a photo of this size."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(blocks).resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (pixels + generator.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue()


def new_predictor(tasks: int, batch: int) -> Predictor:
    backbone = memoro.load_backbone("memoro-tiny")
    models = tuple(memoro.new_task(backbone, f"task {i}", LABELS, seed=i) for i in range(tasks))
    return Predictor(backbone, models, AnswerOptions(batch))


def measure_throughput(images: int, tasks: int, batch: int, rounds: int) -> dict[str, float]:
    """Images per second of the engine and of bulk prediction, and their ratio: medians of the rounds. In each, half of
    the engine's passes are timed before bulk prediction and half after it, because the speed of the machine drifts."""
    predictor = new_predictor(tasks, batch)
    [one] = predictor.passes
    pixels = torch.stack([one.preprocessing.to_tensor(Image.open(io.BytesIO(draw(number)))) for number in range(batch)])
    passes = max(1, images // batch // 2)
    found: dict[str, list[float]] = {"engine": [], "bulk": [], "ratio": []}
    with TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        for number in range(images):
            (photos / f"{number:06}.jpg").write_bytes(draw(number))

        def run_engine() -> float:
            start = time.perf_counter()
            with torch.no_grad():
                for _ in range(passes):
                    one.run(pixels)
            return time.perf_counter() - start

        for number in range(rounds):
            before = run_engine()
            job = Job(open_source([photos]), predictor, Path(folder) / f"answers {number}")
            start = time.perf_counter()
            answer_here(job, begin(job), workers=worker_count(None, None))
            bulk = images / (time.perf_counter() - start)
            engine = 2 * passes * batch / (before + run_engine())
            for name, value in (("engine", engine), ("bulk", bulk), ("ratio", bulk / engine)):
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def measure_memory(images: int, tasks: int, batch: int) -> int:
    """The peak of a process that answers this many images, in bytes."""
    with TemporaryDirectory() as folder:
        job = Job(Drawn(images), new_predictor(tasks, batch), Path(folder) / "answers")
        answer_here(job, begin(job), workers=worker_count(None, None))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--throughput", type=int, default=20_000, help="images of the folder (default 20000)")
    parser.add_argument("--images", default="10000,100000", help="images whose peak memory is compared")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/bulk.md"))
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print(json.dumps(measure_memory(args.memory_of, args.tasks, args.batch)))
        return
    middle = measure_throughput(args.throughput, args.tasks, args.batch, args.rounds)
    peaks = {}
    for count in map(int, args.images.split(",")):
        command = [sys.executable, __file__, "--memory-of", str(count), "--tasks", str(args.tasks)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[count] = json.loads(done.stdout.splitlines()[-1])
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    row = [
        f"{args.throughput:,}",
        str(args.tasks),
        *(f"{middle[name]:.0f}" for name in ("engine", "bulk")),
        f"{middle['ratio']:.2f}",
    ]
    lines = [
        "# Bulk prediction",
        "",
        f"memoro-tiny, 64-pixel JPEGs, batches of {args.batch}, {cores} cores, torch with {threads} threads. "
        f"Images per second, medians of {args.rounds} rounds.",
        "",
        *table(["images", "tasks", "engine", "bulk", "ratio"], [row]),
        "",
        "Peak memory of the process that runs the backbone.",
        "",
        *table(["images", "peak memory"], [[f"{n:,}", f"{peak / 2**20:,.0f} MiB"] for n, peak in peaks.items()]),
    ]
    results = {"throughput": middle, "peak_bytes": peaks}
    write_report(args.out, results, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
