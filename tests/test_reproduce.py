"""`memoro reproduce`: plans, records, measurements on a tiny model, and the tables that are written from records."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from memoro.backbones import Backbone
from memoro.errors import DataError, TrainingError
from memoro.reproduce.compare import Comparison, compare_pair
from memoro.reproduce.counts import count_method, count_methods
from memoro.reproduce.lab import Lab, _known_rates
from memoro.reproduce.measure import Budget, is_flat, keep_classes, train_seeds
from memoro.reproduce.methods import CLASS_FULL, FORKED, FULL, HEAD, LORA, STABLE, Method, memory, memory_full, side
from memoro.reproduce.plan import CPU, MOST_RUNS, PAPER, TABLES, Cell, Request, plan_table, runs_of
from memoro.reproduce.records import Record, Records
from memoro.reproduce.report import write_table
from memoro.reproduce.run import Order, dry_run, format_time, list_missing, run_tables
from memoro.reproduce.setup import make_order
from memoro.training import TrainOptions

COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40))


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Two sets of four classes, told apart by colour."""
    generator = np.random.default_rng(0)
    for name, turn in (("one", 0), ("two", 1)):
        for split, count in (("train", 8), ("test", 3)):
            for number in range(len(COLOURS) * count):
                colour = np.array(COLOURS[(number + turn) % len(COLOURS)])
                pixels = np.clip(colour + generator.integers(-40, 40, (20, 20, 3)), 0, 255).astype(np.uint8)
                place = tmp_path / name / split / str(number % len(COLOURS)) / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(place)
    return tmp_path


@pytest.fixture
def checkpoint(vit: Any, tmp_path: Path) -> Path:
    vit.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def order_of(table: str, shapes: Path, checkpoint: Path, *sets: str, **changes: Any) -> tuple[Order, Lab]:
    data = [str(shapes / name) for name in sets or ("one",)]
    numbers = {"epochs": 1, "steps": 2, "seeds": 2, "batch_size": 16, **changes}
    out = shapes / "out"
    return make_order(table, "cpu", data, [str(checkpoint)], out, command="memoro …", workers=0, changes=numbers)


# ---------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_cells_of_limited_size(table: str) -> None:
    request = Request(CPU, CPU.sets, ("memoro-tiny", "dinov2-small-reg"))
    cells = plan_table(table, request)
    assert cells
    for cell in cells:
        masked = cell.methods and cell.methods[0].composes
        assert all(method.composes == masked for method in cell.methods) or cell.kind == "concat"
        if cell.kind == "accuracy" and masked and len(cell.methods) > 1:
            assert sum(runs_of(method, cell.budget) for method in cell.methods) <= MOST_RUNS
        if cell.kind == "accuracy" and not masked:
            alone = [method.name for method in cell.methods] == ["full"] and cell.sets == ("rsscn7",)
            assert len(cell.methods) == 1
            assert cell.sets[0] in CPU.unmasked_sets
            assert cell.backbone == "memoro-tiny" or alone
    keys = [json.dumps(part.key("", 0)) for cell in cells for part in cell.parts()]
    assert len(set(keys)) == len(keys)


def test_another_set_of_the_same_name_is_another_measurement(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "photos"
        for name, label in files.items():
            (folder / "train" / label).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(folder / "train" / label / name)
        cell = Cell("accuracy", "vit", ("photos",), (HEAD,), Budget())
        lab = Lab({"photos": str(folder)}, {}, TrainOptions())
        return str(cell.key("abc", 20, {"photos": lab.digest("photos")})["images"]["photos"])

    files = {"1.png": "cat", "2.png": "dog", "3.png": "cat"}
    assert digest(files) == digest(files)
    assert len({digest(files), digest({**files, "3.png": "dog"}), digest({**files, "4.png": "dog"})}) == 3


def test_table2_covers_all_sets_and_regimes() -> None:
    cells = plan_table("table2", Request(CPU, CPU.sets, ("memoro-tiny",)))
    measured = {(cell.sets[0], method.name) for cell in cells for method in cell.methods}
    for name in CPU.sets:
        assert {(name, f"memory {cells}") for cells in (1, 5, 10, 20)} < measured
        assert {(name, "head"), (name, "class"), (name, "side 8")} < measured
    for name in CPU.unmasked_sets:
        assert {(name, one) for one in ("full", "class-full", "memory-full 1", "memory-full 20", "lora 8")} < measured
    assert ("cifar100", "full") not in measured  # a set beyond the four


def test_what_is_compared_is_trained_equally_long() -> None:
    request = Request(CPU, CPU.sets, ("memoro-tiny", "dinov2-small-reg"))
    masking = plan_table("masking", request)
    assert all(cell.budget == CPU.unmasked for cell in masking)
    names = {method.name for cell in masking for method in cell.methods}
    assert {"head", "class", "class-full"} < names
    assert {name.replace("-full", "") for name in names} == {"head", "class", "memory 1", "memory 5", "memory 20"}
    heads = [cell for cell in plan_table("table2", request) if HEAD in cell.methods and cell.budget == CPU.unmasked]
    assert [cell.sets[0] for cell in heads] == list(CPU.unmasked_sets)


def test_steps_of_the_user_reach_every_unmasked_cell() -> None:
    request = Request(replace(CPU, unmasked=replace(CPU.unmasked, steps=30)), CPU.sets, ("memoro-tiny", "dinov2"))
    full = [cell for cell in plan_table("table2", request) if FULL in cell.methods]
    assert {(cell.backbone, cell.budget.steps) for cell in full} == {("memoro-tiny", 30), ("dinov2", 20)}
    [larger] = [
        cell
        for cell in plan_table("table2", Request(CPU, CPU.sets, ("memoro-tiny", "dinov2")))
        if FULL in cell.methods and cell.backbone == "dinov2"
    ]
    assert larger.budget.steps == 100
    shortest = replace(request, scale=replace(CPU, unmasked=replace(CPU.unmasked, steps=1)))
    assert all(cell.budget.steps == 1 for cell in plan_table("table2", shortest) if FULL in cell.methods)


def test_forks_are_planned_for_several_cells_and_counted() -> None:
    cells = plan_table("fork", Request(CPU, CPU.sets, ("memoro-tiny",)))
    assert [cell.kind for cell in cells].count("counts") == 1
    names = [method.name for method in FORKED]
    for count in (1, 5, 20):
        assert {f"memory {count}", *(f"memory {count}, fork {fork}" for fork in ("0.33", "0.50", "0.67", "0.83"))} < {
            *names
        }


def test_paper_scale_is_the_same_plan_with_other_numbers() -> None:
    cells = plan_table("table2", Request(PAPER, PAPER.sets, PAPER.backbones))
    assert {cell.sets[0] for cell in cells} == {"sun397", "inaturalist2017", "cifar100", "places365"}
    for cell in cells:
        assert (cell.budget.steps, cell.budget.batch_size, cell.budget.most, cell.budget.views) == (
            20_000,
            512,
            None,
            None,
        )
        assert cell.budget.augment.crop == ("pad" if cell.sets == ("cifar100",) else None)
    assert {method.name for cell in cells for method in cell.methods} >= {
        "full",
        "memory-full 10",
        "memory 20",
        "side 8",
    }
    first, *_ = plan_table("naive-concat", Request(PAPER, PAPER.sets, PAPER.backbones))
    assert first.sets == ("inaturalist2017", "places365", "cifar100", "sun397")


def test_dry_run_of_the_paper_scale(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMORO_DATA", raising=False)
    order, lab = make_order("all", "paper", [], [str(checkpoint)], None, command="memoro …")
    told: list[str] = []
    dry_run(order, lab, told.append)
    text = "\n".join(told)
    assert "data: inaturalist2017: 579,184 training images, 95,986 to test (MISSING" in text
    assert re.search(r"backbone: vit \(.*5 layers of 24\), fingerprint [0-9a-f]{12} \(found\)", text)
    for table in TABLES:
        assert f"{table}: " in text
    assert "masking: 0 jobs that no other table or record has, 0 optimiser steps" in text
    assert "PFLOP" in text
    memory = {line.split(": ")[0]: line.split("about ")[1] for line in told if line.startswith("memory of one run")}
    assert set(memory) == {f"memory of one run, {name}" for name in ("full", "memory-full 5", "memory 5")}
    assert not (tmp_path / "results").exists()


def test_cpu_scale_asks_for_data() -> None:
    with pytest.raises(DataError, match="needs sets of images: --data"):
        make_order("table2", "cpu", [], [], None, command="")


def test_times_are_readable() -> None:
    assert [format_time(one) for one in (5, 300, 9000, 900_000)] == ["5 s", "5 min", "2.5 h", "10 days"]


# ------------------------------------------------------------------------------------------------- running and resuming


def test_recorded_cells_are_not_run_again(shapes: Path, checkpoint: Path) -> None:
    order, lab = order_of("models", shapes, checkpoint)
    told: list[str] = []
    records = run_tables(order, lab, told.append)
    assert told[0].startswith("1 job, 0 of them done. The others: about ")
    methods = ["head", "class", "memory 5", "side 8"]
    assert sorted(record.method for record in records.entries) == sorted(methods)
    for record in records.entries:
        assert len(record.result["test"]) == 2
        assert record.result["train_images"], record.result["test_images"] == (32, 12)
        assert set(record.result["scores"]) == {f"{rate:g}" for rate in record.key["methods"][0]["rates"]}
    file = shapes / "out" / "models.jsonl"
    before = file.read_bytes()
    order, lab = order_of("models", shapes, checkpoint)
    again: list[str] = []
    run_tables(order, lab, again.append)
    assert again[0] == "1 job, 1 of them done. The others: about 0 s."
    assert file.read_bytes() == before

    lines = before.decode().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:50])  # a crash while the last one was written
    run_tables(order, lab, again.append)
    assert next(line for line in again if line.startswith("[")).startswith("[1 of 1] models: one, vit: ")
    after = file.read_text().splitlines(keepends=True)
    assert after[:-1] == lines[:-1]
    assert json.loads(after[-1])["key"] == json.loads(lines[-1])["key"]

    text = (shapes / "out" / "models.md").read_text()
    assert "| vit, 20 px | one | 32 / 12 |" in text
    assert "memoro …" in text
    assert str(shapes) not in text
    other = Cell("accuracy", "vit", ("one",), (memory(5),), Budget()).key("other weights", 20)
    assert records.find(other) is None  # new weights are measured anew


def test_another_table_uses_what_is_recorded(shapes: Path, checkpoint: Path) -> None:
    run_tables(*order_of("models", shapes, checkpoint), lambda text: None)
    order, lab = order_of("table2", shapes, checkpoint)
    left = list_missing(order, lab, Records.read(order.out))
    names = {(method.name, cell.budget.steps) for _, cell in left for method in cell.methods}
    assert names.isdisjoint((name, None) for name in ("head", "class", "memory 5", "side 8"))
    assert {("memory 1", None), ("memory 20", None), ("full", 2), ("head", 2)} <= names
    twice = list_missing(replace(order, tables=("table2", "masking")), lab, Records.read(order.out))
    [cell] = [cell for table, cell in twice if table == "masking"]
    assert [method.name for method in cell.methods] == ["class", "memory 1", "memory 5", "memory 20"]  # with few steps


def test_naive_concatenation_and_masks(shapes: Path, checkpoint: Path) -> None:
    order, lab = order_of("naive-concat", shapes, checkpoint, "one", "two", seeds=1)
    records = run_tables(order, lab, lambda text: None)
    [record] = records.entries
    assert set(record.result["rates"]) == {"one", "two"}
    for name, found in record.result["sets"].items():
        assert found["order"][0] == name
        assert len(found["naive"]) == len(found["masked"]) == 2
        assert found["masked"][0] == found["masked"][1]
        assert found["largest_change"] < 1e-4  # float32, two batch layouts
    text = (shapes / "out" / "naive-concat.md").read_text()
    assert "| vit, 20 px | one | 2 steps, batch size 16, seeds 1 | naive |" in text
    assert "28.1" in text


def test_concatenation_trains_each_set_with_its_own_augmentation(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shapes / "two").rename(shapes / "cifar100")
    order, lab = order_of("naive-concat", shapes, checkpoint, "one", "cifar100", seeds=1)
    crops: set[tuple[str, str | None]] = set()

    def watch(bench: Any, splits: Any, rates: Any, budget: Budget, **more: Any) -> Any:
        crops.add((splits.name, budget.augment.crop))
        return train_seeds(bench, splits, rates, budget, **more)

    monkeypatch.setattr("memoro.reproduce.concat.train_seeds", watch)
    [(_, cell)] = order.cells()
    lab.options = replace(lab.options, cache=False)
    lab.run(replace(cell, budget=replace(cell.budget, views=None)), Records(shapes))
    assert crops == {("one", None), ("cifar100", "pad")}


def test_rates_that_table2_chose_are_used_for_a_set_with_its_own_augmentation(tmp_path: Path) -> None:
    budget = plan_table("naive-concat", Request(PAPER, PAPER.sets, PAPER.backbones))[0].budget
    method = PAPER.adjust(memory(5))
    key = Cell("concat", "vit", PAPER.sets, (method,), budget).key("abc", 20)
    chosen = record_of(method, [[1]], set_name="cifar100", budget=budget.on_set("cifar100"), lr=0.3)
    assert chosen.key["budget"] != key["budget"]
    assert _known_rates(key, Records(tmp_path, [chosen])) == {"cifar100": {"memory 5": 0.3}}
    longer = record_of(method, [[1]], set_name="cifar100", budget=replace(budget, steps=1), lr=0.3)
    assert _known_rates(key, Records(tmp_path, [longer])) == {}


def test_a_failing_job_does_not_stop_the_others(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, lab = order_of("table2", shapes, checkpoint, "one", "two")
    run = Lab.run

    def fail(self: Lab, cell: Cell, records: Records) -> Any:
        if not cell.methods[0].composes:
            if cell.sets == ("one",):
                raise TrainingError("it diverged")
            return {method.name: record_of(method.name, [[1, 0]] * 3).result for method in cell.methods}
        return run(self, cell, records)

    monkeypatch.setattr(Lab, "run", fail)
    told: list[str] = []
    with pytest.raises(TrainingError, match=r"^6 of \d+ jobs failed; the same command tries them again"):
        run_tables(order, lab, told.append)
    assert "    failed: it diverged" in told
    found = {(record.key["sets"][0], record.method) for record in Records.read(order.out).entries}
    assert ("two", "lora 8") in found
    assert ("one", "lora 8") not in found
    assert (order.out / "table2.md").exists()


def test_all_leaves_out_a_table_that_cannot_be_planned(shapes: Path, checkpoint: Path) -> None:
    order, lab = order_of("all", shapes, checkpoint, "one")
    told: list[str] = []
    dry_run(order, lab, told.append)
    assert "naive-concat: skipped (naive-concat needs two sets or more: repeat --data.)" in told
    assert any(line.startswith("extension: ") for line in told)
    with pytest.raises(DataError, match="needs two sets"):
        dry_run(replace(order, tables=("naive-concat",)), lab, told.append)


def test_checkpoints_of_different_methods_have_different_folders(shapes: Path, checkpoint: Path) -> None:
    """At the paper's scale, jobs continue from checkpoints: one folder for two methods could not be resumed."""
    _, lab = order_of("table2", shapes, checkpoint)
    bench = lab.bench("vit")
    folder = shapes / "runs"
    bench = replace(bench, options=replace(bench.options, folder=folder))
    budget = Budget(steps=2, batch_size=16, seeds=1)
    splits = lab.splits("one", budget)
    for count, method in enumerate([memory_full(1), memory_full(5), memory(1), replace(memory(1), fork=0.5)], start=1):
        method = replace(method, name="same")
        first = train_seeds(bench, splits, [(method, 0.01)], budget)["same"][0]
        again = train_seeds(bench, splits, [(method, 0.01)], budget)["same"][0]  # the same one continues
        assert len(list(folder.iterdir())) == count
        assert torch.equal(first.logits, again.logits)


def test_extension_measures_children_alone_and_with_parents(
    shapes: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memoro.reproduce.extension.SIZES", (12,))
    order, lab = order_of("extension", shapes, checkpoint, "one", "two", seeds=1)
    cells = [cell for _, cell in order.cells() if cell.sets[0] == "one"]
    results = [lab.run(cell, Records(shapes))[""] for cell in cells]
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
    monkeypatch.setattr("memoro.reproduce.extension.SIZES", (4, 5, 12))
    for split in ("train", "test"):  # eight classes
        for label in range(4):
            (shapes / "two" / split / str(label)).rename(shapes / "one" / split / str(4 + label))
    order, lab = order_of("extension", shapes, checkpoint, "one", seeds=1)
    told: list[str] = []
    records = run_tables(order, lab, told.append)
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


# -------------------------------------------------------------------------------------------------------- table writing


METHODS = {
    one.name: one for one in (FULL, CLASS_FULL, LORA, *FORKED, memory(10), side(), *map(memory_full, (1, 5, 10, 20)))
}


def record_of(
    method: Method | str,
    correct: list[list[int]],
    *,
    set_name: str = "rsscn7",
    budget: Budget = CPU.masked,
    **result: Any,
) -> Record:
    cell = Cell("accuracy", "vit", (set_name,), (METHODS[method] if isinstance(method, str) else method,), budget)
    bits = [np.packbits(np.array(row, dtype=bool)) for row in correct]
    found = {
        "lr": 0.1, "scores": {"0.1": [0.5]}, "curve": [(5, 0.5), (10, 0.5)], "train_images": 30, "classes": 2,
        "test_images": len(correct[0]), "test": [float(np.mean(row)) for row in correct], "diverged": 0,
        "correct": [row.tobytes().hex() for row in bits], "parameters": 7, "head": 3, **result,
    }  # fmt: skip
    return Record.now("table2", cell.key("abc", 20), found, 60.0, 2, "memoro reproduce table2")


def test_table2_is_written_from_records(tmp_path: Path) -> None:
    right, wrong = [1] * 40, [1] * 10 + [0] * 30
    records = Records(tmp_path)
    records.add([
        record_of("head", [right, right, right]),
        record_of("class", [wrong, wrong, wrong]),
        record_of("memory 5", [right, right, wrong], curve=[(5, 0.1), (10, 0.5)]),
    ])  # fmt: skip
    text = write_table("table2", Records.read(tmp_path), "cpu", tmp_path).read_text()
    shown = "30 / 40 | 10 epochs (10 steps) | 1.000 ± 0.000 | 0.250 ± 0.000 | 0.750 ± 0.433† |"
    assert f"| vit, 20 px | rsscn7 | {shown}" in text
    assert "| vit, 20 px | rsscn7 | 10 epochs | class > head | -0.750 ± 0.142 | 3 | fails |" in text
    assert re.search(r"10 epochs \| memory 5† > class \| \+0.500 ± 1.\d+ \| 3 \| inconclusive \|", text)
    assert "as above. inconclusive: 1, fails: 1." in text
    assert "3 measurements in 2 minutes" in text
    assert "at most 2000 training images" in text
    rows = (tmp_path / "table2.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("backbone,weights,image_size,set,method,")
    assert (tmp_path / "table2.png").stat().st_size > 5_000


@pytest.mark.parametrize("table", TABLES)
def test_a_table_without_records_says_so(table: str, tmp_path: Path) -> None:
    assert "Nothing is recorded yet." in write_table(table, Records(tmp_path), "cpu", tmp_path).read_text()


def test_only_the_newest_weights_are_shown(tmp_path: Path) -> None:
    old, new = record_of("head", [[1, 1]]), record_of("head", [[1, 0]], set_name="dtd10")
    records = Records(tmp_path, [replace(old, key={**old.key, "fingerprint": "old"}), new])
    assert [record.key["sets"] for record in records.current("accuracy")] == [["dtd10"]]


def test_comparisons_are_paired() -> None:
    """Two methods that differ on the same images in every run differ by more than their accuracies alone would tell."""
    generator = np.random.default_rng(0)
    base = generator.random((3, 200)) < 0.6
    better = base | (np.arange(200) % 20 == 0)
    results = {
        name: {"test_images": 200, "correct": [np.packbits(row).tobytes().hex() for row in rows]}
        for name, rows in (("better", better), ("base", base))
    }
    found = compare_pair(("better", results["better"]), ("base", results["base"]))
    assert found is not None
    assert found.difference == pytest.approx(better.mean() - base.mean())
    assert found.judge() == "holds"
    same = compare_pair(("base", results["base"]), ("base", results["base"]))
    assert same is not None
    assert (same.difference, same.error, same.judge()) == (0.0, 0.0, "inconclusive")


def test_a_diverged_run_is_all_wrong() -> None:
    right = np.packbits(np.ones(16, dtype=bool)).tobytes().hex()
    stable, diverged = ({"test_images": 16, "correct": runs} for runs in ([right] * 3, [right, right, ""]))
    found = compare_pair(("stable", stable), ("diverged", diverged))
    assert found is not None
    assert (found.seeds, found.difference) == (3, pytest.approx(1 / 3))


def test_verdicts_need_three_seeds_and_know_how_few_they_are() -> None:
    # Differences of three seeds: 0.06, 0.02, 0.10. More than two standard errors, but two degrees of freedom.
    differ = Comparison("a", "b", 0.06, 0.0231, 3, 2.1)
    assert differ.margin == pytest.approx(4.303 * 0.0231)
    assert (differ.judge(), differ.judge(equal=True)) == ("inconclusive", "not refuted")
    assert replace(differ, freedom=500.0).judge() == replace(differ, freedom=500.0).judge(equal=True) == "holds"
    assert replace(differ, difference=-0.06, freedom=500.0).judge(equal=True) == "fails"
    two = replace(differ, seeds=2, freedom=500.0)
    assert (two.judge(), str(two)) == ("too few seeds", "+0.060")


def test_degrees_of_freedom_follow_what_dominates() -> None:
    generator = np.random.default_rng(0)
    images = 1000
    base = np.zeros((3, images), dtype=bool)
    steady = np.stack([generator.random(images) < 0.3] * 3)
    seeds = np.stack([generator.random(images) < rate for rate in (0.05, 0.3, 0.6)])

    def against_base(rows: Any) -> Comparison:
        one, two = (
            {"test_images": images, "correct": [np.packbits(row).tobytes().hex() for row in some]}
            for some in (rows, base)
        )
        found = compare_pair(("one", one), ("base", two))
        assert found is not None
        return found

    assert against_base(steady).freedom == pytest.approx(images - 1)
    assert 2 <= against_base(seeds).freedom < 3
    assert (against_base(steady).judge(), against_base(seeds).judge()) == ("holds", "inconclusive")


def test_only_runs_of_the_same_setting_are_compared(tmp_path: Path) -> None:
    right, wrong = [1] * 40, [1] * 10 + [0] * 30
    short, old = CPU.unmasked, replace(memory(5), rates=(0.03, 0.1), recipe={})
    records = Records(tmp_path, [
        record_of("head", [wrong] * 3),
        record_of("class", [right] * 3),
        record_of("head", [right] * 3, budget=short),
        record_of("full", [right] * 3, budget=short),
        record_of("memory-full 5", [right] * 3, budget=replace(short, folds=2)),
        record_of("class-full", [wrong] * 3, budget=replace(short, seeds=5)),
        record_of("memory 5", [right] * 3, budget=short),
        record_of("class", [wrong] * 3, budget=short),
        record_of(old, [wrong] * 3),
    ])  # fmt: skip
    text = write_table("table2", records, "cpu", tmp_path).read_text()
    claims = re.findall(r"\| ([^|]+) \| ([^|]+ [>≥] [^|]+) \|", text)
    assert claims == [("10 epochs", "class > head"), ("150 steps", "full ≥ memory-full 5")]  # no other pair is alike
    assert "full ≥ memory-full 5 | +0.000 ± 0.000 | 3 | not refuted |" in text
    assert "not refuted: 1" in text
    assert "| 10 epochs (10 steps) | – | 0.250 ± 0.000 | – | – | 1.000 ± 0.000 | – |" in text  # no old memory 5
    masking = write_table("masking", records, "cpu", tmp_path).read_text()
    assert "10 epochs" not in masking
    assert "| 150 steps | memory-full 5 − memory 5 | +0.000 ± 0.000 | 3 |" in masking


def test_concatenations_of_different_sets_are_not_averaged(tmp_path: Path) -> None:
    methods = (memory_full(5), memory(5))

    def record(sets: tuple[str, ...], accuracy: float, number: int) -> Record:
        found = {
            name: {"order": [name, *(one for one in sets if one != name)], "naive": [accuracy] * len(sets),
                   "masked": [accuracy] * len(sets), "largest_change": 0.0}
            for name in sets
        }  # fmt: skip
        cell = Cell("concat", "vit", sets, methods, CPU.unmasked, number)
        return Record.now("naive-concat", cell.key("abc", 20), {"sets": found}, 1.0, 1)

    records = Records(
        tmp_path, [record(("a", "b"), 0.9, 0), record(("a", "b"), 0.7, 1), record(("a", "b", "c"), 0.5, 0)]
    )
    lines = write_table("naive-concat", records, "cpu", tmp_path).read_text().splitlines()
    assert "| vit, 20 px | a | 150 steps | naive | 0.800 ± 0.141 | 0.800 ± 0.141 |  | 2 |" in lines
    assert "| vit, 20 px | a | 150 steps | naive | 0.500 | 0.500 | 0.500 | 1 |" in lines


def test_extensions_of_different_settings_are_told_apart(tmp_path: Path) -> None:
    def record(other: str, epochs: int, accuracy: float) -> Record:
        case = {"test": [accuracy] * 3, "correct": ["ff"] * 3}
        result = {"sizes": {"40": {"memory 5, alone": case, "memory 5, another set": case}}, "test_images": 8}
        cell = Cell("extension", "vit", ("a", other), (memory(5), side()), replace(CPU.masked, epochs=epochs), 0)
        return Record.now("extension", cell.key("abc", 20), result, 1.0, 1)

    records = Records(tmp_path, [record("b", 10, 0.5), record("c", 10, 0.6), record("b", 2, 0.7)])
    text = write_table("extension", records, "cpu", tmp_path).read_text()
    for training, other, accuracy in (("10 epochs", "b", 0.5), ("10 epochs", "c", 0.6), ("2 epochs", "b", 0.7)):
        assert f"| a | {training} | classes | 40 | memory 5 | another set ({other}) | {accuracy:.3f} ± 0.000 |" in text


def test_forks_are_shown_with_their_cost(tmp_path: Path) -> None:
    counts = {"rows": [{"name": method.name, "parameters": 7, "head": 3, "flops": 2_500_000} for method in FORKED]}
    key = Cell("counts", "vit", (), FORKED, Budget()).key("abc", 20)
    records = Records(tmp_path, [
        Record.now("fork", key, counts, 1.0, 1),
        *(record_of(name, [[1, 0]] * 3) for name in ("head", "memory 5", "memory 20, fork 0.50")),
        record_of("memory 5", [[1, 0]] * 3, budget=CPU.unmasked),
    ])  # fmt: skip
    text = write_table("fork", records, "cpu", tmp_path).read_text()
    assert "| vit, 20 px | 10 epochs | memory 20 | 0.50 | 7 | 2.5 | 0.500 ± 0.000 |" in text
    assert "| vit, 20 px | 10 epochs | head | 1.00 | 7 | 2.5 | 0.500 ± 0.000 |" in text
    assert "150 steps" not in text
    assert "150 steps" not in write_table("models", records, "cpu", tmp_path).read_text()
    assert (tmp_path / "fork-2.png").exists()
    assert "mflop" in (tmp_path / "fork.csv").read_text().splitlines()[0]
    assert "Nothing is recorded yet." in write_table("table5", records, "cpu", tmp_path).read_text()


def test_a_single_seed_has_no_spread(tmp_path: Path) -> None:
    scores = {f"{rate:g}": [0.5] for rate in STABLE[0].rates}
    budget = replace(CPU.unmasked, seeds=0)
    records = Records(tmp_path, [record_of(STABLE[0], [[1]], budget=budget, scores=scores, test=[])])
    text = write_table("lr-stability", records, "cpu", tmp_path).read_text()
    assert "| vit, 20 px | rsscn7 | 150 steps | head | 1 | 0.1 | 0.500 | 0.500 | 0.500 | 0.500 | 0.500 |" in text
    assert "have one seed" in text


# -------------------------------------------------------------------------------------------------------------- table 5


def test_counts_follow_the_formulas(backbone: Backbone) -> None:
    """Parameters and FLOPs of the small ViT: 26 tokens of 24 in 5 layers, an MLP of 40."""
    dim, depth, tokens, cells, mlp = 24, 5, 26, 5, 40
    pixels = torch.zeros(1, 3, 20, 20)
    own = count_method(backbone, "memory", "memory-full", {"cells": cells}, pixels)
    keys, attention = 2 * cells * dim * 2 * dim, 2 * 2 * tokens * cells * dim
    assert (own.parameters, own.flops) == (dim + depth * cells * dim, depth * (keys + attention))
    assert count_method(backbone, "class", "class-full", {}, pixels).flops == 0
    adapter = count_method(backbone, "adapter", "adapter", {"width": 5}, pixels)
    assert adapter.parameters == depth * 2 * 2 * dim * 5
    assert adapter.flops == 2 * tokens * adapter.parameters
    token = count_method(backbone, "token", "memory", {"cells": 0}, pixels)
    # One more token; its score with itself is a sum of products, not a matrix product.
    layer = 2 * (4 * dim * dim + 2 * dim * mlp) + 2 * 2 * tokens * dim
    assert (token.parameters, token.flops) == (dim, depth * layer)
    head, early, late = count_methods(backbone, [HEAD, METHODS["memory 5"], METHODS["memory 5, fork 0.50"]], (20, 20))
    assert (head["parameters"], head["flops"]) == (0, 0)
    assert early["parameters"] == dim + depth * cells * dim
    assert late["parameters"] == dim + 3 * cells * dim  # it leaves at layer 2 of 5
    assert early["flops"] > late["flops"] > 0
    full = count_method(backbone, "full", "full", {}, pixels)
    assert full.parameters == sum(tensor.numel() for tensor in backbone.anatomy.tensors.values())
    assert full.flops > depth * tokens * 2 * (4 * dim * dim + 2 * dim * mlp)
