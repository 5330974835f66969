"""Task files: stable bytes, and nothing believed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_fork, random_task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from task_files import assert_same, rewrite

import memoro
from memoro.backbones import Backbone
from memoro.errors import TaskFileError
from memoro.tasks.task import Task


@pytest.fixture
def task(backbone: Backbone) -> Task:
    task = random_task(backbone, "pets", cells=2, labels=["cat", "dog", "öre"])
    task.update_spec(training={"epochs": 3}, metrics={"accuracy": 0.5})
    return task


@pytest.mark.parametrize("kind", ["softmax", "multilabel", "regression"])
@pytest.mark.parametrize(("cells", "from_layer"), [(0, 0), (3, 0), (2, 4), (1, 5), (0, 5)])
def test_a_task_survives_its_file(backbone: Backbone, tmp_path: Path, kind: Any, cells: int, from_layer: int) -> None:
    task = random_task(backbone, "one", cells=cells, from_layer=from_layer, head=kind)
    loaded = memoro.load_task(memoro.save_task(task, tmp_path / "one.safetensors"))
    assert_same(task, loaded)
    assert loaded.content_hash() == task.content_hash()


def test_saving_again_gives_the_same_bytes(task: Task, tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    memoro.save_task(task, first)
    memoro.save_task(memoro.load_task(first), second)
    assert first.read_bytes() == second.read_bytes()


def test_another_process_writes_the_same_bytes(task: Task, tmp_path: Path) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    memoro.save_task(task, first)
    code = f"import memoro; memoro.save_task(memoro.load_task({str(first)!r}), {str(second)!r})"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert first.read_bytes() == second.read_bytes()


def test_one_metadata_key_of_canonical_json(task: Task, tmp_path: Path) -> None:
    path = memoro.save_task(task, tmp_path / "t.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["memoro"]
    record = json.loads(metadata["memoro"])
    assert metadata["memoro"] == json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert set(record["tasks"][0]) == {
        "name", "labels", "kind", "from_layer", "cells", "memory_norm", "backbone", "parents", "preprocessing",
        "training", "metrics", "content",
    }  # fmt: skip


def test_bundles_keep_parents(backbone: Backbone, tmp_path: Path, pixels: torch.Tensor) -> None:
    pets = random_task(backbone, "pets")
    breeds = random_task(backbone, "breeds", seed=1, extends=[pets])
    path = memoro.save_tasks([breeds, pets], tmp_path / "bundle.safetensors")
    loaded = memoro.load_tasks(path)
    assert [task.name for task in loaded] == ["breeds", "pets"]
    assert loaded[0].parents[0].content == pets.content_hash()
    again = memoro.save_tasks(loaded, tmp_path / "again.safetensors")
    assert path.read_bytes() == again.read_bytes()
    live, stored = memoro.compose(backbone, [pets, breeds])(pixels), memoro.compose(backbone, loaded)(pixels)
    assert all(torch.allclose(live[name], stored[name], atol=1e-5) for name in live)
    with pytest.raises(TaskFileError, match="load_tasks"):
        memoro.load_task(path)


def test_parents_are_matched_by_content(backbone: Backbone, tmp_path: Path) -> None:
    pets = random_task(backbone, "pets")
    breeds = random_task(backbone, "breeds", seed=1, extends=[pets])
    loaded = memoro.load_task(memoro.save_task(breeds, tmp_path / "b.safetensors"))
    memoro.compose(backbone, [pets, loaded])
    other = random_task(backbone, "pets", seed=9)
    with pytest.raises(memoro.CompositionError, match="a different version of 'pets'"):
        memoro.compose(backbone, [other, loaded])


def test_a_note_does_not_make_another_task(task: Task) -> None:
    before = task.content_hash()
    task.update_spec(metrics={"accuracy": 0.9})
    assert task.content_hash() == before
    with torch.no_grad():
        task.memory[0, 0, 0] += 1
    assert task.content_hash() != before


def test_vit_b_with_ten_classes_fits_a_quarter_megabyte(tmp_path: Path) -> None:
    from memoro.lab.bench.models import random_vit

    backbone = memoro.load_backbone(random_vit(32))
    task = memoro.new_task(backbone, "ten", [f"class {i}" for i in range(10)], cells=5)
    assert memoro.save_task(task, tmp_path / "ten.safetensors").stat().st_size <= 250_000


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_failed_save_leaves_the_old_file(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = memoro.save_task(task, tmp_path / "t.safetensors")
    before = path.read_bytes()
    with torch.no_grad():
        task.memory.add_(1)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises((TaskFileError, KeyboardInterrupt, MemoryError), match=r"^$|No space left"):
            memoro.save_task(task, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.safetensors"]
    memoro.save_task(task, path)
    assert path.read_bytes() != before


def test_a_killed_save_leaves_the_old_file(task: Task, tmp_path: Path) -> None:
    path = memoro.save_task(task, tmp_path / "t.safetensors")
    before = path.read_bytes()

    def save() -> None:
        changed = memoro.load_task(path)
        changed.update_spec(metrics={"x": 1})
        os.fsync = lambda _: os.kill(os.getpid(), 9)
        memoro.save_task(changed, path)

    process = in_fork(save)
    process.join(60)
    assert process.exitcode == -9
    assert path.read_bytes() == before


def test_nan_is_neither_saved_nor_loaded(task: Task, tmp_path: Path) -> None:
    with torch.no_grad():
        task.memory[0, 0, 0] = float("nan")
    with pytest.raises(TaskFileError, match="NaN"):
        memoro.save_task(task, tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()
    task.update_spec(metrics={"accuracy": float("inf")})
    with torch.no_grad():
        task.memory.zero_()
    with pytest.raises(TaskFileError, match="finite"):
        memoro.save_task(task, tmp_path / "t.safetensors")


# --------------------------------------------------------------------------------------------- files of strangers


ATTACKS: dict[str, tuple[Any, str]] = {
    "newer format": (lambda r, t: r.update(format=5), "Use a newer version"),
    "format of another type": (lambda r, t: r.update(format="1"), "version"),
    "no tasks": (lambda r, t: r.update(tasks=[]), "tasks"),
    "task is a list": (lambda r, t: r.update(tasks=[[]]), "object"),
    "path as a name": (lambda r, t: r["tasks"][0].update(name="../../etc/passwd"), "path"),
    "reserved name": (lambda r, t: r["tasks"][0].update(name="base"), "reserved"),
    "control characters": (lambda r, t: r["tasks"][0].update(name="a\x1b[2J"), "control"),
    "name too long for a file": (lambda r, t: r["tasks"][0].update(name="\U0001f408" * 60), "240 bytes"),
    "half a character in a label": (lambda r, t: r["tasks"][0].update(labels=["a", "\ud800"]), "surrogate"),
    "name of another type": (lambda r, t: r["tasks"][0].update(name=7), "name"),
    "labels doubled": (lambda r, t: r["tasks"][0].update(labels=["a", "a", "b"]), "twice"),
    "labels as text": (lambda r, t: r["tasks"][0].update(labels="abc"), "labels"),
    "fewer labels than rows": (lambda r, t: r["tasks"][0].update(labels=["a", "b"]), "shape"),
    "unknown head": (lambda r, t: r["tasks"][0].update(kind="pickle"), "kind"),
    "fork beyond the last layer": (lambda r, t: r["tasks"][0].update(from_layer=6), "from_layer"),
    "true is no number": (lambda r, t: r["tasks"][0].update(cells=True), "cells"),
    "absurd cells": (lambda r, t: r["tasks"][0].update(cells=10**12), "cells"),
    "absurd depth": (lambda r, t: r["tasks"][0]["backbone"].update(depth=10**9), "depth"),
    "no fingerprint": (lambda r, t: r["tasks"][0]["backbone"].pop("fingerprint"), "fingerprint"),
    "sketch of text": (lambda r, t: r["tasks"][0]["backbone"]["fingerprint"].update(sketch=["a"]), "sketch"),
    "bad preprocessing": (lambda r, t: r["tasks"][0].update(preprocessing={"resize": -1}), "preprocessing"),
    "other cells": (lambda r, t: r["tasks"][0].update(cells=3), "shape"),
    "label renamed": (lambda r, t: r["tasks"][0].update(labels=["cat", "dog", "x"]), "changed after saving"),
    "weights changed": (lambda r, t: t["0.memory"].add_(1), "changed after saving"),
    "integers for weights": (lambda r, t: t.update({"0.memory": t["0.memory"].int()}), "I32"),
    "NaN": (lambda r, t: t["0.memory"].fill_(float("nan")), "NaN"),
    "infinity": (lambda r, t: t["0.head.bias"].fill_(float("inf")), "NaN"),
    "missing tensor": (lambda r, t: t.pop("0.memory"), "memory"),
    "extra tensor": (lambda r, t: t.update({"evil": torch.zeros(1)}), "evil"),
    "wrong shape": (lambda r, t: t.update({"0.class_token": torch.zeros(25)}), "shape"),
    "same name twice": (
        lambda r, t: (
            r["tasks"].append(r["tasks"][0]),
            t.update({name.replace("0.", "1.", 1): tensor.clone() for name, tensor in list(t.items())}),
        ),
        "one name",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str, task: Task, tmp_path: Path) -> None:
    change, message = ATTACKS[attack]
    path = rewrite(memoro.save_task(task, tmp_path / "t.safetensors"), change)
    with pytest.raises(TaskFileError, match=message):
        memoro.load_tasks(path)


def test_the_rewriting_itself_does_no_harm(task: Task, tmp_path: Path) -> None:
    path = rewrite(memoro.save_task(task, tmp_path / "t.safetensors"), lambda r, t: None)
    assert_same(memoro.load_task(path), task)


def test_foreign_files(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(TaskFileError, match="No such file"):
        memoro.load_task(path)
    path.write_bytes(b"")
    with pytest.raises(TaskFileError, match="truncated"):
        memoro.load_task(path)
    path.write_bytes(save({"x": torch.zeros(3)}))
    with pytest.raises(TaskFileError, match="not a memoro file"):
        memoro.load_task(path)
    torch.save({"x": torch.zeros(3)}, path)
    with pytest.raises(TaskFileError, match="not a safetensors file"):
        memoro.load_task(path)
    path.write_bytes(save({"x": torch.zeros(1)}, {"memoro": "[" * 100_000}))
    with pytest.raises(TaskFileError):
        memoro.load_task(path)
    with pytest.raises(TaskFileError, match="is a folder: give a task file in it"):
        memoro.load_task(tmp_path)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = (
        f"import memoro\ntry: memoro.load_tasks({str(tmp_path / 'pipe')!r})\nexcept memoro.TaskFileError as e: print(e)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "not a regular file" in out.stdout


def test_threads_write_files_with_the_processs_permissions(task: Task, tmp_path: Path) -> None:
    """`os.umask` changes the whole process for a moment: a file made meanwhile would be open to all."""
    before = os.umask(0o077)
    try:
        asked: list[int] = []

        def spy(mask: int) -> int:
            asked.append(mask)
            return before

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "umask", spy)
            path = memoro.save_task(task, tmp_path / "t.safetensors")
        assert asked == []
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with path.open("wb") as file:
        file.write((1 << 62).to_bytes(8, "little"))
        file.truncate(200 << 20)  # sparse
    with pytest.raises(TaskFileError):
        memoro.load_task(path)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_raise_only_our_error(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    mutated = bytearray(small_file)
    header = 8 + int.from_bytes(small_file[:8], "little")
    for _ in range(data.draw(st.integers(1, 8))):
        kind = data.draw(st.sampled_from(["byte", "cut", "insert", "header", "swap"]))
        if kind == "cut":
            del mutated[data.draw(st.integers(0, len(mutated))) :]
        elif kind == "insert":
            at = data.draw(st.integers(0, len(mutated)))
            mutated[at:at] = data.draw(st.binary(max_size=20))
        elif mutated:
            top = min(header, len(mutated)) - 1 if kind == "header" else len(mutated) - 1
            mutated[data.draw(st.integers(0, max(top, 0)))] = data.draw(st.integers(0, 255))
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(bytes(mutated))
    try:
        loaded = memoro.load_tasks(path)
    except TaskFileError:
        return
    assert loaded[0].content_hash()


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from families import CASES

    backbone = memoro.load_backbone(CASES[0].model())
    path = tmp_path_factory.mktemp("fuzz") / "t.safetensors"
    return memoro.save_task(random_task(backbone, "pets", cells=1, from_layer=4), path).read_bytes()


def test_reading_allocates_no_more_than_stated(small_file: bytes, tmp_path: Path) -> None:
    """Two hundred broken files, read in a process that may not grow by more than 64 MiB."""
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        mutated = bytearray(small_file)
        for at in torch.randint(0, 900, (6,), generator=generator).tolist():
            mutated[at] = int(torch.randint(0, 256, (1,), generator=generator))
        (tmp_path / f"{number}.safetensors").write_bytes(bytes(mutated))
    code = (
        "import resource, sys, pathlib, memoro\n"
        "from memoro.tasks.taskfile import load_tasks\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "bad = 0\n"
        f"for path in sorted(pathlib.Path({str(tmp_path)!r}).glob('*.safetensors')):\n"
        "    try: load_tasks(path)\n"
        "    except memoro.TaskFileError: bad += 1\n"
        "print(bad)\n"
    )
    if not hasattr(resource, "RLIMIT_AS") or not Path("/proc/self/statm").exists():
        pytest.skip("limits on address space need Linux")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(out.stdout) > 150
