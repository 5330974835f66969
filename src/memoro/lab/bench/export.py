"""`memoro lab bench export`: an exported file in ONNX Runtime beside the same composition in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memoro.backbones import Backbone
from memoro.console import bar, format_count
from memoro.engine.composition import Composition, compose
from memoro.errors import need
from memoro.lab.bench.models import Row, new_tasks, time_candidates


def bench_export(
    backbone: Backbone,
    *,
    counts: Sequence[int],
    cells: int,
    batch: int,
    rounds: int,
    seconds: float,
    quiet: bool = True,
) -> list[Row]:
    """Exports compositions of untrained tasks, and times both on the CPU with torch's number of threads: images per
    second, the largest difference between their logits and base outputs, and the size of the file.

    Most of the time goes into exporting: tens of seconds, and more with many tasks, each of which has a head in the
    graph. The timing ends after `rounds` or, with one round at least, after this many `seconds`.
    """
    need("onnxruntime", extra="onnx")
    backbone = backbone.to("cpu")
    height, width = backbone.preprocessing.size or backbone.image_size
    pixels = torch.randn(batch, backbone.channels, height, width)
    rows: list[Row] = []
    candidates: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        for count in counts:
            model = compose(backbone, new_tasks(backbone, count, cells=cells))
            with bar(f"exporting {format_count(count, 'task')}", 1, quiet=quiet) as tick:
                session, size = _open(model)
                tick()
            feed = {session.get_inputs()[0].name: pixels.numpy()}
            expected = model(pixels)
            found = dict(zip(expected, session.run(list(expected), feed), strict=True))
            difference = max(
                float((torch.from_numpy(found[name]) - out.float()).abs().max()) for name, out in expected.items()
            )
            rows.append({"tasks": count, "difference": difference, "bytes": size})
            candidates[f"torch {count}"] = lambda model=model: model(pixels)  # type: ignore[misc]
            candidates[f"onnx {count}"] = lambda session=session, feed=feed, names=list(expected): session.run(  # type: ignore[misc]
                names, feed
            )
        best = time_candidates("timing", candidates, rounds, quiet=quiet, seconds=seconds)
    return [{**row, **{kind: batch / best[f"{kind} {row['tasks']}"] for kind in ("torch", "onnx")}} for row in rows]


def _open(model: Composition) -> tuple[Any, int]:
    """The exported composition in ONNX Runtime, and the size of its file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        path = model.export(Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return session, sum(file.stat().st_size for file in Path(folder).iterdir())
