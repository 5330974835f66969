"""Attach and detach: all at once, kept in the folder, and nothing changes when something is wrong."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from conftest import in_fork, random_task
from families import CASES
from safetensors.torch import load, save
from serving import Running, fill, picture, serving

import memoro
from memoro.backbones import Backbone
from memoro.errors import CompositionError, ServeError
from memoro.serve.run import open_store
from memoro.serve.store import TaskStore
from memoro.tasks.taskfile import load_tasks

IMAGE = picture(1)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return memoro.load_backbone(CASES[0].model())


@pytest.fixture
def server(backbone: Backbone, tmp_path: Path) -> Iterator[Running]:
    fill(tmp_path / "tasks", backbone)
    with serving(backbone, tmp_path / "tasks") as running:
        yield running


def file_of(tmp_path: Path, *tasks: memoro.Task) -> bytes:
    return memoro.save_tasks(tasks, tmp_path / "upload.safetensors").read_bytes()


def in_folder(folder: Path) -> dict[str, str]:
    """Name and content of all tasks that a server would find there."""
    return {task.name: task.content_hash() for file in folder.glob("*.safetensors") for task in load_tasks(file)}


def contents(store: TaskStore) -> dict[str, str]:
    """The same of what a server has attached."""
    return {name: info["content"] for name, info in store.current.info.items()}


def test_attach_replace_detach_and_restart(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    names = ["färbung/..".replace("/", "-"), "v1.2", "my fruits", "x" * 120, "Pets"]
    for seed, name in enumerate(names):
        data = file_of(tmp_path, random_task(backbone, name, seed=40 + seed))
        status, _, found = server.request("PUT", f"/v1/tasks/{quote(name, safe='')}", data)
        assert (status, found["tasks"][name]["changed"]) == (201, True), found
        assert server.request("GET", f"/v1/tasks/{quote(name, safe='')}/file")[2] == data
        status, _, again = server.request("PUT", f"/v1/tasks/{quote(name, safe='')}", data)
        assert (status, again["tasks"][name]["changed"]) == (200, False)
    found = server.predict(IMAGE, "?tasks=v1.2&tasks=my%20fruits")["images"][0]
    assert list(found["answers"]) == ["v1.2", "my fruits"]
    before = server.predict(IMAGE, "?tasks=tags")["images"][0]["answers"]
    new = file_of(tmp_path, random_task(backbone, "tags", seed=90))
    assert server.request("PUT", "/v1/tasks/tags", new)[0] == 201
    after = server.predict(IMAGE, "?tasks=tags")["images"][0]["answers"]
    assert set(after["tags"]) == {"label", "probability", "probabilities"}, "it has another kind of head now"
    assert set(before["tags"]) == {"labels", "probabilities"}
    assert server.request("DELETE", "/v1/tasks/weight")[0] == 204
    assert server.request("DELETE", "/v1/tasks/weight")[0] == 404
    assert "weight" not in server.predict(IMAGE)["images"][0]["answers"]
    folder = tmp_path / "tasks"
    assert all(file.parent == folder for file in tmp_path.rglob("*.safetensors") if file.name != "upload.safetensors")
    assert in_folder(folder) == contents(server.store)
    assert dict(open_store([folder], lambda _: backbone).current.info) == dict(server.store.current.info)


def test_bundles_are_taken_apart(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    first = random_task(backbone, "first", seed=20)
    second = random_task(backbone, "second", seed=21, extends=[first])
    bundle = file_of(tmp_path, second, first)
    status, _, found = server.request("PUT", "/v1/tasks/first", bundle)
    assert (status, "upload it to /v1/tasks" in found["error"]) == (422, True)
    status, _, found = server.request("PUT", "/v1/tasks", bundle)
    assert (status, set(found["tasks"])) == (201, {"first", "second"})
    assert {"first.safetensors", "second.safetensors"} <= {file.name for file in (tmp_path / "tasks").iterdir()}
    # A bundle that was in the folder from the start loses one task, and the other stays.
    assert server.request("DELETE", "/v1/tasks/breeds")[0] == 204
    assert [task.name for task in load_tasks(tmp_path / "tasks" / "both.safetensors")] == ["pets"]
    assert server.request("DELETE", "/v1/tasks/pets")[0] == 204
    assert not (tmp_path / "tasks" / "both.safetensors").exists()


def test_parents_are_protected(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    before = contents(server.store)
    status, _, found = server.request("DELETE", "/v1/tasks/pets")
    assert (status, found["error"]) == (409, "cannot detach 'pets', because 'breeds' extends it: detach that first.")
    other = random_task(backbone, "pets", labels=["cat", "dog"], seed=77)
    status, _, found = server.request("PUT", "/v1/tasks/pets", file_of(tmp_path, other))
    assert (status, found["error"]) == (409, "cannot replace 'pets', because 'breeds' extends it: detach that first.")
    orphan = random_task(backbone, "orphan", extends=[random_task(backbone, "missing")])
    status, _, found = server.request("PUT", "/v1/tasks/orphan", file_of(tmp_path, orphan))
    assert (status, "attach 'missing' too" in found["error"]) == (422, True)
    estranged = random_task(backbone, "estranged", extends=[other])
    status, _, found = server.request("PUT", "/v1/tasks/estranged", file_of(tmp_path, estranged))
    assert (status, "different version of 'pets'" in found["error"]) == (422, True)
    assert contents(server.store) == before == in_folder(tmp_path / "tasks")


def hostile(backbone: Backbone, tmp_path: Path) -> dict[str, bytes]:
    """Files that must be refused, by what is wrong with them."""
    good = file_of(tmp_path, random_task(backbone, "new", cells=1))
    record = good[8 : 8 + int.from_bytes(good[:8], "little")]
    huge, wrong = random_task(backbone, "huge"), random_task(backbone, "wrong")
    huge.describe(preprocessing=backbone.preprocessing.at(4096))
    wrong.describe(preprocessing=backbone.preprocessing.at(2))  # less than one patch
    loud = random_task(backbone, "loud", from_layer=backbone.depth, cells=0)
    loud.head.weight.data.fill_(3e38)
    other = memoro.load_backbone(CASES[0].model(seed=8))
    return {
        "empty": b"",
        "no safetensors": b"GIF89a" + bytes(100),
        "truncated": good[:-5],
        "changed weights": good[:-1] + bytes([good[-1] ^ 1]),
        "a header of terabytes": (1 << 42).to_bytes(8, "little") + good[8:],
        "no record": save(load(good)),
        "a path as name": good.replace(b'\\"name\\":\\"new\\"', b'\\"name\\":\\"../\\"'),
        "pickle": b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
        "a newer format": re.sub(rb'(\\"format\\":)\d', rb"\g<1>9", good),
        "another backbone": file_of(tmp_path, random_task(other, "stranger")),
        "the name of all tasks": file_of(tmp_path, random_task(backbone, "all")),
        "images of 4096 pixels": file_of(tmp_path, huge),
        "images of 2 pixels": file_of(tmp_path, wrong),
        "answers that are not finite": file_of(tmp_path, loud),
        "nothing but a header": len(record).to_bytes(8, "little") + record,
    }


def test_hostile_files_change_nothing(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    before = contents(server.store)
    files = hostile(backbone, tmp_path)
    assert len(set(files.values())) == len(files)
    for what, data in files.items():
        status, _, found = server.request("PUT", "/v1/tasks", data)
        assert status == 422, (what, status, found)
        assert "Traceback" not in found["error"]
        assert str(tmp_path) not in found["error"], what
        assert "/tmp" not in found["error"], what
    assert contents(server.store) == before == in_folder(tmp_path / "tasks")
    assert not Path("pwned").exists()


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "%2Fetc%2Fpasswd", "..", ".hidden", "a%00b", "C%3A%5Cx"])
def test_names_cannot_leave_the_folder(server: Running, backbone: Backbone, tmp_path: Path, name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    data = (tmp_path / "tasks" / "tags.safetensors").read_bytes()
    for method, target in itertools.product(("PUT", "GET", "DELETE"), (f"/v1/tasks/{name}", f"/v1/tasks/{name}/file")):
        assert 400 <= server.request(method, target, data if method == "PUT" else None)[0] < 500
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_requests_see_the_old_set_or_the_new_one(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    """While two tasks that belong together come and go, no request fails and none sees one of them."""
    one = random_task(backbone, "one", seed=30, cells=1)
    bundle = file_of(tmp_path, one, random_task(backbone, "two", seed=31, extends=[one], cells=1))
    right = {**server.store.current.model.predict(IMAGE)[0]}
    stop, problems, seen = threading.Event(), list[Any](), set[frozenset[str]]()

    def ask() -> None:
        with memoro.Client(server.url) as client:
            while not stop.is_set():
                try:
                    (found,) = client.predict(IMAGE, top=9)
                except memoro.MemoroError as error:
                    problems.append(error)
                    return
                seen.add(frozenset(found) - frozenset(right))
                if found["weight"]["values"]["kg"] != pytest.approx(right["weight"]["values"]["kg"], abs=1e-5):
                    problems.append(found)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert server.request("PUT", "/v1/tasks", bundle)[0] == 201
        server.predict(IMAGE)
        assert server.request("DELETE", "/v1/tasks/two")[0] == 204
        assert server.request("DELETE", "/v1/tasks/one")[0] == 204
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert seen <= {frozenset(), frozenset({"one"}), frozenset({"one", "two"})}
    assert len(seen) >= 2


def test_single_files_cannot_be_changed(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "tasks", backbone)
    with serving(backbone, tmp_path / "tasks" / "tags.safetensors", tmp_path / "tasks" / "both.safetensors") as server:
        assert list(server.predict(IMAGE)["images"][0]["answers"]) == ["tags", "pets", "breeds"]
        data = file_of(tmp_path, random_task(backbone, "new"))
        for method, target in (("PUT", "/v1/tasks/new"), ("PUT", "/v1/tasks"), ("DELETE", "/v1/tasks/tags")):
            status, _, found = server.request(method, target, data)
            assert (status, "--tasks FOLDER" in found["error"]) == (403, True)
        assert server.request("GET", "/v1/tasks")[2]["writable"] is False


def test_an_empty_folder_and_no_tasks_at_all(backbone: Backbone, tmp_path: Path) -> None:
    with serving(backbone, tmp_path / "new" / "folder") as server:
        found = server.predict(IMAGE, "?base=true")["images"][0]
        assert found["answers"] == {}
        assert len(found["base"]) == 7
        assert server.request("PUT", "/v1/tasks", file_of(tmp_path, random_task(backbone, "new")))[0] == 201
    assert in_folder(tmp_path / "new" / "folder").keys() == {"new"}


def test_problems_at_the_start_are_named(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "tasks", backbone)
    (tmp_path / "tasks" / "copy.safetensors").write_bytes((tmp_path / "tasks" / "tags.safetensors").read_bytes())
    with pytest.raises(CompositionError, match=r"'tags', in .*copy.safetensors and in .*tags.safetensors"):
        open_store([tmp_path / "tasks"], lambda _: backbone)
    with pytest.raises(ServeError, match="one folder, or files"):
        open_store([tmp_path / "tasks", tmp_path / "tasks" / "tags.safetensors"], lambda _: backbone)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ServeError, match="cannot use the folder"):
        open_store([tmp_path / "file" / "inside"], lambda _: backbone)


def test_a_full_disk_changes_nothing(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "tasks", backbone)
    store = open_store([tmp_path / "tasks"], lambda _: backbone)
    before, replace, left = in_folder(tmp_path / "tasks"), os.replace, [1]

    def full(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    bundle = file_of(tmp_path, random_task(backbone, "tags", seed=50), random_task(backbone, "zoo", seed=51))
    left[0] = 1  # the first of the two is written
    with pytest.raises(ServeError, match="disk full") as caught:
        store.attach(bundle)
    assert caught.value.status == 507
    assert contents(store) == before == in_folder(tmp_path / "tasks")


CRASHES = ["write", "fsync", "before rename", "after rename"]


@pytest.mark.parametrize("action", ["new", "replace", "detach"])
@pytest.mark.parametrize("moment", CRASHES)
def test_kill_during_an_attach(backbone: Backbone, tmp_path: Path, action: str, moment: str) -> None:
    """SIGKILL at each step of the writing: after a restart the task is there whole, or as it was."""
    fill(tmp_path / "tasks", backbone)
    store = open_store([tmp_path / "tasks"], lambda _: backbone)
    before = in_folder(tmp_path / "tasks")
    task = random_task(backbone, {"new": "new", "replace": "tags", "detach": "breeds"}[action], seed=60)
    data = file_of(tmp_path, task)
    child = in_fork(_attach_and_die, store, data, action, moment)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    after = contents(open_store([tmp_path / "tasks"], lambda _: backbone))
    whole = {**before, task.name: task.content_hash()}
    if action == "detach":
        del whole["breeds"]
    assert after == (whole if moment == "after rename" else before)
    assert after != (before if moment == "after rename" else whole)


def _attach_and_die(store: TaskStore, data: bytes, action: str, moment: str) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    replace, opened = os.replace, Path.open
    if moment == "write":

        def half(path: Path, mode: str = "r", *rest: Any) -> Any:
            file = opened(path, mode, *rest)
            if mode != "xb" or path.parent.name != "tasks":
                return file
            file.write(data[: len(data) // 2])
            file.flush()
            return die()

        Path.open = half  # type: ignore[method-assign, assignment]
    elif moment == "fsync":
        os.fsync = die
    else:

        def rename(source: Any, target: Any) -> None:
            if Path(target).parent.name == "tasks":
                if moment == "after rename":
                    replace(source, target)
                die()
            replace(source, target)

        os.replace = rename
    store.detach("breeds") if action == "detach" else store.attach(data)


def test_a_missing_extra_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from memoro import extras
    from memoro.cli.serving import serve

    found: Callable[..., Any] = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "fastapi" else found(name))
    with pytest.raises(memoro.MemoroError, match=r"fastapi required.*pip install 'memoro\[serve\]'"):
        serve()
