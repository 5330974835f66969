"""How long memoro takes to start, beside what it has to import.

    python scripts/startup.py photo.jpg --repeat 5

Runs in turn, each in a process of its own: importing torch and one ViT of transformers, `memoro predict` of one image
with memoro-tiny, and `memoro --help`. Prints the medians of CPU and wall seconds; on a busy machine, compare CPU.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import memoro


def run(*arguments: str) -> tuple[float, float]:
    """CPU and wall seconds of a Python process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        task = memoro.new_task(memoro.load_backbone(), "pets", labels=["cat", "dog"])
        file = memoro.save_task(task, Path(folder) / "pets.safetensors")
        commands = {
            "imports": ("-c", "import torch; from transformers import ViTModel"),
            "predict": ("-m", "memoro", "predict", options.image, "-t", str(file)),
            "--help": ("-m", "memoro", "--help"),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(options.repeat):
            for name, arguments in commands.items():
                seconds[name].append(run(*arguments))
    base = [median(kind) for kind in zip(*seconds["imports"], strict=True)]
    for name, found in seconds.items():
        cpu, wall = (median(kind) for kind in zip(*found, strict=True))
        print(f"{name:8} CPU {cpu:6.2f} s ({cpu / base[0]:.2f})   wall {wall:6.2f} s ({wall / base[1]:.2f})")


if __name__ == "__main__":
    main()
