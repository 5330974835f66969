"""A folder with files that cannot be served: the others are, and those are listed with their reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import random_task
from families import CASES
from safetensors import safe_open
from safetensors.torch import save
from serving import backbone, contents, file_of, fill, in_folder, picture, serving
from typer.testing import CliRunner

import memoro
from memoro.backbones import Backbone
from memoro.cli import app
from memoro.errors import TaskFileError
from memoro.serve import server
from memoro.serve.store import open_store

__all__ = ["backbone"]  # fixtures

IMAGE = picture(1)


def change_parent(file: Path, content: str) -> bytes:
    """The bytes of a task file with another content hash of its first parent."""
    with safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["memoro"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    record["tasks"][0]["parents"][0]["content"] = content
    found: bytes = save(tensors, metadata={"memoro": json.dumps(record)})
    return found


@pytest.fixture
def folder(backbone: Backbone, tmp_path: Path) -> Path:
    """Tasks that can be served, and a file for each way in which one cannot."""
    path = tmp_path / "tasks"
    tasks = fill(path, backbone)
    child = memoro.save_task(random_task(backbone, "child", extends=[tasks["tags"]]), path / "child.safetensors")
    (path / "a-parent.safetensors").write_bytes(change_parent(child, ""))
    (path / "cut.safetensors").write_bytes((path / "tags.safetensors").read_bytes()[:-5])
    (path / "copy.safetensors").symlink_to(path / "nowhere")
    (path / "inside.safetensors").mkdir()
    (path / "weights.safetensors").write_bytes(save({"weight": torch.zeros(2)}))
    (path / "z-twin.safetensors").write_bytes((path / "tags.safetensors").read_bytes())
    other = memoro.load_backbone(CASES[0].model(seed=8))
    memoro.save_task(random_task(other, "stranger"), path / "a-stranger.safetensors")
    loud = random_task(backbone, "loud", from_layer=backbone.depth, cells=0)
    loud.head.weight.data.fill_(3e38)
    memoro.save_task(loud, path / "loud.safetensors")
    memoro.save_task(random_task(backbone, "louder", extends=[loud]), path / "louder.safetensors")
    memoro.save_task(random_task(backbone, "orphan", extends=[random_task(backbone, "gone")]), path / "o.safetensors")
    memoro.save_task(random_task(backbone, "all"), path / "all.safetensors")
    return path


SERVED = {"pets", "breeds", "tags", "weight", "top", "large", "child"}
REASONS = {
    "a-parent.safetensors": "parent 'tags' in the record is not a SHA-256",
    "a-stranger.safetensors": "'stranger' was trained for",
    "all.safetensors": "'all' stands for all tasks",
    "copy.safetensors": "cannot read copy.safetensors",
    "cut.safetensors": "cannot read cut.safetensors as a task file",
    "inside.safetensors": "contains no task files",
    "loud.safetensors": "'loud': the answer to a test image is NaN",
    "louder.safetensors": "'loud",
    "o.safetensors": "attach 'gone' too",
    "weights.safetensors": "not a memoro file",
    "z-twin.safetensors": "two tasks are called 'tags', in tags.safetensors and in z-twin.safetensors: remove one",
}


def test_one_bad_file_does_not_stop_the_others(folder: Path, backbone: Backbone, tmp_path: Path) -> None:
    right = {name: path.read_bytes() for path in folder.iterdir() if path.is_file() for name in [path.name]}
    with serving(backbone, folder) as server:
        assert set(server.predict(IMAGE)["images"][0]["answers"]) == SERVED
        listed = server.request("GET", "/v1/tasks")[2]
        reasons = {one["file"]: one["reason"] for one in listed["skipped"]}
        assert reasons.keys() == REASONS.keys()
        for name, part in REASONS.items():
            assert part in reasons[name], name
            assert str(tmp_path) not in reasons[name]
        assert {task["name"] for task in listed["tasks"]} == SERVED
        # What is attached under the name of such a file does not overwrite it.
        data = file_of(tmp_path, random_task(backbone, "cut"))
        assert server.request("PUT", "/v1/tasks/cut", data)[0] == 201
        assert server.request("GET", "/v1/tasks/cut/file")[2] == data
    assert {name: (folder / name).read_bytes() for name in right} == right
    again = open_store([folder], lambda _: backbone)
    assert set(contents(again)) == SERVED | {"cut"}
    assert set(again.skipped) == set(REASONS)


def test_a_folder_of_good_files_skips_none(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "tasks", backbone)
    store = open_store([tmp_path / "tasks"], lambda _: backbone)
    assert store.skipped == {}
    assert contents(store) == in_folder(tmp_path / "tasks")


def test_the_backbone_is_that_of_most_tasks(folder: Path, backbone: Backbone) -> None:
    asked = []
    open_store([folder], lambda record: asked.append(record) or backbone)  # type: ignore[func-returns-value]
    assert [record and record.fingerprint for record in asked] == [backbone.fingerprint]


def test_a_bad_file_that_is_named_is_an_error(folder: Path, backbone: Backbone) -> None:
    with pytest.raises(TaskFileError, match=r"a-parent.safetensors: the content of the parent 'tags'.*not a SHA-256"):
        open_store([folder / "a-parent.safetensors"], lambda _: backbone)


def test_a_parent_without_a_hash_is_refused_everywhere(folder: Path, backbone: Backbone) -> None:
    bad = folder / "a-parent.safetensors"
    with pytest.raises(TaskFileError, match="not a SHA-256"):
        memoro.load_task(bad)
    found = CliRunner().invoke(app, ["inspect", str(bad)])
    assert isinstance(found.exception, TaskFileError)
    with serving(backbone, folder / "tags.safetensors") as server:
        status, _, told = server.request("PUT", "/v1/tasks", bad.read_bytes())
        assert (status, "not a SHA-256" in told["error"]) == (422, True)


def test_skipped_files_are_told_at_the_start(folder: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run_server", lambda *_: None)
    monkeypatch.setattr("memoro.cli.serve.load", lambda *_, **__: backbone)
    found = CliRunner().invoke(app, ["serve", "--tasks", str(folder)])
    assert found.exit_code == 0, found.output
    lines = {line.split(": ")[1] for line in found.output.splitlines() if line.startswith("not served: ")}
    assert lines == set(REASONS)
