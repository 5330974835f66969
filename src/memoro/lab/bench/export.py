"""`memoro lab bench export`: an exported file in ONNX Runtime beside the same composition in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from memoro.backbones import Backbone
from memoro.clock import best_times
from memoro.console import bar, format_bytes, format_count, make_table
from memoro.engine.composition import Composition, compose
from memoro.errors import need
from memoro.lab.bench.models import CLASSES
from memoro.tasks.task import new_task


@dataclass(frozen=True)
class ExportRow:
    """One number of tasks. Speeds are in images per second."""

    tasks: int
    torch: float
    onnx: float
    difference: float
    """The largest between the two, over all logits and the base's output."""
    bytes: int
    """Size of the file."""


def bench_export(
    backbone: Backbone,
    *,
    counts: Sequence[int] = (1, 100),
    cells: int = 5,
    batch: int = 8,
    rounds: int = 5,
    seconds: float = 60,
    quiet: bool = True,
) -> list[ExportRow]:
    """Exports compositions of untrained tasks, and times both on the CPU with torch's number of threads.

    Most of the time goes into exporting: tens of seconds, and more with many tasks, each of which has a head in the
    graph. The timing ends after `rounds` or, with one round at least, after this many `seconds`.
    """
    need("onnxruntime", extra="onnx")
    backbone = backbone.to("cpu")
    height, width = backbone.preprocessing.size or backbone.image_size
    pixels = torch.randn(batch, backbone.channels, height, width)
    labels = [str(i) for i in range(CLASSES)]
    rows, sizes, differences = [], {}, {}
    candidates: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        for count in counts:
            model = compose(backbone, [new_task(backbone, f"task {i}", labels, cells=cells) for i in range(count)])
            with bar(f"exporting {format_count(count, 'task')}", 1, quiet=quiet) as tick:
                session, sizes[count] = _open(model)
                tick()
            feed = {session.get_inputs()[0].name: pixels.numpy()}
            expected = model(pixels)
            found = dict(zip(expected, session.run(list(expected), feed), strict=True))
            differences[count] = max(
                float((torch.from_numpy(found[name]) - out.float()).abs().max()) for name, out in expected.items()
            )
            candidates[f"torch {count}"] = lambda model=model: model(pixels)  # type: ignore[misc]
            candidates[f"onnx {count}"] = lambda session=session, feed=feed, names=list(expected): session.run(  # type: ignore[misc]
                names, feed
            )
        with bar("timing", rounds * len(candidates), quiet=quiet) as tick:
            best = best_times(candidates, rounds, tick, seconds=seconds)
    for count in counts:
        speeds = {side: batch / best[f"{side} {count}"] for side in ("torch", "onnx")}
        rows.append(ExportRow(count, **speeds, difference=differences[count], bytes=sizes[count]))
    return rows


def _open(model: Composition) -> tuple[Any, int]:
    """The exported composition in ONNX Runtime, and the size of its file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        path = model.export(Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return session, sum(file.stat().st_size for file in Path(folder).iterdir())


def export_table(title: str, rows: Sequence[ExportRow]) -> Table:
    columns = ("tasks", "torch", "ONNX Runtime", "ratio", "largest difference", "file")
    cells = [
        [
            str(row.tasks),
            f"{row.torch:.0f}",
            f"{row.onnx:.0f}",
            f"{row.onnx / row.torch:.2f}",
            f"{row.difference:.1g}",
            format_bytes(row.bytes),
        ]
        for row in rows
    ]
    return make_table(columns, cells, f"{title}: images per second", left=0)
