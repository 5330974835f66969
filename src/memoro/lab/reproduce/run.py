"""Runs the jobs of tables: the estimate first, each recorded when it is done, then the reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memoro.console import format_count, format_time
from memoro.data.hub import KNOWN
from memoro.errors import DataError, MemoroError, TrainingError
from memoro.lab.reproduce.costs import Size, base_passes, count_flops
from memoro.lab.reproduce.plan import TABLES, Job, Request, group_jobs
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.reproduce.runner import Runner
from memoro.lab.tables.report import write_table
from memoro.training.runfolder import InUseError

GPU_TFLOPS = 30
"""What one GPU is assumed to sustain in training, for the estimate of the paper's scale."""

Log = Callable[[str], None]


def missing_parts(job: Job, runner: Runner, records: Records) -> list[Job]:
    """The parts of a job that are not recorded."""
    return [part for part in job.parts() if records.find(runner.key(part)) is None]


def list_missing(request: Request, runner: Runner, records: Records) -> list[tuple[str, Job]]:
    """What is not recorded yet, each measurement for the first table that needs it. Methods that can share passes are
    together."""
    planned: dict[str, tuple[str, Job]] = {}
    for table, job in request.jobs():
        planned.setdefault(json.dumps(runner.key(job)), (table, job))
    return group_jobs((table, job) for table, job in planned.values() if missing_parts(job, runner, records))


def without_unplanned(request: Request, log: Log) -> Request:
    """The request without tables that cannot be planned for its sets; an error if it has only one."""
    planned = []
    for table in request.tables:
        try:
            list(TABLES[table](request))
            planned.append(table)
        except DataError as error:
            if len(request.tables) == 1:
                raise
            log(f"{table}: skipped ({error})")
    return replace(request, tables=tuple(planned))


def run_tables(request: Request, runner: Runner, log: Log) -> Records:
    """Runs what is not recorded yet, and writes the reports of all tables.

    A job that fails does not stop the others: at the end, an error says how many did. Several commands may share the
    folder: each skips the jobs that another one runs or has recorded.
    """
    request = without_unplanned(request, log)
    records = Records.read(request.out)
    sizes = {name: runner.size(name) for name in request.sets}
    waiting, total = list_missing(request, runner, records), len(group_jobs(request.jobs()))
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
                    records = Records.read(request.out)
                _run_job(request, table, job, runner, records, log)
        except InUseError:
            busy += 1
            log("    skipped: another process is running it")
        except MemoroError as error:
            failed += 1
            log(f"    failed: {error}")
    if runner.main and records.entries:
        write_reports(request.tables, request.scale.name, request.out, log)
    if busy:
        log(f"Other processes are running {format_count(busy, 'job')} of these.")
    if failed:
        raise TrainingError(
            f"{failed} of {format_count(len(waiting), 'job')} failed; the same command tries them again."
        )
    return records


def _run_job(request: Request, table: str, job: Job, runner: Runner, records: Records, log: Log) -> None:
    """Runs what is not recorded of a job, adds it to the records and writes the table."""
    left = missing_parts(job, runner, records)
    if not left:
        runner.remove_checkpoints(job)
        log("    skipped: another process has recorded it")
        return
    started = time.monotonic()
    rest = replace(job, methods=tuple(method for part in left for method in part.methods))
    results = runner.run(rest, records)
    seconds = time.monotonic() - started
    made = [
        Record.now(table, runner.key(part), result, seconds, len(results), request.command)
        for part, result in zip(left, results.values(), strict=True)
    ]
    for text in [text for result in results.values() for text in result.get("notes", ())]:
        log(f"    {text}")
    records.add(made, write=runner.main)
    if runner.main:
        for one in (job, rest):
            runner.remove_checkpoints(one)
        write_table(table, records, request.scale.name, request.out)
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


def dry_run(request: Request, runner: Runner, log: Log) -> None:
    """Resolves the plan and says what it needs, without training anything."""
    request = without_unplanned(request, log)
    sizes: dict[str, Size] = {}
    for name in request.sets:
        try:
            sizes[name] = size = runner.size(name)
        except MemoroError as error:
            log(f"data: {name}: MISSING ({error})")
            continue
        missing = f"MISSING; official numbers are used here. Fetch {KNOWN[name].fetch}" if name in KNOWN else ""
        what = missing if runner.listed(name) is None else "found"
        log(f"data: {name}: {size.train:,} training images, {size.test:,} to test ({what})")
    for name in request.backbones:
        try:
            backbone = runner.bench(name).backbone
            log(f"backbone: {backbone}, fingerprint {backbone.fingerprint.short} (found)")
        except MemoroError as error:
            log(f"backbone: {name}: MISSING ({error})")
            runner.stand_in(name)
    left = [
        (table, job)
        for table, job in list_missing(request, runner, Records.read(request.out))
        if all(name in sizes for name in job.sets)
    ]
    for table in request.tables:
        jobs = [job for own, job in left if own == table]
        seconds = sum(runner.seconds(job, sizes) for job in jobs)
        what = f"{format_count(len(jobs), 'job')} that no other table or record has"
        log(f"{table}: {what}, about {format_time(seconds)} on this machine")
    seconds = sum(runner.seconds(job, sizes) for _, job in left)
    log(f"all: about {format_time(seconds)} on this machine; batch {request.scale.unmasked.batch_size}")
    main = request.main_backbone
    work = sum(base_passes(job, sizes) for _, job in left)
    work *= count_flops(runner.bench(main).backbone.original, runner.zeros(main))
    hours = work / (GPU_TFLOPS * 1e12) / 3600
    log(f"work: {work / 1e15:,.1f} PFLOP, or {hours:,.1f} hours of a GPU that sustains {GPU_TFLOPS} TFLOP/s")
