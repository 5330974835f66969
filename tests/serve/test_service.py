"""What the server answers: the same as the library, in every form of a request, with few passes."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from answering import IMAGES, close, expected, server
from conftest import random_task
from PIL import Image
from serving import Running, backbone, folder, know, multipart, picture, serving, wait_until

import memoro
from memoro.backbones import Backbone
from memoro.engine import composition as composition_module
from memoro.engine.composition import Composition
from memoro.serve import batching, bodies
from memoro.serve.batching import Batcher
from memoro.serve.guard import Metrics

__all__ = ["backbone", "expected", "folder", "server"]  # fixtures


def test_all_forms_of_a_request_give_the_answers_of_the_library(
    server: Running, expected: list[dict[str, Any]]
) -> None:
    assert set(expected[0]) == {"pets", "breeds", "tags", "weight", "top", "large"}
    assert not close(expected[0]["pets"], expected[1]["pets"])
    raw = server.predict(IMAGES[0], "?top_k=9", content_type="image/png")
    assert close(raw["images"][0]["answers"], expected[0])
    assert server.predict(IMAGES[0], "?top_k=9")["images"][0]["name"] == "image"  # without a content type
    body, headers = multipart(*IMAGES)
    form = server.predict(body, "?top_k=9", **headers)
    assert [image["name"] for image in form["images"]] == [f"{n}.png" for n in range(5)]
    document = json.dumps({"images": [base64.b64encode(image).decode() for image in IMAGES]}).encode()
    in_json = server.predict(document, "?top_k=9", content_type="application/json")
    for found in (form, in_json):
        for image, right in zip(found["images"], expected, strict=True):
            assert close(image["answers"], right)
    assert set(form["seconds"]) == {"decode", "queue", "backbone", "tasks", "total"}
    info = server.request("GET", "/v1/tasks/pets")[2]
    assert form["tasks"]["pets"]["version"] == info["content"][:12]
    assert raw["passes"] == 2, "one task has another input size"
    assert server.predict(IMAGES[0], "?tasks=pets,tags")["passes"] == 1


def test_unknown_query_parameters_are_refused(server: Running) -> None:
    for query in ("?task=pets", "?top=1"):
        status, _, found = server.request("POST", f"/v1/predict{query}", IMAGES[0], content_type="image/png")
        assert (status, query[1:4] in str(found)) == (422, True), found


def test_tasks_top_k_and_base(server: Running, expected: list[dict[str, Any]]) -> None:
    for query in ("?tasks=tags,pets&top_k=1", "?tasks=pets&tasks=tags&top_k=1"):
        found = server.predict(IMAGES[1], query)["images"][0]
        assert list(found["answers"]) == ["pets", "tags"]
        assert list(found["answers"]["tags"]["probabilities"]) == list(expected[1]["tags"]["probabilities"])[:1]
        assert found["answers"]["tags"]["labels"] == expected[1]["tags"]["labels"]
        assert "base" not in found
    model = server.store.current.model
    pixels = model.backbone.preprocessing.to_tensor(Image.open(io.BytesIO(IMAGES[1])).convert("RGB"))
    right = model.backbone.original(pixels.unsqueeze(0))[0].tolist()
    assert server.predict(IMAGES[1], "?base=true")["images"][0]["base"] == pytest.approx(right, abs=1e-5)


def test_an_unreadable_image_does_not_affect_the_others(server: Running, expected: list[dict[str, Any]]) -> None:
    body, headers = multipart(IMAGES[0], b"not an image", IMAGES[2])
    first, second, third = server.predict(body, "?top_k=9", **headers)["images"]
    assert close(first["answers"], expected[0])
    assert close(third["answers"], expected[2])
    assert second == {"name": "1.png", "error": "1.png: not a readable image (no known format)."}
    status, _, found = server.request("POST", "/v1/predict", b"not an image")
    assert (status, found) == (422, {"error": "image: not a readable image (no known format)."})


@pytest.mark.parametrize(
    ("target", "body", "headers", "status", "message"),
    [
        ("/v1/predict?tasks=cars", IMAGES[0], {}, 404, "there is no task 'cars'"),
        ("/v1/predict?top_k=0", IMAGES[0], {}, 422, "top_k: "),
        ("/v1/predict?base=maybe", IMAGES[0], {}, 422, "base: "),
        ("/v1/predict", b"", {}, 422, "no body"),
        ("/v1/predict", b"{", {"content_type": "application/json"}, 400, "not valid JSON"),
        ("/v1/predict", b"[" * 100_000, {"content_type": "application/json"}, 400, "not valid JSON"),
        ("/v1/predict", b'{"images": []}', {"content_type": "application/json"}, 422, "at least one image"),
        (
            "/v1/predict",
            b'{"images": ["AA=="], "top_k": 1}',
            {"content_type": "application/json"},
            422,
            "unknown key 'top_k'",
        ),
        ("/v1/predict", b'{"images": ["?"]}', {"content_type": "application/json"}, 422, "image 1 is not base64"),
        ("/v1/predict", b"--B--\r\n", {"content_type": "multipart/form-data; boundary=B"}, 422, "no file"),
        ("/v1/predict", b"x", {"content_type": "multipart/form-data"}, 400, "boundary"),
        (
            "/v1/predict",
            multipart(IMAGES[0])[0],
            {"content_type": "multipart/form-data; boundary=B; charset=undefined"},
            400,
            "charset",
        ),
        ("/v1/nothing", b"x", {}, 404, "Not Found"),
        ("/v1/tasks", b"x", {}, 405, "Method Not Allowed"),
    ],
)
def test_bad_requests(
    server: Running, target: str, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    found, _, answer = server.request("POST", target, body, **headers)
    assert found == status
    assert message in answer["error"]


def test_images_share_passes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    own = composition_module.run_streams

    def count(anatomy: Any, pixels: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(pixels[0]))
        return own(anatomy, pixels, *rest, **options)

    monkeypatch.setattr(composition_module, "run_streams", count)
    body, headers = multipart(*(picture(seed) for seed in range(10)))
    before = server.metric("memoro_backbone_passes_total")
    server.predict(body, "?tasks=pets,breeds,tags,weight,top", **headers)  # 10 images, 5 tasks, batches of 4
    assert sizes == [4, 4, 2]
    assert server.metric("memoro_backbone_passes_total") - before == 3
    sizes.clear()
    server.predict(body, **headers)  # one task more, of another size: two groups
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_requests_share_passes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    own = composition_module.run_streams

    def wait(anatomy: Any, pixels: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(pixels[0]))
        begun.set()
        assert go_on.wait(30)
        return own(anatomy, pixels, *rest, **options)

    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        name = ["pets", "tags", "weight"][number % 3]
        found[number] = server.predict(IMAGES[number], f"?tasks={name}&top_k=9")["images"][0]["answers"]

    expected = server.store.current.model.predict(IMAGES, batch_size=1)
    monkeypatch.setattr(composition_module, "run_streams", wait)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    threads[0].start()
    assert begun.wait(30)  # the first is in its pass; the other four gather meanwhile
    for thread in threads[1:]:
        thread.start()
    decoded = 'memoro_stage_seconds_count{stage="decode"}'
    wait_until(lambda: server.metric("memoro_queue_images") >= 5 and server.metric(decoded) >= 5)
    go_on.set()
    for thread in threads:
        thread.join()
    assert sizes[0] == 1
    assert sum(sizes) == 5
    assert max(sizes) >= 2
    for number in range(5):
        (name,) = found[number]
        assert close(found[number][name], expected[number][name])


def test_explain(server: Running) -> None:
    status, _, found = server.request("POST", "/v1/explain?tasks=breeds,top,large&top_k=9", IMAGES[3])
    assert status == 200
    answers = found["images"][0]["answers"]
    plain = server.predict(IMAGES[3], "?tasks=breeds,top,large&top_k=9")["images"][0]["answers"]
    attention = answers["breeds"].pop("attention")
    assert close(answers["breeds"], plain["breeds"])
    assert attention["layers"] == [0, 1, 2, 3, 4]
    assert [len(attention["heatmap"]), len(attention["heatmap"][0])] == [5, 5]
    for layer in range(5):
        parts = [attention[part][layer] for part in ("patches", "prefix", "itself", "memory")]
        assert sum(parts) + attention["parents"]["pets"][layer] == pytest.approx(1, abs=1e-5)
    assert max(attention["parents"]["pets"]) > 0
    head = answers["top"]["attention"]  # which has no layers of its own
    assert (head["source"], len(head["heatmap"])) == ("the base's class token", 5)
    assert attention["source"] != head["source"]
    assert len(answers["large"]["attention"]["heatmap"]) == 7
    body, headers = multipart(*[IMAGES[0]] * 11)
    status, _, found = server.request("POST", "/v1/explain", body, **headers)
    assert (status, "tasks=" in found["error"]) == (413, True)


def test_other_requests_run_between_maps(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    called, order, go_on = list[Any](), list[str](), threading.Event()
    call, run, explain = Batcher.call, batching.run_pass, Composition.explain

    async def count(batcher: Batcher, function: Any) -> Any:
        called.append(function)
        return await call(batcher, function)

    def first(*given: Any, **options: Any) -> Any:
        order.append("map")
        assert go_on.wait(30)
        return explain(*given, **options)

    def second(*given: Any) -> Any:
        order.append("pass")
        return run(*given)

    monkeypatch.setattr(Batcher, "call", count)
    monkeypatch.setattr(Composition, "explain", first)
    monkeypatch.setattr(batching, "run_pass", second)
    target = "/v1/explain?tasks=pets&tasks=tags"
    body, headers = multipart(IMAGES[0], IMAGES[1])
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(server.request("POST", target, body, **headers)[0])),
        threading.Thread(target=lambda: found.append(server.request("POST", "/v1/predict?tasks=pets", IMAGES[2])[0])),
    ]
    threads[0].start()
    wait_until(lambda: order == ["pass", "map"])
    threads[1].start()
    wait_until(lambda: len(called) == 3)
    go_on.set()
    for thread in threads:
        thread.join()
    assert found.count(200) == 2
    assert order == ["pass", "map", "pass", "map"], "a map of both tasks for each image"


def test_long_documents_are_read_off_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    own, threads = bodies.decode_base64, list[str]()

    def decode(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return own(*given)

    monkeypatch.setattr(bodies, "decode_base64", decode)
    document = json.dumps({"images": [base64.b64encode(IMAGES[0]).decode()]}).encode()
    server.predict(document, content_type="application/json")
    assert [name.rpartition("_")[0] for name in threads] == ["memoro-read"]


def test_requests_of_a_pass_ask_for_different_numbers_of_labels(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, run = threading.Event(), batching.run_pass

    def wait(*given: Any) -> Any:
        assert held.wait(30)
        return run(*given)

    monkeypatch.setattr(batching, "run_pass", wait)
    shown: dict[int, Any] = {}

    def ask(top: int) -> None:
        shown[top] = server.predict(IMAGES[0], f"?tasks=tags&top_k={top}")["images"][0]["answers"]["tags"]

    threads = [threading.Thread(target=ask, args=(top,)) for top in (1, 2, 3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.metric("memoro_queue_images") >= 3)
    held.set()
    for thread in threads:
        thread.join()
    assert {top: len(answer["probabilities"]) for top, answer in shown.items()} == {1: 1, 2: 2, 3: 3}
    assert list(shown[2]["probabilities"]) == list(shown[3]["probabilities"])[:2]


@pytest.fixture(scope="module")
def judging(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """To `pets` every image is familiar, to `rooms` none; `plain` cannot tell."""
    folder = tmp_path_factory.mktemp("judging")
    pets, rooms = (
        know(random_task(backbone, name, seed=seed), far) for seed, name, far in ((1, "pets", 1e6), (2, "rooms", -1e6))
    )
    for task in (pets, rooms, random_task(backbone, "plain", seed=3)):
        memoro.save_task(task, folder / f"{task.name}.safetensors")
    with serving(backbone, folder) as running:
        yield running


def test_unfamiliar_images_are_marked_dropped_or_kept(judging: Running) -> None:
    model = judging.store.current.model
    document = json.dumps({"images": [base64.b64encode(IMAGES[0]).decode()]}).encode()
    body, headers = multipart(IMAGES[0])
    forms: list[tuple[bytes, dict[str, str]]] = [
        (IMAGES[0], {}), (document, {"content_type": "application/json"}), (body, headers)
    ]  # fmt: skip
    for query, options in (
        ("", {}),
        ("&unfamiliar=drop", {"unfamiliar": "drop"}),
        ("&unfamiliar=keep", {"unfamiliar": "keep"}),
        ("&unfamiliar=drop&false_alarms=0", {"unfamiliar": "drop", "false_alarms": 0.0}),
    ):
        (right,) = model.predict([IMAGES[0]], **options)
        for data, form in forms:
            found = judging.predict(data, f"?top_k=9{query}", **form)["images"][0]["answers"]
            assert close(found, right), (query, form)
        with memoro.Client(judging.url) as client:
            assert close(client.predict(IMAGES[0], top=9, **options)[0], right)
        _, _, explained = judging.request("POST", f"/v1/explain?top_k=9{query}", IMAGES[0])
        answers = explained["images"][0]["answers"]
        assert all("attention" in answer for answer in answers.values())
        assert set(answers) == set(right)
    marked = judging.predict(IMAGES[0])["images"][0]["answers"]
    assert {name: answer.get("unfamiliar") for name, answer in marked.items()} == {
        "pets": False, "plain": None, "rooms": True
    }  # fmt: skip
    assert marked["pets"]["familiarity"] == 1
    assert marked["pets"]["score"] == pytest.approx(marked["rooms"]["score"])
    assert set(judging.predict(IMAGES[0], "?unfamiliar=drop")["images"][0]["answers"]) == {"pets", "plain"}
    assert "unfamiliar" not in judging.predict(IMAGES[0], "?unfamiliar=keep")["images"][0]["answers"]["rooms"]
    for query in ("unfamiliar=hide", "false_alarms=2", "false_alarms=nan"):
        status, _, found = judging.request("POST", f"/v1/predict?{query}", IMAGES[0])
        assert (status, query.partition("=")[0] in found["error"]) == (422, True)


def test_health_docs_and_metrics(server: Running) -> None:
    assert server.request("GET", "/healthz")[2] == {"status": "ok", "tasks": 6}
    for path in ("/healthz", "/metrics", "/"):  # as monitors ask
        assert server.request("HEAD", path)[0] == 200, path
    status, headers, page = server.request("GET", "/docs")
    assert status == 200
    assert "script" not in headers["content-security-policy"]
    text = page.decode()
    assert "/v1/predict" in text
    assert "<script" not in text
    assert "http://" not in text
    _, _, schema = server.request("GET", "/openapi.json")
    assert {"/v1/predict", "/v1/explain", "/v1/tasks/{name}/file", "/v2/models/{model}/infer"} <= set(schema["paths"])
    before = server.metric('memoro_task_answers_total{task="pets"}')
    server.predict(IMAGES[0], "?tasks=pets")
    assert server.metric('memoro_task_answers_total{task="pets"}') == before + 1
    errors = server.metric('memoro_errors_total{status="404"}')
    server.request("GET", "/v1/tasks/cars")
    assert server.metric('memoro_errors_total{status="404"}') == errors + 1
    for stage in ("decode", "queue", "backbone", "tasks"):
        assert server.metric(f'memoro_stage_seconds_sum{{stage="{stage}"}}') > 0
    assert server.metric("memoro_batch_size_count") > 0


def test_metrics_show_attached_tasks_only() -> None:
    """A pass that was running during a detach counts for the task afterwards."""
    metrics = Metrics()
    for name, images in (("pets", 2), ("gone", 3)):
        metrics.task_answers.labels(name).inc(images)
    text = metrics.render(["pets", "new"]).decode()
    assert 'memoro_task_answers_total{task="pets"} 2.0' in text
    assert "memoro_tasks 2.0" in text
    assert "gone" not in text
