"""The routes of /v1/teach: who may use them, what they write, and a training in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import Running, in_thread
from sessions import backbone, draw, fill, kept_elsewhere

import memoro
from memoro.backbones import Backbone
from memoro.errors import ServeError
from memoro.serve.options import ServeOptions
from memoro.serve.server import make_server
from memoro.serve.store import open_store
from memoro.teach.finishing import Finishing
from memoro.teach.routes import add_teaching, run_teaching
from memoro.teach.session import Session

__all__ = ["backbone", "kept_elsewhere"]  # fixtures

ROOT = "/v1/teach"


@contextmanager
def teaching(session: Session, tasks: Path, **given: Any) -> Iterator[Running]:
    """A server of `memoro teach` in a thread."""
    options = ServeOptions(port=0, decoders=2, **given)
    store = open_store([f"{tasks}/"], lambda record: session.backbone)
    command = ["teach", session.photos.place, "--finish", "--task", session.name]
    finishing = Finishing(
        command, tasks / "x.safetensors", tasks / "runs", lambda data: store.attach(data, session.name)
    )
    server = make_server(store, options, lambda app: add_teaching(app, session, finishing, ["memoro …"]))
    try:
        with in_thread(server, store, options) as running:
            yield running
    finally:
        finishing.close()


def post(running: Running, path: str, document: Any, **headers: str) -> tuple[int, Any]:
    given = {"content_type": "application/json", **headers}
    status, _, found = running.request("POST", f"{ROOT}{path}", json.dumps(document).encode(), **given)
    return status, found


def get(running: Running, path: str = "") -> Any:
    status, _, found = running.request("GET", f"{ROOT}{path}")
    assert status == 200, found
    return found


def test_label_see_guesses_undo(backbone: Backbone, tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos")
    with (
        memoro.teach(tmp_path / "photos", backbone=backbone) as session,
        teaching(session, tmp_path / "tasks") as server,
    ):
        session.wait()
        assert get(server)["labelled"] == 0
        assert server.request("GET", "/v1/tasks")[2]["teaching"] is True
        images = get(server, "/images?view=next&limit=9")["images"]
        entries = [{"key": one["key"], "state": "label", "label": truth[one["path"]]} for one in images]
        status, found = post(server, "/labels", {"entries": entries})
        assert (status, len(found["changed"]), found["refused"]) == (200, 9, 0)
        assert (tmp_path / "photos" / "labels.csv").read_text().count(",label\n") + 1 >= 9
        session.wait()
        state = get(server)
        assert (state["labelled"], state["solved"]) == (9, state["version"])
        assert {one["label"]: one["images"] for one in state["classes"]}.keys() == set(truth.values())
        rest = get(server, "/images?view=unlabelled")["images"]
        assert all(one["guess"] == truth[one["path"]] for one in rest)
        again = get(server, f"/images?keys={rest[0]['key']}&keys={rest[1]['key']}")["images"]
        assert [one["key"] for one in again] == [rest[0]["key"], rest[1]["key"]]
        first = found["changed"][0]
        undo = {"key": first["key"], "state": first["before"]["state"], "row": first["now"]["row"]}
        assert post(server, "/labels", {"entries": [undo]})[1]["refused"] == 0
        assert post(server, "/labels", {"entries": [undo]})[1]["refused"] == 1  # it is not that row any more
        assert get(server)["labelled"] == 8
        table = server.request("GET", f"{ROOT}/table")[2].decode().splitlines()
        assert (table[0], len(table)) == ("path,label", 9)


def test_pictures_are_small_and_named_by_key_only(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 1)
    (tmp_path / "secret.png").write_bytes(b"x")
    with (
        memoro.teach(tmp_path / "photos", backbone=backbone) as session,
        teaching(session, tmp_path / "tasks") as server,
    ):
        key = get(server, "/images?view=all")["images"][0]["key"]
        status, headers, data = server.request("GET", f"{ROOT}/images/{key}")
        assert (status, headers["content-type"], data[:2]) == (200, "image/jpeg", b"\xff\xd8")
        for bad in ("00-0.png", "../secret.png", "..%2fsecret.png", "%2e%2e", "0" * 20):
            assert server.request("GET", f"{ROOT}/images/{bad}")[0] == 404
        assert post(server, "/labels", {"entries": [{"key": "../secret.png", "state": "skip"}]})[0] == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"entries": []},
        {"entries": [{"key": 1, "state": "label"}]},
        {"entries": [{"key": "k", "state": "burn"}]},
        {"entries": [{"key": "k", "state": "label", "path": "/etc/passwd"}]},
        {"entries": [{"key": "k", "state": "skip"}] * 1001},
    ],
)
def test_malformed_decisions(backbone: Backbone, tmp_path: Path, body: Any) -> None:
    fill(tmp_path / "photos", 1)
    with (
        memoro.teach(tmp_path / "photos", backbone=backbone) as session,
        teaching(session, tmp_path / "tasks") as server,
    ):
        assert post(server, "/labels", body)[0] == 422
        key = session.photos.keys[0]
        for label in ("", "a\nb", None, ["a"], 3):
            assert post(server, "/labels", {"entries": [{"key": key, "state": "label", "label": label}]})[0] == 422
        assert get(server)["labelled"] == 0


def test_other_sites_other_hosts_and_strangers(backbone: Backbone, tmp_path: Path) -> None:
    fill(tmp_path / "photos", 1)
    with memoro.teach(tmp_path / "photos", backbone=backbone) as session:
        with teaching(session, tmp_path / "tasks") as server:
            assert server.request("GET", ROOT, origin="http://evil.example")[0] == 403
            assert server.request("GET", ROOT, host="evil.example")[0] == 403
            one = {"entries": [{"key": session.photos.keys[0], "state": "label", "label": "x"}]}
            assert post(server, "/labels", one, x_forwarded_for="1.2.3.4")[0] == 403
            assert post(server, "/labels", one, origin="null")[0] == 403
            assert get(server)["classes"] == []
            assert post(server, "/labels", one)[0] == 200
            assert [row["label"] for row in get(server)["classes"]] == ["x"]
        with teaching(session, tmp_path / "tasks", token="secret-token") as server:
            assert server.request("GET", ROOT)[0] == 401
            assert server.request("GET", f"{ROOT}/images/{session.photos.keys[0]}")[0] == 401
            assert server.request("GET", ROOT, authorization="Bearer secret-token")[0] == 200
        with pytest.raises(ServeError, match="needs a `token`"):
            run_teaching(session, tmp_path / "tasks", [], ServeOptions(host="0.0.0.0", port=0))


def test_training_attaches_the_task_while_labelling_goes_on(tmp_path: Path) -> None:
    truth = fill(tmp_path / "photos", 6)
    with memoro.teach(tmp_path / "photos", task="colours") as session, teaching(session, tmp_path / "tasks") as server:
        assert post(server, "/train", {})[0] == 422
        for path, colour in list(truth.items())[:15]:
            session.label(path, colour)
        session.wait()
        assert post(server, "/train", {})[1]["state"] == "training"
        assert post(server, "/train", {})[0] == 422  # one at a time
        session.label("05-2.png", "blue")
        end = time.monotonic() + 300
        while (found := get(server)["training"])["state"] == "training":
            assert time.monotonic() < end
            time.sleep(0.2)
        assert (found["state"], found["labels"], found["split"]) == ("done", 15, "4 folds")
        assert found["score"] > 0.6
        assert found["before"]["images"] == 15
        assert (found["file"], found["report"]) == (str(tmp_path / "tasks" / "x.safetensors"), True)
        status, headers, report = server.request("GET", f"{ROOT}/report")
        assert (status, headers["content-disposition"]) == (200, "attachment")
        assert b"colours" in report
        assert server.store.current.model.names == ["colours"]
        draw("red", 123).save(tmp_path / "new.png")
        data = (tmp_path / "new.png").read_bytes()
        assert server.predict(data)["images"][0]["answers"]["colours"]["label"] == "red"
        status, _, kept = server.request("POST", f"{ROOT}/images?label=red", data)
        assert (status, kept["path"].split("/")[0]) == (200, "corrections")
        assert server.request("POST", f"{ROOT}/images?label=red", b"junk")[0] == 422


def test_a_training_that_fails_says_why(backbone: Backbone, tmp_path: Path) -> None:
    failing = Finishing(["teach", str(tmp_path / "nothing"), "--finish"], tmp_path / "x", tmp_path, lambda data: None)
    failing.start(3)
    end = time.monotonic() + 120
    while failing.state == "training":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert failing.state == "failed"
    assert "nothing" in failing.to_json()["message"]
