"""Attach and detach: all at once, kept in the folder, and nothing changes when something is wrong."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from conftest import in_fork, random_task
from families import CASES
from safetensors.torch import load, save
from serving import Running, backbone, contents, file_of, fill, in_folder, know, picture, serving, wait_until

import memoro
from memoro.backbones import Backbone
from memoro.errors import ServeError
from memoro.evaluation.inspect import inspect_tasks
from memoro.serve.store import TaskStore, open_store
from memoro.tasks.calibration import Calibration
from memoro.tasks.taskfile import load_tasks

__all__ = ["backbone"]  # fixtures


IMAGE = picture(1)


@pytest.fixture
def server(backbone: Backbone, tmp_path: Path) -> Iterator[Running]:
    fill(tmp_path / "tasks", backbone)
    with serving(backbone, tmp_path / "tasks") as running:
        yield running


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


def test_the_size_of_a_task_is_that_of_its_file(server: Running, tmp_path: Path) -> None:
    sizes = {task["name"]: task["bytes"] for task in server.request("GET", "/v1/tasks")[2]["tasks"]}
    for name, size in sizes.items():
        assert len(server.request("GET", f"/v1/tasks/{name}/file")[2]) == size
        if (file := tmp_path / "tasks" / f"{name}.safetensors").exists():  # the others are in a bundle
            assert inspect_tasks(file, memoro.load_tasks(file))["bytes"] == size
    assert len(set(sizes.values())) > 3


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


def test_a_bundle_that_changes_a_bundle(backbone: Backbone, tmp_path: Path) -> None:
    """All tasks of a file are replaced in it, and those that the upload leaves alone stay in it."""
    names = ["first", "second", "third"]
    (tmp_path / "tasks").mkdir()
    old = [random_task(backbone, name, seed=20 + at) for at, name in enumerate(names)]
    memoro.save_tasks(old, tmp_path / "tasks" / "bundle.safetensors")
    store = open_store([tmp_path / "tasks"], lambda _: backbone)
    first, second = (random_task(backbone, name, seed=30 + at) for at, name in enumerate(names[:2]))
    found = store.attach(file_of(tmp_path, first, second))
    assert {name: one["changed"] for name, one in found.items()} == {"first": True, "second": True}
    right = {task.name: task.content_hash() for task in (first, second, old[2])}
    assert contents(store) == in_folder(tmp_path / "tasks") == right


def test_a_task_that_is_calibrated_again_is_replaced(server: Running, backbone: Backbone, tmp_path: Path) -> None:
    """Its content hash stays the same, so tasks may extend it meanwhile."""
    (pets,) = (task for task in load_tasks(tmp_path / "tasks" / "both.safetensors") if task.name == "pets")
    before, version = server.predict(IMAGE, "?tasks=pets"), contents(server.store)
    for change in (
        {"calibration": Calibration((4.0,), (), (), 30, "validation")},
        {"familiarity": know(pets, 3.0).spec.familiarity},
        {"familiarity": know(pets, 4.0).spec.familiarity},  # of the same sizes
    ):
        pets.update_spec(**change)
        for changed in (True, False):
            status, _, found = server.request("PUT", "/v1/tasks/pets", file_of(tmp_path, pets))
            assert (status, found["tasks"]["pets"]["changed"]) == (201 if changed else 200, changed), change
    assert contents(server.store) == version == in_folder(tmp_path / "tasks")
    after = server.predict(IMAGE, "?tasks=pets")
    assert after["tasks"] == before["tasks"]
    answers = [found["images"][0]["answers"]["pets"] for found in (before, after)]
    assert answers[0]["label"] == answers[1]["label"]
    assert 0.5 <= answers[1]["probability"] < answers[0]["probability"]
    assert "familiarity" in answers[1]
    again = open_store([tmp_path / "tasks"], lambda _: backbone).current
    assert again.info["pets"] == server.store.current.info["pets"]
    assert float(again.model.tasks["pets"].spec.familiarity.held_out[0]) == 4.0  # type: ignore[union-attr]


def test_a_detach_at_the_same_time(server: Running, backbone: Backbone, tmp_path: Path, monkeypatch: Any) -> None:
    """An attach answers with what it attached, even if that is gone when the answer is written."""
    own = TaskStore.attach

    def attach(store: TaskStore, *given: Any) -> Any:
        found = own(store, *given)
        store.detach("new")
        return found

    monkeypatch.setattr(TaskStore, "attach", attach)
    task = random_task(backbone, "new", seed=8)
    status, _, found = server.request("PUT", "/v1/tasks/new", file_of(tmp_path, task))
    assert (status, found) == (201, {"tasks": {"new": {"version": task.content_hash()[:12], "changed": True}}})


def test_a_change_that_waits_does_not_stop_decoding(backbone: Backbone, tmp_path: Path, monkeypatch: Any) -> None:
    fill(tmp_path / "tasks", backbone)
    begun, own = threading.Event(), TaskStore.detach

    def detach(store: TaskStore, name: str) -> None:
        begun.set()
        own(store, name)

    monkeypatch.setattr(TaskStore, "detach", detach)
    with serving(backbone, tmp_path / "tasks", decoders=1) as server:
        thread = threading.Thread(target=server.request, args=("DELETE", "/v1/tasks/tags"))
        with server.store._lock:
            thread.start()
            assert begun.wait(30)
            assert "tags" in server.predict(IMAGE, x_request_timeout_ms="9000")["images"][0]["answers"]
        thread.join()
        assert "tags" not in server.predict(IMAGE)["images"][0]["answers"]


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
    huge.update_spec(preprocessing=backbone.preprocessing.at(2048))
    wrong.update_spec(preprocessing=backbone.preprocessing.at(2))  # less than one patch
    cut = random_task(backbone, "cut")
    cut.update_spec(preprocessing=memoro.Preprocessing(resize=2048, crop=(20, 20)))
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
        "images of 2048 pixels": file_of(tmp_path, huge),
        "images of 2048 pixels before the crop": file_of(tmp_path, cut),
        "images of 2 pixels": file_of(tmp_path, wrong),
        "answers that are not finite": file_of(tmp_path, loud),
        "nothing but a header": len(record).to_bytes(8, "little") + record,
    }


@pytest.mark.parametrize(
    ("resize", "crop", "status"),
    [(20, None, 201), (1025, None, 422), (1024, (20, 20), 201), (1025, (20, 20), 422), (None, (20, 20), 201)],
)
def test_input_sizes(
    server: Running, backbone: Backbone, tmp_path: Path, resize: int | None, crop: tuple[int, int] | None, status: int
) -> None:
    task = random_task(backbone, "new", from_layer=backbone.depth, cells=0)
    task.update_spec(preprocessing=memoro.Preprocessing(resize=resize, crop=crop))
    assert server.request("PUT", "/v1/tasks/new", file_of(tmp_path, task))[0] == status


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
        wait_until(lambda: frozenset({"one", "two"}) in seen or problems)
        assert server.request("DELETE", "/v1/tasks/two")[0] == 204
        assert server.request("DELETE", "/v1/tasks/one")[0] == 204
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert seen <= {frozenset(), frozenset({"one"}), frozenset({"one", "two"})}
    assert len(seen) >= 2


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
    left[0] = 0
    with pytest.raises(ServeError, match="nothing was changed; is the disk full") as caught:
        store.detach("breeds")
    assert (caught.value.status, str(tmp_path) in str(caught.value)) == (507, False)
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
