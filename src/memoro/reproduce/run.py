"""Runs the cells of tables (users read: jobs): the estimate first, each recorded when it is done, then the reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memoro.console import format_bytes, format_count, format_time
from memoro.data.augment import output_size
from memoro.data.hub import KNOWN
from memoro.errors import DataError, MemoroError, TrainingError
from memoro.reproduce.counts import count_flops
from memoro.reproduce.estimate import Size, base_passes, training_bytes, training_steps
from memoro.reproduce.lab import Lab
from memoro.reproduce.plan import Cell, Key, Request, plan_table
from memoro.reproduce.records import Record, Records
from memoro.reproduce.report import write_table

GPU_TFLOPS = 30
"""What one GPU is assumed to sustain in training, for the estimate of the paper's scale."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What to run, and where its results are."""

    tables: tuple[str, ...]
    request: Request
    out: Path
    command: str
    """As the user typed it, for the records."""

    def cells(self) -> list[tuple[str, Cell]]:
        return [(table, cell) for table in self.tables for cell in plan_table(table, self.request)]


def list_missing(order: Order, lab: Lab, records: Records) -> list[tuple[str, Cell]]:
    """The cells without the methods that are recorded, or that an earlier cell of the order measures."""
    found: list[tuple[str, Cell]] = []
    planned: list[Key] = []
    for table, cell in order.cells():
        keys = [(part, lab.key(part)) for part in cell.parts()]
        left = [(part, key) for part, key in keys if records.find(key) is None and key not in planned]
        planned += [key for _, key in left]
        if left:
            found.append((table, replace(cell, methods=tuple(method for part, _ in left for method in part.methods))))
    return found


def without_unplanned(order: Order, log: Log) -> Order:
    """The order without tables that cannot be planned for its sets; an error if it has only one."""
    planned = []
    for table in order.tables:
        try:
            plan_table(table, order.request)
            planned.append(table)
        except DataError as error:
            if len(order.tables) == 1:
                raise
            log(f"{table}: skipped ({error})")
    return replace(order, tables=tuple(planned))


def run_tables(order: Order, lab: Lab, log: Log) -> Records:
    """Runs what is not recorded yet, and writes the reports of all tables.

    A job that fails does not stop the others: at the end, an error says how many did.
    """
    order = without_unplanned(order, log)
    records = Records.read(order.out)
    sizes = {name: lab.size(name) for name in order.request.sets}
    waiting, total = list_missing(order, lab, records), len(order.cells())
    seconds = sum(lab.seconds(cell, sizes) for _, cell in waiting)
    log(f"{format_count(total, 'job')}, {total - len(waiting)} of them done. The others: about {format_time(seconds)}.")
    failed = 0
    for number, (table, cell) in enumerate(waiting, start=1):
        log(f"[{number} of {len(waiting)}] {table}: {cell.title} (about {format_time(lab.seconds(cell, sizes))})")
        started = time.monotonic()
        try:
            results = lab.run(cell, records)
        except MemoroError as error:
            failed += 1
            log(f"    failed: {error}")
            continue
        seconds = time.monotonic() - started
        parts = {part.methods[0].name if cell.kind == "accuracy" else "": part for part in cell.parts()}
        made = [
            Record.now(table, lab.key(parts[name]), result, seconds, len(results), order.command)
            for name, result in results.items()
        ]
        for text in [text for result in results.values() for text in result.get("notes", ())]:
            log(f"    {text}")
        records.add(made, write=lab.main)
        if lab.main:
            write_table(table, records, order.request.scale.name, order.out)
        log(f"    done in {format_time(seconds)}")
    if lab.main:
        write_reports(order.tables, order.request.scale.name, order.out, log)
    if failed:
        raise TrainingError(
            f"{failed} of {format_count(len(waiting), 'job')} failed; the same command tries them again."
        )
    return records


def write_reports(tables: Sequence[str], scale: str, out: Path, log: Log) -> None:
    """Writes the tables from what is recorded."""
    records = Records.read(out)
    for table in tables:
        log(f"{table}: {write_table(table, records, scale, out)}")


def dry_run(order: Order, lab: Lab, log: Log) -> None:
    """Resolves the plan and says what it needs, without training anything."""
    order = without_unplanned(order, log)
    request, scale = order.request, order.request.scale
    sizes = {name: _look_for_set(name, lab, log) for name in request.sets}
    known = {name: size for name, size in sizes.items() if size is not None}
    for name in request.backbones:
        _look_for_backbone(name, lab, log)
    missing = list_missing(order, lab, Records.read(order.out))
    left = [(table, cell) for table, cell in missing if all(name in known for name in cell.sets)]
    total = 0.0
    for table in order.tables:
        cells = [cell for own, cell in left if own == table]
        steps = sum(training_steps(cell, known) for cell in cells)
        seconds = sum(lab.seconds(cell, known) for cell in cells)
        total += seconds
        what = f"{format_count(len(cells), 'job')} that no other table or record has"
        log(f"{table}: {what}, {steps:,} optimiser steps, about {format_time(seconds)} on this machine")
    log(f"all: about {format_time(total)} on this machine; batch {scale.unmasked.batch_size}")
    passes = sum(base_passes(cell, known) for _, cell in left)
    bench = lab.bench(request.main_backbone)
    pixels = torch.zeros(1, bench.backbone.channels, *output_size(bench.preprocessing)).to(bench.backbone.device)
    work = passes * count_flops(bench.backbone.original, pixels)
    hours = work / (GPU_TFLOPS * 1e12) / 3600
    log(f"work: {work / 1e15:,.1f} PFLOP, or {hours:,.1f} hours of a GPU that sustains {GPU_TFLOPS} TFLOP/s")
    methods = {method.name: method for _, cell in order.cells() for method in cell.methods}
    for name, method in methods.items():
        if name in {"full", "memory-full 5", "memory 5"}:
            budget = scale.masked if method.composes else scale.unmasked
            need = training_bytes(bench.backbone, method, budget.batch_size, min(output_size(bench.preprocessing)))
            log(f"memory of one run, {name}: about {format_bytes(need)} at batch {budget.batch_size}")


def _look_for_set(name: str, lab: Lab, log: Log) -> Size | None:
    try:
        size = lab.size(name)
    except MemoroError as error:
        log(f"data: {name}: MISSING ({error})")
        return None
    there = lab.listed(name) is not None
    what = "found" if there else f"MISSING; official numbers are used here. Fetch {KNOWN[name].fetch}"
    log(f"data: {name}: {size.train:,} training images, {size.test:,} to test ({what})")
    return size


def _look_for_backbone(name: str, lab: Lab, log: Log) -> None:
    """Loads it; where that fails, a ViT-B/32 with random weights stands in, which costs the same."""
    try:
        bench = lab.bench(name)
        log(f"backbone: {bench.backbone}, fingerprint {bench.backbone.fingerprint.short} (found)")
    except MemoroError as error:
        log(f"backbone: {name}: MISSING ({error})")
        lab.stand_in(name)
