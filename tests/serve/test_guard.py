"""Limits, access, deadlines, clients that leave, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import in_fork
from PIL import Image
from serving import Gate, Running, backbone, folder, multipart, picture, serving, wait_until

import memoro
from memoro.backbones import Backbone
from memoro.errors import ServeError
from memoro.serve import batching
from memoro.serve.options import ServeOptions
from memoro.serve.server import listen, run_server
from memoro.serve.store import open_store

__all__ = ["backbone", "folder"]  # fixtures

IMAGE = picture()
TOKEN, READ = "write-secret", "read-secret"


@pytest.fixture(scope="module")
def server(backbone: Backbone, folder: Path) -> Iterator[Running]:
    limits: dict[str, Any] = {"max_body": 200_000, "max_images": 3, "max_pixels": 100_000, "max_queue": 16}
    with serving(backbone, folder, **limits) as running:
        yield running


def png(width: int, height: int) -> bytes:
    """A PNG of a given size in a few bytes: its pixels are missing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b"")
    )


# ------------------------------------------------------------------------------------------------------- limits


def test_sizes_are_checked_before_anything_is_decoded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("decoded")

    body, headers = multipart(*[IMAGE] * 3)
    server.predict(body, **headers)
    monkeypatch.setattr(Image.Image, "load", refuse)
    body, headers = multipart(*[IMAGE] * 4)
    status, _, found = server.request("POST", "/v1/predict", body, **headers)
    assert (status, "more than 3 images" in found["error"]) == (413, True), found
    many = b'{"images": [' + b",".join([b'"AAAA"'] * 4) + b"]}"
    assert server.request("POST", "/v1/predict", many, content_type="application/json")[0] == 413
    for size in ((400, 400), (60_000, 60_000), (2**31 - 1, 2**31 - 1)):
        status, _, found = server.request("POST", "/v1/predict", png(*size))
        assert status == 422
        assert "limit" in found["error"] or "not a readable" in found["error"]
    assert "limit of 100,000" in server.request("POST", "/v1/predict", png(400, 400))[2]["error"]
    for target in ("/v1/predict", "/v1/explain", "/v1/tasks", "/v2/models/all/infer"):
        method = "PUT" if target == "/v1/tasks" else "POST"
        assert server.request(method, target, bytes(200_001))[0] == 413
    assert server.request("POST", "/v1/predict?tasks=" + "x" * 20_000, IMAGE)[0] == 414


def test_a_body_that_lies_about_its_length(server: Running) -> None:
    """Chunked bodies state no length: they are counted as they come."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        for _ in range(4):  # 256 kB; it never ends
            connection.sendall(chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_real_formats_and_odd_sizes(server: Running) -> None:
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert server.predict(picture(2, form=form))["images"][0]["answers"]
    for size in ((1, 1), (1, 3000), (3000, 1)):
        assert server.predict(picture(size=size))["images"][0]["answers"]


# ------------------------------------------------------------------------------------------------------- access


def test_other_sites_cannot_reach_a_server_on_loopback(server: Running) -> None:
    host = server.url.removeprefix("http://")
    for name in (host, host.replace("127.0.0.1", "localhost"), "localhost", "LOCALHOST:1"):
        assert server.request("GET", "/healthz", host=name)[0] == 200, name
    for name in ("evil.example", f"evil.example:{host.partition(':')[2]}", "127.0.0.1.evil.example", "", "[::2]"):
        status, _, found = server.request("POST", "/v1/predict", IMAGE, host=name)
        assert (status, "--allow-host NAME" in found["error"]) == (403, True), name
    data = b"anything"
    for origin in ("http://evil.example", "null", f"https://{host}.evil.example", "http://localhost:1", "http://["):
        status, _, found = server.request("PUT", "/v1/tasks", data, origin=origin)
        assert (status, "other sites" in found["error"]) == (403, True), origin
    assert server.request("POST", "/v1/predict", IMAGE, origin=server.url)[0] == 200
    headers = server.request("GET", "/healthz")[1]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_tokens(backbone: Backbone, folder: Path) -> None:
    data = (folder / "tags.safetensors").read_bytes()
    with serving(backbone, folder, token=TOKEN, read_token=READ, host="0.0.0.0") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        for path in ("/healthz", "/v2/health/live", "/v2/health/ready"):
            assert server.request("GET", path, host="anything.example")[0] == 200
        for given in (None, "Bearer wrong", "Bearer ", "", READ, f"Basic {READ}", f"Bearer {READ}x", "Bearer \xff"):
            headers = {} if given is None else {"authorization": given}
            for method, path in (("POST", "/v1/predict"), ("GET", "/v1/tasks"), ("GET", "/metrics"), ("GET", "/docs")):
                status, found, _ = server.request(method, path, IMAGE if method == "POST" else None, **headers)
                assert (status, found.get("www-authenticate")) == (401, "Bearer"), (given, path)
        for token in (READ, TOKEN):
            assert server.request("POST", "/v1/predict", IMAGE, authorization=f"Bearer {token}")[0] == 200
        for method, path in (("PUT", "/v1/tasks"), ("PUT", "/v1/tasks/tags"), ("DELETE", "/v1/tasks/cars")):
            assert server.request(method, path, data, authorization=f"Bearer {READ}")[0] == 401
            assert server.request(method, path, data, authorization=f"Bearer {TOKEN}")[0] in {200, 404}
        with memoro.Client(server.url, token=READ) as client:
            assert client.predict(IMAGE, ["tags"])


def test_a_read_token_alone_is_needed_for_everything(backbone: Backbone, folder: Path) -> None:
    data = (folder / "tags.safetensors").read_bytes()
    with serving(backbone, folder, read_token=READ) as server:
        for method, path in (("PUT", "/v1/tasks"), ("PUT", "/v1/tasks/tags"), ("DELETE", "/v1/tasks/cars")):
            assert server.request(method, path, data)[0] == 401
            assert server.request(method, path, data, authorization=f"Bearer {READ}")[0] in {200, 404}
        assert server.request("GET", "/v1/tasks", authorization=f"Bearer {READ}")[2]["token_needed"] is True


def test_attaching_through_a_proxy_needs_a_token(backbone: Backbone, folder: Path) -> None:
    """A proxy on this machine makes every request look like one of this machine."""
    data = (folder / "tags.safetensors").read_bytes()
    with serving(backbone, folder) as server:
        for header in ("forwarded", "x_forwarded_for", "x_forwarded_proto", "via"):
            status, _, found = server.request("PUT", "/v1/tasks", data, **{header: "anything"})
            assert (status, "--token" in found["error"]) == (403, True), header
            assert server.request("POST", "/v1/predict", IMAGE, **{header: "anything"})[0] == 200
        assert server.request("PUT", "/v1/tasks", data)[0] == 200
    with serving(backbone, folder, token=TOKEN) as server:
        headers = {"via": "1.1 proxy", "authorization": f"Bearer {TOKEN}"}
        assert server.request("PUT", "/v1/tasks", data, **headers)[0] == 200


def test_attaching_needs_a_token_or_loopback(backbone: Backbone, folder: Path) -> None:
    data = (folder / "tags.safetensors").read_bytes()
    for options in ({"host": "0.0.0.0"}, {"allowed_hosts": ("photos.example",)}):
        with serving(backbone, folder, **options) as server:
            server.url = server.url.replace("0.0.0.0", "127.0.0.1")
            status, _, found = server.request("PUT", "/v1/tasks", data)
            assert (status, "--token" in found["error"]) == (403, True)
            listed = server.request("GET", "/v1/tasks")[2]
            assert (listed["writable"], listed["reason"]) == (False, found["error"])
            assert server.request("POST", "/v1/predict", IMAGE, host="photos.example")[0] == 200


def test_bad_options() -> None:
    for options, message in (
        ({"max_batch": 0}, "`max_batch` must be at least 1"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_queue": 8}, "`max_queue` must not be smaller"),
        ({"token": "short"}, "`token` must have at least 8"),
    ):
        with pytest.raises(ServeError, match=message):
            ServeOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ServeError, match="cannot listen on"):
        listen(ServeOptions(host="203.0.113.1"))


# ------------------------------------------------------------------------------------------------------- load


def test_a_full_queue_is_a_503(backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    with serving(backbone, folder, max_queue=4, max_batch=2, max_images=4) as server:
        gate.opened.clear()
        gate.begun.clear()  # the server's first pass, before any request, has set it
        body, headers = multipart(*[IMAGE] * 4)
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(server.request("POST", "/v1/predict", body, **headers)))
        asking.start()
        assert gate.begun.wait(30)
        for target in ("/v1/predict", "/v2/models/pets/infer"):
            status, answer, text = server.request("POST", target, IMAGE)
            assert (status, answer.get("retry-after")) == (503, "1"), (target, text)
        patient: list[Any] = []
        client = memoro.Client(server.url)
        waiting = threading.Thread(target=lambda: patient.append(client.predict(IMAGE, ["pets"])))
        waiting.start()
        wait_until(lambda: server.metric('memoro_errors_total{status="503"}') >= 3)
        gate.opened.set()
        asking.join()
        waiting.join()  # the client came back as it was told
        client.close()
        assert found[0][0] == 200
        assert list(patient[0][0]) == ["pets"]
        assert server.metric("memoro_queue_images") == 0


def test_deadlines(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    status, _, found = server.request("POST", "/v1/predict", IMAGE, x_request_timeout_ms="300")
    assert (status, "deadline" in found["error"]) == (504, True)
    gate.opened.set()
    assert server.request("POST", "/v1/predict", IMAGE, x_request_timeout_ms="60000")[0] == 200
    for wrong in ("0", "-1", "soon", "9" * 30):
        assert server.request("POST", "/v1/predict", IMAGE, x_request_timeout_ms=wrong)[0] == 400


def test_a_client_that_leaves_is_dropped(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    first = threading.Thread(target=lambda: server.predict(IMAGE, "?tasks=pets"))
    first.start()
    assert gate.begun.wait(30)  # the pass thread is busy; what comes now waits
    body, headers = multipart(*[picture(seed) for seed in range(3)])
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/predict?tasks=pets HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-type: {headers['content_type']}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("memoro_queue_images") == 4)
    wait_until(lambda: server.metric("memoro_queue_images") == 1)
    assert server.metric('memoro_requests_total{endpoint="/v1/predict",status="499"}') == 1
    gate.opened.set()
    first.join()
    assert gate.images == [1], "its three images were in no pass"


def test_an_error_inside_is_hidden(server: Running, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(batching, "run_pass", fail)
    status, headers, found = server.request("POST", "/v1/predict", IMAGE)
    assert (status, found) == (500, {"error": "internal error; the server's log has the details."})
    assert headers["x-content-type-options"] == "nosniff"
    wait_until(lambda: "secret detail" in caplog.text)
    monkeypatch.undo()
    assert server.request("POST", "/v1/predict", IMAGE)[0] == 200  # and it goes on


def test_a_graceful_end_finishes_what_was_taken_in(
    backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    found: list[Any] = []
    with serving(backbone, folder, max_batch=1) as server:
        gate.opened.clear()
        threads = [
            threading.Thread(target=lambda: found.append(server.request("POST", "/v1/predict?tasks=pets", IMAGE)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("memoro_queue_images") == 3)
        server.server.should_exit = True
        host, port = server.url.removeprefix("http://").split(":")

        def refused() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return True
            return False

        wait_until(refused)
        assert found == []
        gate.opened.set()
        for thread in threads:
            thread.join()
    assert [status for status, _, _ in found] == [200, 200, 200]


def test_sigterm_ends_the_process_in_order(backbone: Backbone, folder: Path, tmp_path: Path) -> None:
    def run() -> None:
        asyncio.set_event_loop_policy(None)
        store = open_store([folder], lambda _: backbone)
        run_server(store, ServeOptions(port=0, decoders=1), lambda url: (tmp_path / "url").write_text(url) and None)
        (tmp_path / "ended").touch()

    child = in_fork(run)
    wait_until(lambda: (tmp_path / "url").is_file() and (tmp_path / "url").read_text())
    with memoro.Client((tmp_path / "url").read_text()) as client:
        assert client.predict(IMAGE, ["pets"])
    os.kill(child.pid, signal.SIGTERM)
    child.join(60)
    assert child.exitcode == 0
    assert (tmp_path / "ended").is_file()
