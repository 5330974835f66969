"""`memoro inspect`: what a file of tasks contains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from memoro.backbones import Backbone
from memoro.console import Cell, format_bytes, format_count, make_table
from memoro.evaluation.metrics import COLUMNS, format_worst
from memoro.tasks.familiarity import Familiarity
from memoro.tasks.record import SKETCH, describe_fact
from memoro.tasks.spec import ModelSpec
from memoro.tasks.task import Task

SIDE_BY_SIDE = 2
MAX_LABELS = 6
MAX_LINES = 50
PARTS = {
    "class_token": "class token",
    "memory": "memory",
    "lora": "low-rank weights",
    "head": "head",
    "readout": "read-out",
}
"""The parts of a task in words, by the first name of their parameters."""


def inspect_tasks(path: Path, tasks: Sequence[Task], backbone: Backbone | None = None) -> dict[str, Any]:
    """What the file of these tasks records, JSON-ready; with a backbone also whether it was made for that one."""
    entries = [describe_task(task, backbone) for task in tasks]
    return {"file": str(path), "bytes": path.stat().st_size, "tasks": entries}


def describe_task(task: Task, backbone: Backbone | None = None) -> dict[str, Any]:
    """Everything that is known of a task but its weights and the hashes of its images, JSON-ready."""
    spec, parts = task.spec, Counter[str]()
    for name, tensor in task.stored_tensors().items():
        if tensor.numel():
            parts[PARTS[name.split(".")[0]]] += tensor.numel() * tensor.element_size()
    own = {
        "cells": spec.cells,
        "rank": spec.rank,
        "members": spec.members,
        "from_layer": spec.from_layer,
        "memory_norm": spec.memory_norm,
        "readout": None if spec.readout is None else asdict(spec.readout),
        "parents": [parent.name for parent in task.parents],
        "parameters": sum(parameter.numel() for parameter in task.parameters()),
        "parts": parts,
        "calibration": None if spec.calibration is None else asdict(spec.calibration),
        "familiarity": None if spec.familiarity is None else _describe_familiarity(spec.familiarity),
        "content": task.content_hash(),
    }
    return describe_model(spec, own, backbone)


def _describe_familiarity(found: Familiarity) -> dict[str, Any]:
    return {
        "directions": len(found.directions),
        "classes": len(found.means),
        "bytes": found.bytes,
        "images": found.images,
        "photographs": len(found.reader) > 0,
        "coarse": found.coarse,
        "step": 1 / min(found.images, len(found.held_out)),
    }


def describe_model(spec: ModelSpec, own: dict[str, Any], backbone: Backbone | None) -> dict[str, Any]:
    """What is known of any model of one task, with its own facts, JSON-ready."""
    made = spec.backbone
    record = {
        "name": made.name,
        "family": made.family,
        "depth": made.depth,
        "dim": made.dim,
        "fingerprint": made.fingerprint.digest,
        "dtype": made.fingerprint.dtype,
    }
    if backbone is not None:
        record["match"] = made.fingerprint.match(backbone.fingerprint)
    return {
        "name": spec.name,
        "kind": spec.kind,
        "labels": list(spec.labels),
        **own,
        "backbone": record,
        "preprocessing": None if spec.preprocessing is None else spec.preprocessing.to_json(),
        "training": {name: value for name, value in spec.training.items() if name != SKETCH},
        "metrics": dict(spec.metrics),
    }


def inspect_tables(record: dict[str, Any]) -> list[Table]:
    """The record of a file as tables with a column for each task, `SIDE_BY_SIDE` of them to a table."""
    entries = record["tasks"]
    title: str | None = f"{record['file']}  ({format_bytes(record['bytes'])})"
    tables = []
    for at in range(0, len(entries), SIDE_BY_SIDE):
        some = entries[at : at + SIDE_BY_SIDE]
        columns = [_rows(entry) for entry in some]
        rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
        names = ["", *(entry["name"] for entry in some)]
        tables.append(make_table(names, [row for row in rows if any(row[1:])], title, left=len(names)))
        title = None
    return tables


def _rows(entry: dict[str, Any]) -> dict[str, Cell]:
    """The cells of one column, by the names of their rows."""
    backbone, labels, training, readout = (entry[name] for name in ("backbone", "labels", "training", "readout"))
    more = ", …" if len(labels) > MAX_LABELS else ""
    norm = "before" if entry["memory_norm"] == "pre" else "after"
    share = "" if readout is None or readout["share"] == 1 else f", {readout['share']:.0%} of the answer"
    sizes = ", ".join(f"{part} {format_bytes(size)}" for part, size in entry["parts"].items())
    return {
        "labels": f"{len(labels)}: {', '.join(labels[:MAX_LABELS])}{more}",
        "head": entry["kind"],
        "memory": f"{format_count(entry['cells'], 'cell')} per layer, {norm} the norm" if entry["cells"] else "none",
        "low-rank weights": f"rank {entry['rank']}" if entry["rank"] else "none",
        "stream": _layers(entry["from_layer"], backbone["depth"]),
        "ensemble": f"{entry['members']} members, whose answers are averaged" if entry["members"] > 1 else "",
        "read-out": "none"
        if readout is None
        else f"statistics of the tokens after layer {readout['from_layer']} and later ones{share}",
        "extends": ", ".join(entry["parents"]) or "nothing",
        "calibration": _calibration_text(entry["calibration"]),
        "familiarity": _familiarity_text(entry["familiarity"]),
        "parameters": f"{entry['parameters']:,}" + (f" ({sizes})" if sizes else ""),
        "backbone": [
            backbone["name"],
            f"{backbone['family']}, {backbone['depth']} layers of {backbone['dim']}, {backbone['dtype']}",
            f"fingerprint {backbone['fingerprint'][:12]}",
        ],
        "this backbone": MATCHES.get(backbone.get("match", ""), ""),
        "images": _image_size(entry["preprocessing"]),
        "metrics": _lines(entry["metrics"]),
        "training": _lines({name: value for name, value in training.items() if name != "history"}),
        "history": _history(training.get("history")),
        "content": entry["content"][:12],
    }


MATCHES = {
    "same": "fits",
    "same up to rounding": "fits: the same weights in another dtype",
    "different": "does not fit: it has other weights",
}
"""What `Fingerprint.match` says, for people."""
MISSING = "none; add it with: memoro calibrate TASK DATA"


def _calibration_text(found: dict[str, Any] | None) -> Cell:
    if found is None:
        return MISSING
    parts = {"temperature": "temperature", "thresholds": "threshold", "spread": "90 % interval ±"}
    values = [
        f"{word} {' to '.join(dict.fromkeys(describe_fact(end(found[key])) for end in (min, max)))}"
        for key, word in parts.items()
        if found[key]
    ]
    return [", ".join(values), f"from {found['images']} images ({describe_fact(found['source'])})"]


def _familiarity_text(found: dict[str, Any] | None) -> Cell:
    if found is None:
        return MISSING
    coarse = f"; coarse, in steps of {found['step']:.2f}" if found["images"] < 100 else ""
    if found["coarse"] and not coarse:
        coarse = "; coarse, because the images are so diverse"
    against = " and with photographs" if found["photographs"] else ""
    return [
        f"{format_count(found['classes'], 'class mean')}, {format_count(found['directions'], 'principal direction')} "
        f"({format_bytes(found['bytes'])})",
        f"compared with {format_count(found['images'], 'own image')}{against}{coarse}",
    ]


def _layers(first: int, depth: int) -> str:
    """The layers that the task's token passes through."""
    if first >= depth:
        return "none: a head on the final token"
    return f"layer {first}" if first == depth - 1 else f"layers {first} to {depth - 1}"


def _image_size(preprocessing: dict[str, Any] | None) -> str:
    if preprocessing is None:
        return "the backbone's size"
    size = preprocessing["crop"] or preprocessing["resize"]
    return f"{size[0]}x{size[1]}" if isinstance(size, (list, tuple)) else str(size)


def _history(earlier: Any) -> list[str]:
    """A line for each training that this one started from: a file may record any JSON."""
    entries = [entry for entry in earlier if isinstance(entry, dict)] if isinstance(earlier, list) else []
    shown = []
    for entry in entries[-MAX_LINES:]:
        name, data, images, labels = (
            describe_fact(entry.get(key, "?")) for key in ("task", "data", "images", "labels")
        )
        shown.append(f"started from {name}: {images} images of {data}, {labels} labels")
    return shown


def _lines(record: dict[str, Any]) -> list[str]:
    """A line for each entry that is not empty, as far as it can be shown: a file may record any JSON."""
    lines = []
    for name, value in record.items():
        if name == "worst_classes" and isinstance(value, dict):
            value = format_worst(record, 5)
        elif name == "phases" and isinstance(value, dict):
            value = ", ".join(f"{describe_fact(phase)} {describe_fact(seconds)}" for phase, seconds in value.items())
        if value != "" and name != "confusion":
            lines.append(f"{describe_fact(COLUMNS.get(name) or name.replace('_', ' '))} {describe_fact(value)}")
    more = [f"… and {len(lines) - MAX_LINES:,} more"] if len(lines) > MAX_LINES else []
    return [*lines[:MAX_LINES], *more] or ["-"]
