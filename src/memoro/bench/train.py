"""`memoro bench train`: what a training step costs beside one plain pass, and what else users would run."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones import load_backbone
from memoro.bench.clock import best_times
from memoro.regimes import REGIMES, TaskPlan
from memoro.task import Task
from memoro.train.objective import loss_sum
from memoro.train.recipe import Recipe
from memoro.train.runs import Run, SharedPass

CLASSES = 10


@dataclass(frozen=True)
class TrainRow:
    """One way to train, one step of it."""

    name: str
    step: float
    """In plain base passes without gradients."""
    megabytes: float | None
    """Peak memory above that of holding the model."""
    trained: int
    """Parameters that learn, in one run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def candidates(cells: int, runs: Sequence[int], forks: Sequence[int]) -> dict[str, Any]:
    """Names of what is measured, with what `build_step` needs to build it."""
    ways: dict[str, Any] = {"base": ("base",), "head": ("memory", "head", 1, 0, 0)}
    for fork in forks:
        for count in runs:
            name = (
                f"memory, {cells} cells" + (f", fork {fork}" if fork else "") + (f", {count} runs" if count > 1 else "")
            )
            ways[name] = ("memory", "memory", count, cells, fork)
    return {**ways, "LoRA (PEFT), rank 8 on q and v": ("lora",), "full fine-tuning": ("full",)}


def build_step(way: tuple[Any, ...], patch: int, batch: int) -> tuple[Callable[[], object], int]:
    """A function that does one step on a ViT-B with random weights, and how many parameters it trains."""
    torch.manual_seed(0)
    pixels, targets = torch.randn(batch, 3, 224, 224), torch.randint(CLASSES, (batch,))
    model = _classifier(patch)
    if way[0] == "base":
        model.requires_grad_(False)

        def base() -> None:
            with torch.no_grad():
                model(pixels)

        return base, 0
    if way[0] == "memory":
        _, regime, count, cells, fork = way
        backbone = load_backbone(model)
        tasks = [
            REGIMES[regime].build(
                backbone, TaskPlan(str(i), [str(c) for c in range(CLASSES)], cells=cells, from_layer=fork, seed=i)
            )
            for i in range(count)
        ]
        return _shared_step(
            [Run.start(t, Recipe(), REGIMES[regime].trains(t)) for t in tasks], tasks, backbone, pixels, targets
        )
    if way[0] == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        model = get_peft_model(model, config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    model.train()

    def step() -> None:
        loss = loss_sum("softmax", model(pixels).logits, targets) / batch
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in parameters)


def _shared_step(
    runs: Sequence[Run], tasks: Sequence[Task], backbone: Any, pixels: Tensor, targets: Tensor
) -> tuple[Callable[[], object], int]:
    shared = SharedPass(backbone, tasks)

    def step() -> None:
        parts = [loss_sum("softmax", logits, targets) for logits in shared(pixels)]
        (torch.stack(parts).sum() / len(pixels)).backward()  # type: ignore[no-untyped-call]
        for run in runs:
            torch.nn.utils.clip_grad_norm_(run.trained.values(), 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in runs[0].trained.values())


def bench_train(
    *,
    patch: int = 32,
    batch: int = 16,
    cells: int = 5,
    runs: Sequence[int] = (1, 8, 32),
    forks: Sequence[int] = (0, 8),
    rounds: int = 5,
    memory: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> list[TrainRow]:
    """Times all ways side by side in this process; their peak memory is taken in a process of its own each."""
    ways = candidates(cells, runs, forks)
    steps = {name: build_step(way, patch, batch) for name, way in ways.items()}
    best = best_times({name: step for name, (step, _) in steps.items()}, rounds, tick)
    peaks: dict[str, float | None] = dict.fromkeys(ways)
    if memory:
        context = multiprocessing.get_context("spawn")
        for name, way in ways.items():
            with context.Pool(1) as pool:
                peaks[name] = pool.apply(_peak, (way, patch, batch))
            tick()
    return [TrainRow(name, best[name] / best["base"], peaks[name], trained) for name, (_, trained) in steps.items()]


def candidate_count(runs: Sequence[int], forks: Sequence[int], rounds: int, memory: bool) -> int:
    """How often `bench_train` ticks."""
    return (rounds + memory) * len(candidates(5, runs, forks))


def _peak(way: tuple[Any, ...], patch: int, batch: int) -> float | None:
    """Megabytes by which two steps raise the memory use of a fresh process over that of the built model (Linux)."""
    step, _ = build_step(way, patch, batch)
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not (status.exists() and reset.exists()):
        return None
    # Resets the high-water mark, which a new process inherits from its parent.
    reset.write_text("5")
    before = _kilobytes(status, "VmRSS")
    for _ in range(2):
        step()
    return (_kilobytes(status, "VmHWM") - before) / 1000


def _kilobytes(status: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{field}:"))


def bench_loader(workers: Sequence[int] = (0, 1, 2), count: int = 384, side: int = 224) -> dict[str, float]:
    """Images per second that the loader decodes, augments and normalises: JPEGs of 500 x 375 pixels to `side`."""
    import numpy as np
    from PIL import Image

    from memoro.data import Augment, Loader, load_data
    from memoro.preprocessing import Preprocessing

    generator = np.random.default_rng(0)
    speeds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            small = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            buffer = io.BytesIO()
            small.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            path = Path(folder) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(buffer.getvalue())
        images = load_data(folder, val_fraction=0, screen=False, quiet=True).train
        assert images is not None
        for number in workers:
            loader = Loader(
                images,
                Preprocessing(resize=(side, side)),
                batch_size=32,
                augment=Augment(),
                shuffle=True,
                workers=number,
            )
            for _ in loader.epoch(0):  # starts the processes
                pass
            start = time.perf_counter()
            done = sum(len(batch.targets) for batch in loader.epoch(1))
            speeds[f"{number} workers"] = done / (time.perf_counter() - start)
            loader.close()
    return speeds


def _classifier(patch: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    model: nn.Module = ViTForImageClassification(ViTConfig(patch_size=patch, num_labels=CLASSES))
    return model.eval()
