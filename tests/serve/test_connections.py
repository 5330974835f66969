"""Clients that ask nothing, never finish, or do not read: they cost a bounded amount and keep no one else out."""

from __future__ import annotations

import http.client
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import random_task
from serving import Gate, Running, backbone, folder, multipart, picture, serving, wait_until

import memoro
from memoro.backbones import Backbone
from memoro.errors import ServeError
from memoro.serve import app
from memoro.serve.options import ServeOptions

__all__ = ["backbone", "folder"]  # fixtures

IMAGE = picture()
HALF = b"GET /healthz HTTP/1.1\r\nhost: loc"
WHOLE = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG = 3600.0


def connect(server: Running, sent: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(sent)
    return connection


def is_healthy(connection: socket.socket) -> bool:
    """Whether the next answer is that of /healthz."""
    found = b""
    while not found.endswith(b"}"):
        found += connection.recv(1 << 16)
    return found.startswith(b"HTTP/1.1 200 OK")


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def drip(connection: socket.socket) -> None:
    """Sends a byte at a time until the server closes the connection."""
    connection.settimeout(0.02)
    for _ in range(3000):
        try:
            connection.sendall(b"x")
            if connection.recv(1 << 16) == b"":
                return
        except TimeoutError:
            continue
        except OSError:
            return
    raise AssertionError("it is still open")


# ------------------------------------------------------------------------------------------------ time limits


def test_headers_must_come_in_time(backbone: Backbone, folder: Path) -> None:
    with serving(backbone, folder, header_timeout=0.3, idle_timeout=LONG) as server, ExitStack() as open_ones:
        silent, half, second = (
            open_ones.enter_context(connect(server, sent)) for sent in (b"", HALF, WHOLE + HALF.replace(b"loc", b"x"))
        )
        assert read_all(silent) == b""
        told = read_all(half)
        assert told.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b'{"error": "the headers were not complete after 0.3 seconds."}' in told
        dripping = open_ones.enter_context(connect(server, HALF))
        drip(dripping)
        assert is_healthy(second)
        second.sendall(b"x")  # on a connection that was in use already
        assert b"HTTP/1.1 408" in read_all(second)


def test_a_body_that_goes_on_after_its_answer(backbone: Backbone, folder: Path) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\nx-request-timeout-ms: 0\r\n\r\n"
    with serving(backbone, folder, header_timeout=0.3, idle_timeout=LONG) as server, connect(server, head) as client:
        assert client.recv(15) == b"HTTP/1.1 400 Ba"
        drip(client)


def test_idle_connections_are_closed(backbone: Backbone, folder: Path) -> None:
    with (
        serving(backbone, folder, header_timeout=LONG, idle_timeout=0.3) as server,
        connect(server, WHOLE) as used,
        connect(server) as new,
    ):
        assert b"200 OK" in read_all(used)
        new.sendall(WHOLE)
        assert is_healthy(new), "it was not idle: it never asked"


def test_a_long_request_is_neither_idle_nor_late(
    backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    with serving(backbone, folder, header_timeout=0.3, idle_timeout=0.3) as server:
        gate.opened.clear()
        gate.begun.clear()
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(server.predict(IMAGE, "?tasks=pets")))
        asking.start()
        assert gate.begun.wait(30)
        with connect(server) as silent, connect(server, WHOLE) as idle:
            assert read_all(silent) == b""
            assert b"200 OK" in read_all(idle)
        gate.opened.set()
        asking.join()
        assert len(found) == 1


# ------------------------------------------------------------------------------------------------ connections


@pytest.mark.parametrize("sent", [b"", HALF, WHOLE])
def test_those_who_ask_nothing_make_room(backbone: Backbone, folder: Path, sent: bytes) -> None:
    limits = {"max_connections": 8, "header_timeout": LONG, "idle_timeout": LONG}
    with serving(backbone, folder, **limits) as server, ExitStack() as open_ones:
        idle = []
        for _ in range(20):
            idle.append(open_ones.enter_context(connect(server, sent)))
            if sent == WHOLE:
                assert is_healthy(idle[-1])
        for _ in range(3):
            server.predict(IMAGE)
        for one in idle[:13]:
            assert b"HTTP/1.1 200" not in read_all(one)
        idle[-1].sendall(WHOLE[len(sent) :] if sent != WHOLE else WHOLE)
        assert is_healthy(idle[-1]), "the last ones may stay"
        server.predict(IMAGE)


def test_too_many_requests_are_refused(backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    with serving(backbone, folder, max_connections=8) as server:
        gate.opened.clear()
        found: list[int] = []
        ask = lambda: found.append(server.request("POST", "/v1/predict?tasks=pets", IMAGE)[0])  # noqa: E731
        asking = [threading.Thread(target=ask) for _ in range(6)]
        for thread in asking:
            thread.start()
        wait_until(lambda: server.store and _queued(server) == 6)
        status, headers, told = server.request("GET", "/v1/tasks")
        assert (status, headers["retry-after"], "busy" in told["error"]) == (503, "1", True)
        assert server.request("GET", "/healthz")[0] == 200
        gate.opened.set()
        for thread in asking:
            thread.join()
        assert found == [200] * 6
        assert server.request("GET", "/v1/tasks")[0] == 200


def _queued(server: Running) -> float:
    """Images waiting, from a server that may refuse to say."""
    status, _, text = server.request("GET", "/metrics")
    return 6 if status == 503 else float(re.search(rb"^memoro_queue_images (\S+)$", text, re.M)[1])  # type: ignore[index]


# ------------------------------------------------------------------------------------------------ answers


def test_answers_that_nobody_reads(backbone: Backbone, tmp_path: Path) -> None:
    """They are held up to a limit, and until the time limit; everyone else is answered meanwhile."""
    large = random_task(backbone, "large", cells=4096, labels=[f"label {number:06}" for number in range(60_000)])
    memoro.save_task(large, tmp_path / "large.safetensors")
    right = (tmp_path / "large.safetensors").read_bytes()
    asked = b"GET /v1/tasks/large/file HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        serving(backbone, tmp_path, max_body=3 * len(right) // 8, timeout=2.0) as server,
        ExitStack() as open_ones,
    ):
        deaf = []
        for _ in range(3):
            deaf.append(open_ones.enter_context(connect(server, asked)))
            assert deaf[-1].recv(15) == b"HTTP/1.1 200 OK"
        status, headers, told = server.request("GET", "/v1/tasks/large/file")
        assert (status, headers["retry-after"], "busy" in told["error"]) == (503, "1", True)
        assert server.predict(IMAGE, "?tasks=large")
        assert server.request("GET", "/healthz")[0] == 200
        wait_until(lambda: not server.server.server_state.connections)
        assert server.request("GET", "/v1/tasks/large/file")[2] == right
        rest = [read_all(one) for one in deaf]
        assert all(len(one) < len(right) for one in rest), "cut, not kept"


def test_files_are_made_one_at_a_time(backbone: Backbone, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are being made are not in the budget for answers yet."""
    own, making, most = app.task_bytes, list[int](), list[int]()

    def make(task: memoro.Task) -> bytes:
        making.append(0)
        most.append(len(making))
        time.sleep(0.05)
        making.pop()
        return own(task)

    monkeypatch.setattr(app, "task_bytes", make)
    with serving(backbone, folder, decoders=4) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.request, "GET", "/v1/tasks/tags/file") for _ in range(4)]
        assert {done.result()[2] for done in asked} == {(folder / "tags.safetensors").read_bytes()}
    assert most == [1] * 4


# ------------------------------------------------------------------------------------------------ descriptors


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process may open so many more files and connections only."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", [0, 1, 4, 7, 8])
def test_a_change_without_descriptors_is_a_503(backbone: Backbone, tmp_path: Path, left: int) -> None:
    data = memoro.save_task(random_task(backbone, "new"), tmp_path / "new.safetensors").read_bytes()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch, serving(backbone, tmp_path / "tasks") as server:
        patch.setattr("tempfile.tempdir", str(temporary))
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        client.request("GET", "/healthz")
        client.getresponse().read()
        with few_descriptors(left):
            client.request("PUT", "/v1/tasks", data)
            answer = client.getresponse()
            told = answer.read()
        client.request("PUT", "/v1/tasks", data)
        again = client.getresponse()
        again.read()
        client.close()
        assert (answer.status, again.status) == ((503, 201) if left < 8 else (201, 200)), told
        assert list(temporary.iterdir()) == []
        assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["new.safetensors"]


def test_a_large_form_without_descriptors_is_a_503(backbone: Backbone, folder: Path) -> None:
    """Starlette keeps a file of more than a megabyte on the disk."""
    body, headers = multipart(picture(size=(800, 800)), IMAGE)
    assert len(body) > 1 << 20
    with serving(backbone, folder) as server:
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        client.request("GET", "/healthz")
        client.getresponse().read()
        found = []
        for left in (0, 8):
            with few_descriptors(left):
                client.request("POST", "/v1/predict", body, {"content-type": headers["content_type"]})
                answer = client.getresponse()
                answer.read()
            found.append(answer.status)
        client.close()
    assert found == [503, 200]


def test_a_server_with_few_descriptors(tmp_path: Path) -> None:
    """More connections than it may open files, as `ulimit -n` limits them: it answers, and says little."""
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "memoro", "serve", "--tasks", f"{tmp_path}/tasks/", "--port", "0"]
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))  # noqa: E731
    with log.open("wb") as file, ExitStack() as open_ones:
        process = subprocess.Popen(command, stderr=file, preexec_fn=limit)
        try:
            wait_until(lambda: process.poll() is not None or "listening on" in log.read_text())
            address = re.search(r"listening on http://([\d.]+):(\d+)", log.read_text())
            assert address is not None, log.read_text()
            host, port = address[1], int(address[2])
            for number in range(400):
                one = open_ones.enter_context(socket.create_connection((host, port), timeout=60))
                if number % 2:
                    one.sendall(HALF)
                if number % 50 == 0:
                    with memoro.Client(f"http://{host}:{port}") as client:
                        assert client.tasks() == {}
        finally:
            process.terminate()
            assert process.wait(60) == 0
    assert "Traceback" not in log.read_text()
    assert "idle ones are closed" in log.read_text()
    assert len(log.read_text()) < 3000


def test_options() -> None:
    for options, message in (
        ({"max_connections": 0}, "`max_connections` must be at least 1"),
        ({"header_timeout": 0}, "`header_timeout` must be at least"),
        ({"idle_timeout": -1}, "`idle_timeout` must be at least"),
    ):
        with pytest.raises(ServeError, match=message):
            ServeOptions(**options)  # type: ignore[arg-type]
