"""`memoro lab reproduce`: the plans of all tables, dry runs, and counts of parameters and FLOPs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from reproducing import checkpoint, request_of, shapes

from memoro.backbones import Backbone
from memoro.errors import DataError
from memoro.lab.reproduce.costs import count_methods
from memoro.lab.reproduce.measure import Budget
from memoro.lab.reproduce.methods import METHODS
from memoro.lab.reproduce.plan import CPU, MOST_RUNS, PAPER, TABLES, Job, Request, group_jobs, runs_of
from memoro.lab.reproduce.records import Record, Records
from memoro.lab.reproduce.run import dry_run, format_time, list_missing
from memoro.lab.reproduce.runner import Runner, make_request
from memoro.training import TrainOptions

__all__ = ["checkpoint", "shapes"]  # fixtures


HEAD, FULL = METHODS["head"], METHODS["full"]


def plan_table(table: str, request: Request) -> list[Job]:
    """The jobs of a table, with methods that share passes together."""
    return [job for _, job in group_jobs(replace(request, tables=(table,)).jobs())]


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_cells_of_limited_size(table: str) -> None:
    request = Request(CPU, CPU.sets, ("memoro-tiny", "dinov2-small-reg"))
    jobs = plan_table(table, request)
    assert jobs
    for job in jobs:
        masked = job.methods and job.methods[0].composes
        assert all(method.composes == masked for method in job.methods) or job.kind == "concat"
        if job.kind == "accuracy" and masked and len(job.methods) > 1:
            assert sum(runs_of(method, job.budget) for method in job.methods) <= MOST_RUNS
        if job.kind == "accuracy" and not masked:
            alone = [method.name for method in job.methods] == ["full"] and job.sets == ("rsscn7",)
            assert len(job.methods) == 1
            assert job.sets[0] in CPU.unmasked_sets
            assert job.backbone == "memoro-tiny" or alone
    keys = [json.dumps(part.key("", 0)) for job in jobs for part in job.parts()]
    assert len(set(keys)) == len(keys)


def test_another_set_of_the_same_name_is_another_measurement(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "photos"
        for name, label in files.items():
            (folder / "train" / label).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(folder / "train" / label / name)
        job = Job("accuracy", "vit", ("photos",), (HEAD,), Budget())
        runner = Runner({"photos": str(folder)}, {}, TrainOptions())
        return str(job.key("abc", 20, {"photos": runner.digest("photos")})["images"]["photos"])

    files = {"1.png": "cat", "2.png": "dog", "3.png": "cat"}
    assert digest(files) == digest(files)
    assert len({digest(files), digest({**files, "3.png": "dog"}), digest({**files, "4.png": "dog"})}) == 3


def test_table2_covers_all_sets_and_regimes() -> None:
    jobs = plan_table("table2", Request(CPU, CPU.sets, ("memoro-tiny",)))
    measured = {(job.sets[0], method.name) for job in jobs for method in job.methods}
    for name in CPU.sets:
        assert {(name, f"memory {cells}") for cells in (1, 5, 10, 20)} < measured
        assert {(name, "head"), (name, "class"), (name, "side 8")} < measured
    for name in CPU.unmasked_sets:
        assert {(name, one) for one in ("full", "class-full", "memory-full 1", "memory-full 20")} < measured
    assert {name for name, method in measured if method == "lora 8"} == {"rsscn7"}
    assert ("cifar100", "full") not in measured  # a set beyond the four


def test_what_is_compared_is_trained_equally_long() -> None:
    request = Request(CPU, CPU.sets, ("memoro-tiny", "dinov2-small-reg"))
    masking = plan_table("masking", request)
    assert all(job.budget == CPU.unmasked for job in masking)
    names = {method.name for job in masking for method in job.methods}
    assert {"head", "class", "class-full"} < names
    assert {name.replace("-full", "") for name in names} == {"head", "class", "memory 1", "memory 5", "memory 20"}
    table2 = plan_table("table2", request)
    heads = [job for job in table2 if HEAD in job.methods and job.budget == CPU.unmasked]
    assert [job.sets[0] for job in heads] == list(CPU.unmasked_sets)
    larger = [job for job in table2 if job.backbone != "memoro-tiny" and job.budget.steps]
    assert [(job.sets, job.budget.steps) for job in larger] == [(("rsscn7",), 100)] * 2
    assert {"full", "memory 5", "class", "head"} < {method.name for job in larger for method in job.methods}


def test_steps_of_the_user_reach_every_unmasked_cell() -> None:
    request = Request(replace(CPU, unmasked=replace(CPU.unmasked, steps=30)), CPU.sets, ("memoro-tiny", "dinov2"))
    full = [job for job in plan_table("table2", request) if FULL in job.methods]
    assert {(job.backbone, job.budget.steps) for job in full} == {("memoro-tiny", 30), ("dinov2", 20)}
    [larger] = [
        job
        for job in plan_table("table2", Request(CPU, CPU.sets, ("memoro-tiny", "dinov2")))
        if FULL in job.methods and job.backbone == "dinov2"
    ]
    assert larger.budget.steps == 100
    shortest = replace(request, scale=replace(CPU, unmasked=replace(CPU.unmasked, steps=1)))
    assert all(job.budget.steps == 1 for job in plan_table("table2", shortest) if FULL in job.methods)


def test_forks_are_planned_for_several_cells_and_ranks_and_counted() -> None:
    jobs = plan_table("fork", Request(CPU, CPU.sets, ("dinov2", "memoro-tiny")))
    assert [job.kind for job in jobs].count("counts") == 2
    planned: dict[tuple[str, str], set[str]] = {}
    for job in jobs:
        if job.kind == "accuracy":
            planned.setdefault((job.backbone, job.sets[0]), set()).update(method.name for method in job.methods)
    forks = ("0.33", "0.50", "0.67", "0.83")

    def memories(count: int) -> set[str]:
        return {f"memory {count}", *(f"memory {count}, fork {fork}" for fork in forks)}

    usual = memories(5) | {f"side 8, fork {fork}" for fork in ("0.00", *forks)}
    others = memories(1) | memories(20) | {f"side 2, fork {fork}" for fork in ("0.00", *forks)}
    for (backbone, name), methods in planned.items():
        assert methods >= usual
        # Other sizes: on the smallest backbone, on two small sets.
        assert (methods >= others) == (backbone == "memoro-tiny" and name in CPU.unmasked_sets[-2:])
        assert methods.isdisjoint(others) or methods >= others
    for backbone in ("memoro-tiny", "dinov2"):
        assert {name for own, name in planned if own == backbone} == {*CPU.unmasked_sets[-3:]}


@pytest.mark.parametrize("table", ["table4", "lr-stability"])
def test_what_takes_most_passes_has_one_set(table: str) -> None:
    def sets(*names: str) -> set[tuple[str, ...]]:
        return {job.sets for job in plan_table(table, Request(CPU, names, ("memoro-tiny",)))}

    assert sets(*CPU.sets) == {("rsscn7",)}
    assert sets("pets", "birds") == {("pets",)}
    paper = {job.sets[0] for job in plan_table(table, Request(PAPER, PAPER.sets, PAPER.backbones))}
    assert paper == ({"inaturalist2017"} if table == "table4" else {*PAPER.sets})


def test_extension_pairs_sets() -> None:
    def pairs(*sets: str) -> list[tuple[str, ...]]:
        jobs = plan_table("extension", Request(CPU, sets, ("memoro-tiny",)))
        assert [job.number for job in jobs] == [0, 1] * (len(jobs) // 2)
        return [job.sets for job in jobs[::2]]

    assert pairs("a", "b", "c") == [("b", "c"), ("c", "b")]
    assert pairs("a") == [("a",)]


def test_what_is_left_of_several_jobs_shares_passes(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("table2", shapes, checkpoint, "one")

    def left(*recorded: str) -> list[tuple[str, ...]]:
        parts = {part.methods[0].name: part for _, part in request.jobs()}
        records = [Record.now("table2", runner.key(parts[name]), {}, 1.0, 1) for name in recorded]
        jobs = list_missing(request, runner, Records(request.out, records))
        return [tuple(method.name for method in job.methods) for _, job in jobs]

    unmasked = [(name,) for name in ("full", "class-full", *(f"memory-full {n}" for n in (1, 5, 20)), "lora 8")]
    first, second, *others = left()
    assert first == ("head", "class", "memory 1", "memory 5")
    assert second == ("memory 10", "memory 20", "side 8")
    assert others[:-1] == unmasked
    cells = ("memory 1", "memory 10", "memory 20")
    assert left("class", "memory 5", "side 8", "lora 8", "full")[0] == ("head", *cells)


def test_paper_scale_is_the_same_plan_with_other_numbers() -> None:
    jobs = plan_table("table2", Request(PAPER, PAPER.sets, PAPER.backbones))
    assert {job.sets[0] for job in jobs} == {"sun397", "inaturalist2017", "cifar100", "places365"}
    for job in jobs:
        assert (job.budget.steps, job.budget.batch_size, job.budget.most, job.budget.views) == (
            20_000,
            512,
            None,
            None,
        )
        assert job.budget.augment.crop == ("pad" if job.sets == ("cifar100",) else None)
    assert {method.name for job in jobs for method in job.methods} >= {
        "full",
        "memory-full 10",
        "memory 20",
        "side 8",
    }
    three, *_ = plan_table("naive-concat", Request(CPU, CPU.sets, ("memoro-tiny",)))
    assert three.sets == CPU.unmasked_sets[-3:]
    first, *_ = plan_table("naive-concat", Request(PAPER, PAPER.sets, PAPER.backbones))
    assert first.sets == ("inaturalist2017", "places365", "cifar100", "sun397")


def test_dry_run_of_the_paper_scale(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMORO_DATA", raising=False)
    request, runner = make_request("all", "paper", [], [str(checkpoint)], None, command="memoro …")
    told: list[str] = []
    dry_run(request, runner, told.append)
    text = "\n".join(told)
    assert "data: inaturalist2017: 579,184 training images, 95,986 to test (MISSING" in text
    assert re.search(r"backbone: vit \(.*5 layers of 24\), fingerprint [0-9a-f]{12} \(found\)", text)
    for table in TABLES:
        assert f"{table}: " in text
    assert "masking: 0 jobs that no other table or record has, about 0 s on this machine" in text
    assert "PFLOP" in text
    assert not (tmp_path / "results").exists()


def test_all_leaves_out_a_table_that_cannot_be_planned(shapes: Path, checkpoint: Path) -> None:
    request, runner = request_of("all", shapes, checkpoint, "one")
    told: list[str] = []
    dry_run(request, runner, told.append)
    assert "naive-concat: skipped (naive-concat needs two sets or more: repeat --data.)" in told
    assert any(line.startswith("extension: ") for line in told)
    with pytest.raises(DataError, match="needs two sets"):
        dry_run(replace(request, tables=("naive-concat",)), runner, told.append)


def test_methods_can_be_chosen(shapes: Path, checkpoint: Path) -> None:
    def planned(table: str, *methods: str) -> list[tuple[str, ...]]:
        request, _ = request_of(table, shapes, checkpoint, "one", "two")
        jobs = group_jobs(replace(request, methods=frozenset(methods)).jobs())
        return [tuple(method.name for method in job.methods) for _, job in jobs]

    assert planned("table2", "full", "memory 5") == [("memory 5",)] * 2 + [("full",)] * 2
    with pytest.raises(DataError, match="compares memory-full 5, memory 5: name all of them, or none"):
        planned("naive-concat", "memory 5")
    with pytest.raises(DataError, match="table5: no method 'full'; this table has no choice of methods"):
        planned("table5", "full")
    assert planned("naive-concat", "memory 5", "memory-full 5") == planned("naive-concat")
    with pytest.raises(DataError, match="table4: no method 'full'; choose from memory-full 5, adapter 5"):
        planned("table4", "full")


def test_cpu_scale_asks_for_data() -> None:
    with pytest.raises(DataError, match="needs sets of images: --data"):
        make_request("table2", "cpu", [], [], None, command="")


def test_times_are_readable() -> None:
    assert [format_time(one) for one in (5, 300, 9000, 900_000)] == ["5 s", "5 min", "2.5 h", "10 days"]


def test_counts_follow_the_formulas(backbone: Backbone) -> None:
    """Parameters and FLOPs of the small ViT: 26 tokens of 24 in 5 layers, an MLP of 40."""
    dim, depth, tokens, cells, mlp = 24, 5, 26, 5, 40

    def count(regime: str, **sizes: int) -> tuple[int, int]:
        [row] = count_methods(backbone, [("", regime, sizes)], (20, 20))
        return row["parameters"], row["flops"]

    keys, attention = 2 * cells * dim * 2 * dim, 2 * 2 * tokens * cells * dim
    assert count("memory-full", cells=cells) == (dim + depth * cells * dim, depth * (keys + attention))
    assert count("class-full")[1] == 0
    assert count("head") == (0, 0)
    adapter = depth * 2 * 2 * dim * 5
    assert count("adapter", width=5) == (adapter, 2 * tokens * adapter)
    # One more token; its score with itself is a sum of products, not a matrix product.
    layer = 2 * (4 * dim * dim + 2 * dim * mlp) + 2 * 2 * tokens * dim
    assert count("memory", cells=0) == (dim, depth * layer)
    early, late = (count("memory", **METHODS[name].sizes_on(depth)) for name in ("memory 5", "memory 5, fork 0.50"))
    assert early[0] == dim + depth * cells * dim
    assert late[0] == dim + 3 * cells * dim  # it leaves at layer 2 of 5
    assert early[1] > late[1] > 0
    parameters, flops = count("full")
    assert parameters == sum(tensor.numel() for tensor in backbone.anatomy.tensors.values())
    assert flops > depth * tokens * 2 * (4 * dim * dim + 2 * dim * mlp)
