"""`model.export`: a composition as an ONNX file, through `torch.export`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memoro.errors import BackboneError, CompositionError, TaskFileError, first_line, need
from memoro.images import Preprocessing
from memoro.tasks.record import KEY
from memoro.tasks.task import Task, content_hashes

if TYPE_CHECKING:
    from memoro.engine.composition import Composition

FORMAT = 1


class ExportModule(nn.Module):
    """What an exported file computes: one input to a tuple of outputs."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Composition, *, images: bool) -> None:
        super().__init__()
        self.model = model
        self.images = images
        self.preprocessing = _one_preprocessing(model)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(self.preprocessing, name), device="cpu").view(3, 1, 1))

    @property
    def input_name(self) -> str:
        return "images" if self.images else "pixel_values"

    def example(self) -> Tensor:
        """An input of two images; a batch of one would be taken for a fixed dimension."""
        backbone = self.model.backbone
        height, width = self.preprocessing.size or backbone.image_size
        if self.images:
            return torch.zeros(2, height, width, 3, dtype=torch.uint8, device="cpu")
        return torch.zeros(2, backbone.channels, height, width, device="cpu")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(pixels).values())

    def outputs(self, pixels: Tensor) -> dict[str, Tensor]:
        """`base`, and for each task what `Composition.export` names."""
        if self.images:
            pixels = (pixels.permute(0, 3, 1, 2).float() * self.preprocessing.scale - self.mean) / self.std
        given = self.model.run(pixels, any_size=True)
        outputs = {"base": given.logits["base"]}
        for name, task in self.model.tasks.items():
            own = {name: given.logits[name]}
            if not task.head_kind.has_numbers:  # which are the logits themselves
                own[f"{name}.probabilities"] = task.probabilities(given.logits[name])
            if name in given.recognition:
                own[f"{name}.familiarity"] = given.recognition[name].familiarity
            if taken := own.keys() & {*outputs, self.input_name}:
                raise CompositionError(f"{min(taken)!r} names two parts of the ONNX file: rename the task {name!r}.")
            outputs |= own
        return outputs

    def metadata(self, example: Tensor, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """All that a program needs to use the file without memoro, as JSON values.

        A calibrated task has `thresholds`, at or above which a label is predicted (one half without them), or `spread`,
        half the width of each number's interval.
        """
        backbone, tasks = self.model.backbone, self.model.tasks
        hashes = content_hashes(tasks.values())
        return {
            "format": FORMAT,
            "input": {
                "name": self.input_name,
                "dtype": "uint8" if self.images else "float32",
                "shape": ["batch", *example.shape[1:]],
                "layout": "NHWC" if self.images else "NCHW",
            },
            "outputs": list(outputs),
            "preprocessing": self.preprocessing.to_json(),
            "backbone": {
                "name": backbone.name,
                "family": backbone.family,
                "labels": list(backbone.labels),
                "fingerprint": asdict(backbone.fingerprint),
            },
            "tasks": {
                name: {
                    "labels": task.labels,
                    "kind": task.kind,
                    "extends": [parent.name for parent in task.extends],
                    "content": hashes[id(task)],
                    **_decisions(task),
                }
                for name, task in tasks.items()
            },
        }


def _decisions(task: Task) -> dict[str, Any]:
    """What turns the outputs of a calibrated task into the labels and intervals that `predict` gives."""
    calibration = task.spec.calibration
    parts = {} if calibration is None else {"thresholds": calibration.thresholds, "spread": calibration.spread}
    return {name: list(values) for name, values in parts.items() if values}


def export_onnx(model: Composition, path: str | Path, *, images: bool = False) -> Path:
    """Writes the composition, which is on the CPU, to an ONNX file; returns its path. See `Composition.export`."""
    need("onnx", "onnxscript", extra="onnx")
    graph = ExportModule(model, images=images)
    example = graph.example()
    with torch.no_grad():  # once in the open: names the outputs, and builds the plan, which is not to be traced
        outputs = graph.outputs(example)
    metadata = graph.metadata(example, outputs)
    with _quiet_torch():
        try:
            program = torch.export.export(graph, (example,), dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}})
            # The dimension again, by a name that stays.
            onnx = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes={"pixels": {0: "batch"}})
        except Exception as error:  # torch has no common type for what it cannot export
            reason = first_line(error)[:300]
            raise BackboneError(f"torch cannot export {model.backbone} to ONNX: {reason}") from error
    assert onnx is not None
    _name_parts(onnx.model, graph.input_name, list(outputs))
    onnx.model.metadata_props[KEY] = json.dumps(metadata, ensure_ascii=False)
    return _save(onnx, Path(path))


def _one_preprocessing(model: Composition) -> Preprocessing:
    passes = model.passes()
    if len(passes) > 1:
        groups = "; ".join(f"{', '.join(names)} ({_describe_size(one)})" for one, names in passes.items())
        for names in passes.values():
            for task in (model.tasks[name] for name in names):
                if apart := [parent.name for parent in task.extends if parent.name not in names]:
                    raise CompositionError(
                        f"{task.name!r} extends {apart[0]!r}, but they were trained with different preprocessing, so "
                        f"one input cannot serve both ({groups}): retrain one of them at the image size of the other."
                    )
        raise CompositionError(
            f"the tasks were trained with different preprocessing, and one input cannot be prepared in several ways: "
            f"export each group to its own file: {groups}."
        )
    return next(iter(passes), model.backbone.preprocessing)


def _describe_size(preprocessing: Preprocessing) -> str:
    size = preprocessing.size
    return "any size" if size is None else f"{size[0]}x{size[1]}"


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Without torch's warnings about its own code, and without its fused attention module, which ONNX does not know."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _name_parts(model: Any, input_name: str, outputs: list[str]) -> None:
    """Gives input and outputs their names, and removes notes on nodes, such as paths of source files."""
    from onnx_ir.passes import common

    common.ClearMetadataAndDocStringPass()(model)
    graph = model.graph
    graph.inputs[0].name = input_name
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    common.NameFixPass()(model)  # renames inner values that have the name of an output


def _save(program: Any, path: Path) -> Path:
    """Written beside its place and moved. Weights of more than 2 GB go to a second file, PATH.data."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
            program.save(Path(folder) / path.name)
            # Weights first: the file with the graph refers to them.
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
                os.replace(file, path.parent / file.name)
    except OSError as error:
        raise TaskFileError(f"cannot write {path} ({error.strerror}).") from None
    return path
