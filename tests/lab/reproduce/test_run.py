"""`memoro lab reproduce`: measurements on a tiny model, and what is not measured again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reproducing import checkpoint, record_of, request_of, shapes

from memoro.errors import DataError, TrainingError
from memoro.lab.cli.reproduce import _without_folder
from memoro.lab.reproduce.measure import Budget, is_flat, keep_classes, train_seeds
from memoro.lab.reproduce.methods import METHODS
from memoro.lab.reproduce.plan import Job, group_jobs
from memoro.lab.reproduce.records import Records
from memoro.lab.reproduce.run import list_missing, missing_parts, run_tables, write_reports
from memoro.lab.reproduce.runner import Runner, find_sets
from memoro.training.loop import Trainer

__all__ = ["checkpoint", "shapes"]  # fixtures


def test_recorded_cells_are_not_run_again(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("models", shapes, checkpoint)
    told: list[str] = []
    records = run_tables(request, runner, told.append)
    assert told[0].startswith("1 job to run, about ")
    methods = ["head", "class", "memory 5", "side 8"]
    assert sorted(record.method for record in records.entries) == sorted(methods)
    for record in records.entries:
        assert len(record.result["test"]) == 2
        assert (record.result["train_images"], record.result["test_images"]) == (32, 12)
        assert set(record.result["scores"]) == {f"{rate:g}" for rate in record.key["methods"][0]["rates"]}
    file = shapes / "out" / "models.jsonl"
    before = file.read_bytes()
    request, runner = request_of("models", shapes, checkpoint)
    again: list[str] = []
    run_tables(request, runner, again.append)
    assert again[0] == "0 jobs to run (1 of 1 are done), about 0 s."
    assert file.read_bytes() == before

    lines = before.decode().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:50])  # a crash while the last one was written
    run_tables(request, runner, again.append)
    assert next(line for line in again if line.startswith("[")).startswith("[1 of 1] models: one, vit: ")
    after = file.read_text().splitlines(keepends=True)
    assert after[:-1] == lines[:-1]
    assert json.loads(after[-1])["key"] == json.loads(lines[-1])["key"]

    text = (shapes / "out" / "models.md").read_text()
    assert "| vit, 20 px | one | 32 / 12 |" in text
    assert "memoro …" in text
    assert str(shapes) not in text
    other = Job("accuracy", "vit", ("one",), (METHODS["memory 5"],), Budget()).key("other weights", 20)
    assert records.find(other) is None  # new weights are measured anew


def test_another_table_uses_what_is_recorded(shapes: Path, checkpoint: Path) -> None:
    run_tables(*request_of("models", shapes, checkpoint), lambda text: None)
    request, runner = request_of("table2", shapes, checkpoint)
    left = list_missing(request, runner, Records.read(request.out))
    names = {(method.name, job.budget.steps) for _, job in left for method in job.methods}
    assert names.isdisjoint((name, None) for name in ("head", "class", "memory 5", "side 8"))
    assert {("memory 1", None), ("memory 20", None), ("full", 2), ("head", 2)} <= names
    twice = list_missing(replace(request, tables=("table2", "masking")), runner, Records.read(request.out))
    [job] = [job for table, job in twice if table == "masking"]
    assert [method.name for method in job.methods] == ["class", "memory 1", "memory 5", "memory 20"]  # with few steps


def test_two_commands_share_a_folder(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("models", shapes, checkpoint, "one", "two", seeds=1)
    first, second = (job for _, job in group_jobs(request.jobs()))
    told: list[str] = []
    with runner.lock(first):
        run_tables(*request_of("models", shapes, checkpoint, "one", "two", seeds=1), told.append)
    assert "    skipped: another process is running it" in told
    assert told[-1] == "Other processes are running 1 job of these."
    found = Records.read(request.out)
    assert not missing_parts(second, runner, found)
    assert len(missing_parts(first, runner, found)) == len(first.methods)

    def meanwhile(text: str) -> None:
        told.append(text)
        if text.startswith("[1 of 1]"):
            run_tables(*request_of("models", shapes, checkpoint, "one", "two", seeds=1), lambda text: None)

    run_tables(request, runner, meanwhile)
    assert "    skipped: another process has recorded it" in told
    entries = Records.read(request.out).entries
    assert len(entries) == len(first.methods) + len(second.methods)  # nothing was measured twice
    assert not (request.out / "runs").exists()


def test_naive_concatenation_and_masks(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("naive-concat", shapes, checkpoint, "one", "two", seeds=1)
    records = run_tables(request, runner, lambda text: None)
    [record] = records.entries
    assert set(record.result["rates"]) == {"one", "two"}
    for name, found in record.result["sets"].items():
        assert found["order"][0] == name
        assert len(found["naive"]["test"]) == len(found["masked"]["correct"]) == 2
        assert found["masked"]["correct"][0] == found["masked"]["correct"][1]
        assert found["largest_change"] < 1e-4  # float32, two batch layouts
    text = (shapes / "out" / "naive-concat.md").read_text()
    assert "| vit, 20 px | one | 2 steps, batch size 16, seeds 1 | naive |" in text
    assert "28.1" in text


def test_concatenation_trains_each_set_with_its_own_augmentation(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shapes / "two").rename(shapes / "cifar100")
    request, runner = request_of("naive-concat", shapes, checkpoint, "one", "cifar100", seeds=1)
    crops: set[tuple[str, str | None]] = set()

    def watch(bench: Any, splits: Any, rates: Any, methods: Any, budget: Budget, **more: Any) -> Any:
        crops.add((splits.name, budget.augment.crop))
        return train_seeds(bench, splits, rates, methods, budget, **more)

    monkeypatch.setattr("memoro.lab.reproduce.several.train_seeds", watch)
    [(_, job)] = request.jobs()
    runner.options = replace(runner.options, cache=False)
    runner.run(replace(job, budget=replace(job.budget, views=None)), Records(shapes))
    assert crops == {("one", None), ("cifar100", "pad")}


def test_a_failing_job_does_not_stop_the_others(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, runner = request_of("table2", shapes, checkpoint, "one", "two")
    run = Runner.run

    def fail(self: Runner, job: Job, records: Records) -> Any:
        if not job.methods[0].composes:
            if job.sets == ("one",):
                raise TrainingError("it diverged")
            return {method.name: record_of(method.name, [[1, 0]] * 3).result for method in job.methods}
        return run(self, job, records)

    monkeypatch.setattr(Runner, "run", fail)
    told: list[str] = []
    with pytest.raises(TrainingError, match=r"^6 of \d+ jobs failed; the same command tries them again"):
        run_tables(request, runner, told.append)
    assert "    failed: it diverged" in told
    found = {(record.key["sets"][0], record.method) for record in Records.read(request.out).entries}
    assert ("two", "memory-full 20") in found
    assert ("one", "memory-full 20") not in found
    assert (request.out / "table2.md").exists()


def test_checkpoints_of_different_methods_have_different_folders(shapes: Path, checkpoint: Path) -> None:
    """At the paper's scale, jobs continue from checkpoints: one folder for two methods could not be resumed."""
    _, runner = request_of("table2", shapes, checkpoint)
    bench = runner.bench("vit")
    folder = shapes / "runs"
    bench = replace(bench, options=replace(bench.options, folder=folder))
    budget = Budget(steps=2, batch_size=16, seeds=1)
    splits = runner.splits("one", budget)
    for count, name in enumerate(["memory-full 1", "memory-full 5", "memory 1", "memory 1, fork 0.50"], start=1):
        method = replace(METHODS[name], name="same")
        first = train_seeds(bench, splits, {"same": 0.01}, [method], budget)["same"][0]
        again = train_seeds(bench, splits, {"same": 0.01}, [method], budget)["same"][0]  # the same one continues
        assert len(list(folder.iterdir())) == count
        assert torch.equal(first.logits, again.logits)


def test_a_job_that_was_cut_off_continues(shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, runner = request_of("table2", shapes, checkpoint)
    request = replace(request, methods=frozenset({"class-full"}))
    steps: list[int] = []
    step = Trainer.step

    def count(trainer: Trainer, taken: Any) -> None:
        steps.append(len(trainer.runs))
        if len(steps) == 3:  # two steps compared the rates; this is the first one of the seeds
            raise KeyboardInterrupt
        step(trainer, taken)

    monkeypatch.setattr(Trainer, "step", count)
    with pytest.raises(KeyboardInterrupt):
        run_tables(request, runner, lambda text: None)
    assert any((request.out / "runs").iterdir())
    run_tables(request, runner, lambda text: None)
    assert len(steps) == 3 + 2  # the rates were not compared again
    assert not (request.out / "runs").exists()


def test_the_seeds_of_an_ensemble_are_averaged(shapes: Path, checkpoint: Path) -> None:
    _, runner = request_of("table2", shapes, checkpoint)
    bench, budget = runner.bench("vit"), Budget(steps=2, batch_size=16, seeds=2)
    splits, method = runner.splits("one", budget), METHODS["side 2, fork 0.00"]
    rates = {method.name: 0.01}
    found = train_seeds(bench, splits, rates, [replace(method, ensemble=2)], budget)[method.name]
    alone = train_seeds(bench, splits, rates, [method], budget, seeds=range(4))[method.name]
    for seed in range(2):
        pair = torch.stack([one.logits for one in alone[2 * seed : 2 * seed + 2]])
        assert torch.allclose(found[seed].logits, pair.mean(dim=0), atol=1e-5)
        assert not torch.allclose(pair[0], pair[1], atol=1e-4)


def test_extension_measures_children_alone_and_with_parents(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.lab.reproduce.several.SIZES", (12,))
    request, runner = request_of("extension", shapes, checkpoint, "one", "two", seeds=1)
    jobs = [job for _, job in request.jobs() if job.sets[0] == "one"]
    results = [runner.run(job, Records(shapes))[""] for job in jobs]
    assert list(results[0]["sizes"]["12"]) == [
        f"{method}, {parent}"
        for method, parent in [
            ("memory 5", "alone"), ("side 8", "alone"), ("memory 5", "sibling classes"), ("side 8", "sibling classes"),
            ("memory 5", "another set"), ("side 8", "another set"),
        ]
    ]  # fmt: skip
    assert set(results[1]["sizes"]["12"]) == {
        f"{method}, {parent}" for method in ("memory 5", "side 8") for parent in ("alone", "its classes")
    }
    assert results[0]["classes"] == results[1]["classes"] == 2
    alone, extended = (results[1]["sizes"]["12"][f"memory 5, {parent}"] for parent in ("alone", "its classes"))
    assert alone["curve"] != extended["curve"] or alone["scores"] != extended["scores"]


def test_extension_skips_sizes_with_one_image_of_each_class(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.lab.reproduce.several.SIZES", (4, 5, 12))
    for split in ("train", "test"):  # eight classes
        for label in range(4):
            (shapes / "two" / split / str(label)).rename(shapes / "one" / split / str(4 + label))
    request, runner = request_of("extension", shapes, checkpoint, "one", seeds=1)
    told: list[str] = []
    records = run_tables(request, runner, told.append)
    [classes] = [record.result for record in records.entries if record.key["number"] == 0]
    assert list(classes["sizes"]) == ["5", "12"], "two of the folds of five images are empty"
    assert told.count("    4 training images were skipped: 4 classes, none of them with two.") == 1


def test_classes_are_grouped(shapes: Path) -> None:
    from memoro.data import load_data

    splits = keep_classes(load_data(shapes / "one", val_fraction=0, quiet=True), {"even": [0, 2], "odd": [1]})
    assert splits.labels == splits.train.labels == ("even", "odd")
    assert splits.train.targets.bincount().tolist() == [16, 8]
    assert len(splits.test) == 9


def test_a_curve_is_flat_if_its_last_third_gains_nothing() -> None:
    rising = [(step, step / 100) for step in range(10, 100, 10)]
    assert not is_flat(rising)
    assert is_flat([*rising[:3], *((step, 0.3) for step in range(40, 100, 10))])
    assert not is_flat([(10, 0.9)])  # nothing to compare with
    # Ten epochs of nine steps: 70 % of them are exactly seven epochs.
    assert is_flat([(9 * epoch, 0.5 if epoch < 7 else 0.6) for epoch in range(1, 11)])


def test_a_missing_test_split_is_told_before_anything_is_trained(shapes: Path, checkpoint: Path) -> None:
    shutil.rmtree(shapes / "two" / "test")
    told: list[str] = []
    with pytest.raises(DataError, match=r"^two has no test split: add a test/ folder beside train/"):
        run_tables(*request_of("models", shapes, checkpoint, "one", "two"), told.append)
    assert not told


def test_extension_needs_images(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("extension", shapes, checkpoint, "one", seeds=1)
    told: list[str] = []
    with pytest.raises(TrainingError, match="2 of 2 jobs failed"):
        run_tables(request, runner, told.append)
    assert "    failed: one: the child has 16 training images; extension needs 40 or more." in told


def test_a_folder_of_datasets_stands_for_all_of_them(shapes: Path) -> None:
    (shapes / "empty").mkdir()
    assert find_sets([str(shapes)]) == {name: str(shapes / name) for name in ("one", "two")}
    assert find_sets([str(shapes / "one")]) == {"one": str(shapes / "one")}


def test_reports_need_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no records"):
        write_reports(["table2"], "cpu", tmp_path / "typo", print)
    assert not (tmp_path / "typo").exists()


def test_commands_are_recorded_without_folders() -> None:
    assert [_without_folder(word) for word in ("--out=/home/a/b", "/home/a/c.zip", "--out=b", "d/c.zip")] == [
        "--out=b", "c.zip", "--out=b", "d/c.zip",
    ]  # fmt: skip
