"""Runs the jobs of tables: the estimate first, each recorded when it is done, then the reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path

import torch

from memoro.console import format_bytes, format_count, format_time
from memoro.data.hub import KNOWN
from memoro.errors import DataError, MemoroError, TrainingError
from memoro.images import output_size
from memoro.lab.reproduce.counts import count_flops
from memoro.lab.reproduce.estimate import Size, base_passes, training_bytes, training_steps
from memoro.lab.reproduce.plan import Job, Key, Request, group_methods, plan_table
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.reproduce.runner import Runner
from memoro.lab.tables.report import write_table
from memoro.training.runfolder import InUseError

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
    methods: frozenset[str] = frozenset()
    """The only ones to measure; empty: all."""

    def jobs(self) -> list[tuple[str, Job]]:
        """The jobs of each table, in order. Methods that were not asked for are left out of a job; a job that compares
        methods is left out unless all of them were asked for."""
        jobs = [(table, job) for table in self.tables for job in plan_table(table, self.request)]
        if not self.methods:
            return jobs
        known = dict.fromkeys(method.name for _, job in jobs for method in job.methods)
        if unknown := sorted(self.methods - known.keys()):
            there = f"choose from {', '.join(known)}" if known else "this table has no choice of methods"
            raise DataError(f"{', '.join(self.tables)}: no method {unknown[0]!r}; {there}.")
        chosen = []
        for table, job in jobs:
            own = tuple(method for method in job.methods if method.name in self.methods)
            if own == job.methods or (own and job.kind == "accuracy"):
                chosen.append((table, replace(job, methods=own)))
        if not chosen:
            raise DataError(f"{', '.join(self.tables)} compares {', '.join(known)}: name all of them, or none.")
        return chosen


def missing_parts(job: Job, runner: Runner, records: Records) -> list[Job]:
    """The parts of a job that are not recorded."""
    return [part for part in job.parts() if records.find(runner.key(part)) is None]


def _join(parts: Sequence[Job]) -> Job:
    return replace(parts[0], methods=tuple(chain(*(part.methods for part in parts))))


def list_missing(order: Order, runner: Runner, records: Records) -> list[tuple[str, Job]]:
    """The jobs without the methods that are recorded, or that an earlier job of the order measures. What is left of
    several jobs that can share passes is put together again."""
    found: list[tuple[str, Job]] = []
    planned: list[Key] = []
    for table, job in order.jobs():
        left = [part for part in missing_parts(job, runner, records) if runner.key(part) not in planned]
        planned += map(runner.key, left)
        if left:
            found.append((table, _join(left)))
    grouped: list[tuple[str, Job]] = []
    for (table, blank), jobs in groupby(found, key=lambda one: (one[0], replace(one[1], methods=()))):
        left_over = [job.methods for _, job in jobs]
        if blank.kind == "accuracy":
            left_over = list(group_methods(list(chain(*left_over)), blank.budget))
        grouped += [(table, replace(blank, methods=methods)) for methods in left_over]
    return grouped


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


def run_tables(order: Order, runner: Runner, log: Log) -> Records:
    """Runs what is not recorded yet, and writes the reports of all tables.

    A job that fails does not stop the others: at the end, an error says how many did. Several commands may share the
    folder: each skips the jobs that another one runs or has recorded.
    """
    order = without_unplanned(order, log)
    records = Records.read(order.out)
    sizes = {name: runner.size(name) for name in order.request.sets}
    waiting, total = list_missing(order, runner, records), len(order.jobs())
    _check_test_splits([job for _, job in waiting], sizes)
    seconds = sum(runner.seconds(job, sizes) for _, job in waiting)
    done = f" ({total - len(waiting)} of {total} are done)" if len(waiting) < total else ""
    log(f"{format_count(len(waiting), 'job')} to run{done}, about {format_time(seconds)}.")
    failed = busy = 0
    for number, (table, job) in enumerate(waiting, start=1):
        log(f"[{number} of {len(waiting)}] {table}: {job.title} (about {format_time(runner.seconds(job, sizes))})")
        try:
            with runner.lock(job):
                if runner.processes.world == 1:  # another command may have recorded something since
                    records = Records.read(order.out)
                _run_job(order, table, job, runner, records, log)
        except InUseError:
            busy += 1
            log("    skipped: another process is running it")
        except MemoroError as error:
            failed += 1
            log(f"    failed: {error}")
    if runner.main and records.entries:
        write_reports(order.tables, order.request.scale.name, order.out, log)
    if busy:
        log(f"Other processes are running {format_count(busy, 'job')} of these.")
    if failed:
        raise TrainingError(
            f"{failed} of {format_count(len(waiting), 'job')} failed; the same command tries them again."
        )
    return records


def _run_job(order: Order, table: str, job: Job, runner: Runner, records: Records, log: Log) -> None:
    """Runs what is not recorded of a job, adds it to the records and writes the table."""
    left = missing_parts(job, runner, records)
    if not left:
        runner.remove_checkpoints(job)
        log("    skipped: another process has recorded it")
        return
    started = time.monotonic()
    rest = _join(left)
    results = runner.run(rest, records)
    seconds = time.monotonic() - started
    parts = {part.methods[0].name if job.kind == "accuracy" else "": part for part in left}
    made = [
        Record.now(table, runner.key(parts[name]), result, seconds, len(results), order.command)
        for name, result in results.items()
    ]
    for text in [text for result in results.values() for text in result.get("notes", ())]:
        log(f"    {text}")
    records.add(made, write=runner.main)
    if runner.main:
        for one in (job, rest):
            runner.remove_checkpoints(one)
        write_table(table, records, order.request.scale.name, order.out)
    log(f"    done in {format_time(seconds)}")


def _check_test_splits(jobs: Sequence[Job], sizes: Mapping[str, Size]) -> None:
    """Raises before anything is trained if a set that is needed has no test images."""
    for job in jobs:
        missing = [name for name in job.sets if not sizes[name].test]
        if missing and job.budget.seeds:
            raise DataError(f"{missing[0]} has no test split: add a test/ folder beside train/.")


def write_reports(tables: Sequence[str], scale: str, out: Path, log: Log) -> None:
    """Writes the tables from what is recorded."""
    records = Records.read(out)
    if not records.entries:
        raise DataError(f"{out} has no records: run `memoro lab reproduce` first, or name its folder with --out.")
    for table in tables:
        log(f"{table}: {write_table(table, records, scale, out)}")


def dry_run(order: Order, runner: Runner, log: Log) -> None:
    """Resolves the plan and says what it needs, without training anything."""
    order = without_unplanned(order, log)
    request, scale = order.request, order.request.scale
    sizes = {name: _look_for_set(name, runner, log) for name in request.sets}
    known = {name: size for name, size in sizes.items() if size is not None}
    for name in request.backbones:
        _look_for_backbone(name, runner, log)
    missing = list_missing(order, runner, Records.read(order.out))
    left = [(table, job) for table, job in missing if all(name in known for name in job.sets)]
    total = 0.0
    for table in order.tables:
        jobs = [job for own, job in left if own == table]
        steps = sum(training_steps(job, known) for job in jobs)
        seconds = sum(runner.seconds(job, known) for job in jobs)
        total += seconds
        what = f"{format_count(len(jobs), 'job')} that no other table or record has"
        log(f"{table}: {what}, {steps:,} optimiser steps, about {format_time(seconds)} on this machine")
    log(f"all: about {format_time(total)} on this machine; batch {scale.unmasked.batch_size}")
    passes = sum(base_passes(job, known) for _, job in left)
    bench = runner.bench(request.main_backbone)
    pixels = torch.zeros(1, bench.backbone.channels, *output_size(bench.preprocessing)).to(bench.backbone.device)
    work = passes * count_flops(bench.backbone.original, pixels)
    hours = work / (GPU_TFLOPS * 1e12) / 3600
    log(f"work: {work / 1e15:,.1f} PFLOP, or {hours:,.1f} hours of a GPU that sustains {GPU_TFLOPS} TFLOP/s")
    methods = {method.name: method for _, job in order.jobs() for method in job.methods}
    for name, method in methods.items():
        if name in {"full", "memory-full 5", "memory 5"}:
            budget = scale.masked if method.composes else scale.unmasked
            need = training_bytes(bench.backbone, method, budget.batch_size, min(output_size(bench.preprocessing)))
            log(f"memory of one run, {name}: about {format_bytes(need)} at batch {budget.batch_size}")


def _look_for_set(name: str, runner: Runner, log: Log) -> Size | None:
    try:
        size = runner.size(name)
    except MemoroError as error:
        log(f"data: {name}: MISSING ({error})")
        return None
    there = runner.listed(name) is not None
    what = "found" if there else f"MISSING; official numbers are used here. Fetch {KNOWN[name].fetch}"
    log(f"data: {name}: {size.train:,} training images, {size.test:,} to test ({what})")
    return size


def _look_for_backbone(name: str, runner: Runner, log: Log) -> None:
    """Loads it; where that fails, a ViT-B/32 with random weights stands in, which costs the same."""
    try:
        bench = runner.bench(name)
        log(f"backbone: {bench.backbone}, fingerprint {bench.backbone.fingerprint.short} (found)")
    except MemoroError as error:
        log(f"backbone: {name}: MISSING ({error})")
        runner.stand_in(name)
