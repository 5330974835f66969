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
from memoro.errors import DataError
from memoro.reproduce.compare import compare_pair
from memoro.reproduce.counts import count_method
from memoro.reproduce.lab import Lab
from memoro.reproduce.measure import Budget, is_flat, keep_classes
from memoro.reproduce.methods import memory
from memoro.reproduce.plan import CPU, MOST_RUNS, PAPER, TABLES, Cell, Request, plan_table, runs_of
from memoro.reproduce.records import Record, Records
from memoro.reproduce.report import write_table
from memoro.reproduce.run import Order, dry_run, format_time, list_missing, run_tables
from memoro.reproduce.setup import make_order

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


def test_table2_covers_all_sets_and_regimes() -> None:
    cells = plan_table("table2", Request(CPU, CPU.sets, ("memoro-tiny",)))
    measured = {(cell.sets[0], method.name) for cell in cells for method in cell.methods}
    for name in CPU.sets:
        assert {(name, f"memory {cells}") for cells in (1, 5, 10, 20)} < measured
        assert {(name, "head"), (name, "class"), (name, "side 8")} < measured
    for name in CPU.unmasked_sets:
        assert {(name, one) for one in ("full", "class-full", "memory-full 1", "memory-full 20", "lora 8")} < measured
    assert ("cifar100", "full") not in measured  # a set beyond the four


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
    assert "masking: 0 cells that no other table or record has, 0 optimiser steps" in text
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
    assert told[0].startswith("2 cells, 0 of them done. The others: about ")
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
    assert again[0] == "2 cells, 2 of them done. The others: about 0 s."
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
    names = {method.name for _, cell in left for method in cell.methods}
    assert names.isdisjoint({"head", "class", "memory 5", "side 8"})
    assert {"memory 1", "memory 20", "full", "lora 8"} <= names
    twice = list_missing(replace(order, tables=("table2", "masking")), lab, Records.read(order.out))
    assert [table for table, _ in twice] == ["table2"] * len(left)  # masking has nothing of its own


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
    assert "| vit | one | naive |" in text
    assert "28.1" in text


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


def record_of(method: str, correct: list[list[int]], *, set_name: str = "rsscn7", **result: Any) -> Record:
    cell = Cell("accuracy", "vit", (set_name,), (replace(memory(5), name=method),), Budget())
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
    assert "| vit, 20 px | rsscn7 | 30 / 40 | 1.000 ± 0.000 | 0.250 ± 0.000 | 0.750 ± 0.433† |" in text
    assert "| vit | rsscn7 | class > head | -0.750 ± 0.069 | 3 | fails |" in text
    assert "memory 5 > class" in text
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
    assert found.verdict == "holds"
    same = compare_pair(("base", results["base"]), ("base", results["base"]))
    assert same is not None
    assert (same.difference, same.error, same.verdict) == (0.0, 0.0, "not told apart")


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
    full = count_method(backbone, "full", "full", {}, pixels)
    assert full.parameters == sum(tensor.numel() for tensor in backbone.anatomy.tensors.values())
    assert full.flops > depth * tokens * 2 * (4 * dim * dim + 2 * dim * mlp)
