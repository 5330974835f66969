"""`memoro lab reproduce`: comparisons of recorded runs, and the tables that are written from records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reproducing import record_of

from memoro.lab.reproduce.measure import Budget, summarise_answers
from memoro.lab.reproduce.methods import FORKED, FORKED_SIZES, METHODS, STABLE
from memoro.lab.reproduce.plan import CPU, TABLES, Job
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.tables.compare import Comparison, average_comparisons, compare_pair
from memoro.lab.tables.paper import REPORTS
from memoro.lab.tables.report import select, write_table


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
    assert re.search(r"10 epochs \| memory 5† > head \| -0.250 ± 1.\d+ \| 3 \| inconclusive \|", text)
    assert "\nEach set by itself (inconclusive: 2, fails: 1):\n" in text
    assert "## Not in the paper" not in text
    assert "3 measurements in 2 minutes" in text
    assert "at most 2000 training images" in text
    rows = (tmp_path / "table2.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("backbone,weights,image_size,set,method,")
    assert "differences on each set, with 95 % intervals](table2-2.png)" in text
    for figure in ("table2.png", "table2-2.png"):
        assert (tmp_path / figure).stat().st_size > 5_000


@pytest.mark.parametrize("table", TABLES)
def test_a_table_without_records_says_so(table: str, tmp_path: Path) -> None:
    assert "Nothing is recorded yet." in write_table(table, Records(tmp_path), "cpu", tmp_path).read_text()


@pytest.mark.parametrize("change", [{"fingerprint": "old"}, {"images": {"dtd10": "others"}}])
def test_earlier_weights_and_other_images_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    def old(method: str) -> Record:
        record = record_of(method, [[1, 1]], set_name="dtd10")
        return replace(record, key={**record.key, **change})

    new = [record_of("head", [[1, 0]], set_name="dtd10"), record_of("head", [[1, 0]])]
    records = Records(tmp_path, [old("head"), old("side 8"), *new])
    assert select(records, "accuracy", ["head", "side 8"], CPU) == new


def test_a_table_of_single_methods_has_no_figure(tmp_path: Path) -> None:
    records = Records(tmp_path, [record_of("full", [[1, 0]] * 3, budget=CPU.unmasked), record_of("head", [[1, 0]] * 3)])
    assert "![" not in write_table("table2", records, "cpu", tmp_path).read_text()


def test_backbones_are_drawn_over_methods(tmp_path: Path) -> None:
    records = Records(tmp_path, [record_of(name, [[1, 0]] * 3) for name in ("head", "memory 5", "side 8")])
    assert "(models.png)" in write_table("models", records, "cpu", tmp_path).read_text()
    assert (tmp_path / "models.png").stat().st_size > 5_000


def test_table4_is_about_more_than_memory(tmp_path: Path) -> None:
    both = [record_of(name, [[1, 0]] * 3, budget=CPU.unmasked) for name in ("memory-full 5", "adapter 5")]
    alone = record_of("memory-full 5", [[1, 0]] * 3, set_name="dtd10", budget=CPU.unmasked)
    text = write_table("table4", Records(tmp_path, [*both, alone]), "cpu", tmp_path).read_text()
    assert "(table4.png)" in text
    assert "| rsscn7 |" in text
    assert "| dtd10 |" not in text


def test_side_is_compared_in_a_table_of_its_own(tmp_path: Path) -> None:
    records = Records(tmp_path, [record_of(name, [[1, 0]] * 3) for name in ("head", "memory 5", "side 8")])
    text = write_table("table2", records, "cpu", tmp_path).read_text()
    paper, beside = text.split("## Not in the paper")
    assert "(inconclusive: 1)" in paper
    assert "side 8 >" not in paper
    assert "| side 8 > head | +0.000 ± 0.000 | 3 | inconclusive |" in beside
    assert "| side 8 > memory 5 |" in beside


def test_only_runs_of_the_same_setting_are_compared(tmp_path: Path) -> None:
    right, wrong = [1] * 40, [1] * 10 + [0] * 30
    short, old = CPU.unmasked, replace(METHODS["memory 5"], rates=(0.03, 0.1), recipe={})
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
    alike = ("full ≥ memory-full 5", "memory-full 5 > head", "full ≥ memory 5", "memory 5 > class")
    alike += ("class > head", "memory 5 > head")
    assert claims == [("10 epochs", "class > head"), *(("150 steps", claim) for claim in alike)]
    assert "full ≥ memory-full 5 | +0.000 ± 0.000 | 3 | not refuted |" in text
    assert "not refuted: 2" in text
    assert "| 10 epochs (10 steps) | – | 0.250 ± 0.000 | – | – | 1.000 ± 0.000 | – |" in text  # no old memory 5
    masking = write_table("masking", records, "cpu", tmp_path).read_text()
    assert "10 epochs" not in masking
    assert "| 150 steps | memory-full 5 > memory 5 | +0.000 ± 0.000 | 3 | inconclusive |" in masking


def test_concatenations_of_different_sets_are_not_averaged(tmp_path: Path) -> None:
    methods = (METHODS["memory-full 5"], METHODS["memory 5"])

    def record(sets: tuple[str, ...], right: int, number: int) -> Record:
        alone, others = ([1] * count + [0] * (10 - count) for count in (right, right - 4))
        naive = summarise_answers([np.array(alone, dtype=bool), *[np.array(others, dtype=bool)] * (len(sets) - 1)])
        masked = summarise_answers([np.array(alone, dtype=bool)] * len(sets))
        found = {
            name: {"order": [name, *(one for one in sets if one != name)], "naive": naive, "masked": masked,
                   "largest_change": 0.0, "test_images": 10}
            for name in sets
        }  # fmt: skip
        cell = Job("concat", "vit", sets, methods, CPU.unmasked, number)
        return Record.now("naive-concat", cell.key("abc", 20), {"sets": found}, 1.0, 1)

    records = Records(
        tmp_path,
        [*(record(("a", "b"), right, seed) for seed, right in enumerate((9, 7, 8))), record(("a", "b", "c"), 5, 0)],
    )
    lines = write_table("naive-concat", records, "cpu", tmp_path).read_text().splitlines()
    start = "| vit, 20 px | a | 150 steps |"
    assert f"{start} naive | 0.800 ± 0.100 | 0.400 ± 0.100 (b) |  | -0.400 ± 0.293 | 3 |" in lines
    assert f"{start} masked | 0.800 ± 0.100 | 0.800 ± 0.100 (b) |  | +0.000 ± 0.000 | 3 |" in lines
    assert f"{start} naive | 0.500 | 0.100 (b) | 0.100 (c) | -0.400 | 1 |" in lines


def test_extensions_of_different_settings_are_told_apart(tmp_path: Path) -> None:
    def record(other: str, epochs: int, accuracy: float) -> Record:
        case = {"test": [accuracy] * 3, "correct": ["ff"] * 3, "curve": [(5, 0.1), (10, accuracy)]}
        result = {"sizes": {"40": {"memory 5, alone": case, "memory 5, another set": case}}, "test_images": 8}
        cell = Job(
            "extension", "vit", ("a", other), CPU.methods(["memory 5", "side 8"]), replace(CPU.masked, epochs=epochs), 0
        )
        return Record.now("extension", cell.key("abc", 20), result, 1.0, 1)

    records = Records(tmp_path, [record("b", 10, 0.5), record("c", 10, 0.6), record("b", 2, 0.7)])
    text = write_table("extension", records, "cpu", tmp_path).read_text()
    for training, other, accuracy in (("10 epochs", "b", 0.5), ("10 epochs", "c", 0.6), ("2 epochs", "b", 0.7)):
        assert f"| a | {training} | classes | 40 | memory 5 | another set ({other}) | {accuracy:.3f} ± 0.000† |" in text


def test_gains_of_a_parent_have_a_mean_over_sets(tmp_path: Path) -> None:
    def record(name: str, alone: str, extended: str) -> Record:
        cases = {
            f"memory 5, {parent}": {"test": [0.5] * 3, "correct": [bits] * 3, "curve": [(5, 0.5), (10, 0.5)]}
            for parent, bits in (("alone", alone), ("sibling classes", extended))
        }
        cell = Job("extension", "vit", (name,), CPU.methods(["memory 5", "side 8"]), CPU.unmasked)
        return Record.now("extension", cell.key("abc", 20), {"sizes": {"40": cases}, "test_images": 8}, 1.0, 1)

    start = "| vit, 20 px | 150 steps | classes | sibling classes | memory 5 | 40 |"
    better, worse = record("a", "00", "ff"), record("b", "ff", "00")
    text = write_table("extension", Records(tmp_path, [better, worse]), "cpu", tmp_path).read_text()
    assert f"{start} 2 | +0.000 ± 0.000 | inconclusive |" in text
    assert "| sibling classes | 0.500 ± 0.000 | +1.000 ± 0.000 |" in text
    assert "(extension-2.png)" in text
    both = [better, record("b", "0f", "ff")]
    text = write_table("extension", Records(tmp_path, both), "cpu", tmp_path).read_text()
    assert re.search(rf"{re.escape(start)} 2 \| \+0.750 ± 0.\d+ \| holds \|", text)
    assert "Means over sets" not in write_table("extension", Records(tmp_path, [better]), "cpu", tmp_path).read_text()


def test_forks_are_shown_with_their_cost(tmp_path: Path) -> None:
    methods = CPU.methods((*FORKED, *FORKED_SIZES))
    counts = {"rows": [{"name": method.name, "parameters": 7, "head": 3, "flops": 2_500_000} for method in methods]}
    key = Job("counts", "vit", (), methods, Budget()).key("abc", 20)
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


def test_table4_counts_the_parameters_on_every_backbone(tmp_path: Path) -> None:
    budget, adapter = CPU.unmasked, record_of("adapter 5", [[1, 1]], budget=CPU.unmasked, parameters=1234)
    elsewhere = {**adapter.key, "backbone": "deit", "fingerprint": "other"}
    records = Records(tmp_path, [
        record_of("memory-full 5", [[1, 0]], budget=budget, parameters=56),
        adapter,
        replace(adapter, key=elsewhere, result={**adapter.result, "parameters": 7890}),
    ])  # fmt: skip
    text = write_table("table4", records, "cpu", tmp_path).read_text()
    assert "| method | deit | vit |" in text
    assert "| memory-full 5 | – | 56 |" in text
    assert "| adapter 5 | 7,890 | 1,234 |" in text


def test_a_single_seed_has_no_spread(tmp_path: Path) -> None:
    scores = {f"{rate:g}": [0.5] for rate in STABLE[0].rates}
    budget = replace(CPU.unmasked, seeds=0)
    records = Records(tmp_path, [record_of(STABLE[0], [[1]], budget=budget, scores=scores, test=[])])
    text = write_table("lr-stability", records, "cpu", tmp_path).read_text()
    assert "| vit, 20 px | rsscn7 | 150 steps | head | 1 | 0.1 | 0.500 | 0.500 | 0.500 | 0.500 | 0.500 |" in text
    assert "have one seed" in text


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


def test_means_over_sets_are_judged_together(tmp_path: Path) -> None:
    """Three sets that are each inconclusive may decide a claim together."""
    better, worse = [1] * 42 + [0] * 18, [1] * 40 + [0] * 20
    sets = ("rsscn7", "dtd10", "pacs_sketch")
    records = Records(tmp_path, [
        record_of(method, [answers] * 3, set_name=name)
        for name in sets for method, answers in (("memory 5", better), ("class", worse))
    ])  # fmt: skip
    text = write_table("table2", records, "cpu", tmp_path).read_text()
    assert text.count("| 10 epochs | memory 5 > class | +0.033 ± 0.048 | 3 | inconclusive |") == 3
    assert "| vit, 20 px | 10 epochs | 3 of 3 | memory 5 > class | +0.033 ± 0.027 | 3 | holds |" in text
    one = Comparison("a", "b", 0.1, 0.03, 3, 2.0)
    two = Comparison("a", "b", 0.0, 0.04, 5, 4.0)
    both = average_comparisons([one, two])
    assert (both.difference, both.seeds) == (0.05, 3)
    assert both.error == pytest.approx(0.025)
    assert both.freedom == pytest.approx(0.0025**2 / (0.0009**2 / 2 + 0.0016**2 / 4))


def test_a_diverged_run_is_all_wrong() -> None:
    right = np.packbits(np.ones(16, dtype=bool)).tobytes().hex()
    stable, diverged = ({"test_images": 16, "correct": runs} for runs in ([right] * 3, [right, right, ""]))
    found = compare_pair(("stable", stable), ("diverged", diverged))
    assert found is not None
    assert (found.seeds, found.difference) == (3, pytest.approx(1 / 3))


def test_verdicts_need_three_seeds_and_depend_on_degrees_of_freedom() -> None:
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


@pytest.mark.parametrize("table", REPORTS)
def test_committed_records_are_those_that_the_plan_asks_for(table: str) -> None:
    """A new field of a method or budget would make all of them another measurement."""
    folder = Path(__file__).parents[3] / "results" / "cpu"
    if not folder.is_dir():
        pytest.skip("the results are only in the repository")
    assert REPORTS[table](Records.read(folder), CPU).used
