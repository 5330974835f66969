"""`memoro.Client`: the library's answers, timeouts, proxies and closed connections."""

from __future__ import annotations

import io
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answering import IMAGES, close, expected, server
from PIL import ExifTags, Image
from serving import Running, backbone, folder, picture, serving

import memoro
from memoro.backbones import Backbone
from memoro.errors import ImageError, ServeError
from memoro.serve.options import ServeOptions

__all__ = ["backbone", "expected", "folder", "server"]  # fixtures


class FixedServer:
    """A server with one fixed answer to each connection, or none."""

    def __init__(self, *answers: bytes | None) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.answers, self.open = list(answers), list[socket.socket]()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for answer in self.answers:
            connection, _ = self.listening.accept()
            self.open.append(connection)
            connection.recv(1 << 16)
            if answer is not None:
                connection.sendall(answer)

    def __enter__(self) -> FixedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(30)
        for one in (self.listening, *self.open):
            one.close()


def http_answer(status: str, body: bytes, *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def test_the_client(server: Running, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    client = memoro.Client(server.url)
    (tmp_path / "photo.png").write_bytes(IMAGES[0])
    forms = [tmp_path / "photo.png", IMAGES[0], Image.open(tmp_path / "photo.png")]
    for image, found in zip(forms, client.predict(forms, top=9), strict=True):
        assert close(found, expected[0]), image
    (found,) = client.predict(str(tmp_path / "photo.png"), tasks=["tags"], top=9)
    assert close(found, {"tags": expected[0]["tags"]})
    assert client.explain(IMAGES[0], ["pets"])[0]["pets"]["attention"]["layers"] == [0, 1, 2, 3, 4]
    assert set(client.tasks()) == set(expected[0])
    odd = tmp_path / "my photo \u00e9.png"
    odd.write_bytes((tmp_path / "photo.png").read_bytes())
    assert client.ask("predict", str(odd), ["pets"])["images"][0]["name"] == odd.name
    assert client.ask("predict", IMAGES[0], ["pets"], base=True)["images"][0]["base"]
    with pytest.raises(ImageError, match="not a readable image"):
        client.predict([IMAGES[0], b"nothing"])
    with pytest.raises(ServeError, match="no task 'cars'") as caught:
        client.predict(IMAGES[0], ["cars"])
    assert caught.value.status == 404
    with pytest.raises(ServeError, match=r"cannot reach http://127.0.0.1:1 .*memoro serve"):
        memoro.Client("127.0.0.1:1").predict(IMAGES[0])


def test_the_client_sends_pil_images_as_the_library_sees_them(server: Running) -> None:
    photo = Image.open(io.BytesIO(IMAGES[0]))
    photo.getexif()[ExifTags.Base.Orientation] = 6
    modes = [photo.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "I", "P", "1", "RGBA")]
    modes.append(Image.fromarray(np.asarray(photo.convert("F")) / 255))
    with memoro.Client(server.url) as client:
        for image in (photo, *modes, Image.new("LAB", (24, 24), (200, 30, 60))):
            [right] = server.store.current.model.predict([image])
            assert close(client.predict(image, top=9), [right]), image.mode


def test_the_client_sends_files_whose_names_are_not_utf8(
    server: Running, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    path.write_bytes(IMAGES[0])
    with memoro.Client(server.url) as client:
        assert close(client.predict(path, top=9)[0], expected[0])


def test_the_client_takes_images_as_the_library_does(
    server: Running, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[number])
    arrays = np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in IMAGES[:3]])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    with memoro.Client(server.url) as client:
        for one in (arrays[1], tensors[1], bytearray(IMAGES[1]), io.BytesIO(IMAGES[1]), [arrays[1]]):
            [found] = client.predict(one, top=9)
            assert close(found, expected[1]), type(one)
        for many in (arrays, tensors, list(arrays), [arrays[:1], arrays[1:]], iter(IMAGES[:3]), tmp_path):
            for answer, right in zip(client.predict(many, top=9), expected[:3], strict=True):
                assert close(answer, right), type(many)


def test_the_client_sends_many_images_in_several_requests(
    backbone: Backbone, folder: Path, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = 'memoro_requests_total{endpoint="/v1/predict",status="200"}'

    def check(found: list[dict[str, Any]], count: int) -> None:
        assert len(found) == count
        assert all(close(one["pets"], expected[at % 5]["pets"]) for at, one in enumerate(found))

    with serving(backbone, folder) as server, memoro.Client(server.url) as client:
        check(client.predict((IMAGES[number % 5] for number in range(70)), ["pets"]), 70)
        assert server.metric(line) == 2
        monkeypatch.setattr(ServeOptions, "max_body", len(IMAGES[0]) + 2000)
        check(client.predict(IMAGES, ["pets"]), 5)
        assert server.metric(line) == 2 + 5
        assert len(client.predict([IMAGES[0], picture(1, (200, 200))])) == 2
    with serving(backbone, folder, max_images=6) as server, memoro.Client(server.url) as client:
        check(client.predict(IMAGES * 3, ["pets"]), 15)
        explained = client.explain(IMAGES[:4])
        assert [one["pets"]["label"] for one in explained] == [one["pets"]["label"] for one in expected[:4]]
        with pytest.raises(ServeError, match="no image to send"):
            client.predict([])


def test_the_client_goes_on_after_a_timeout() -> None:
    with (
        FixedServer(None, http_answer("200 OK", b'{"tasks": []}')) as server,
        memoro.Client(server.url, timeout=1.5) as client,
    ):
        with pytest.raises(ServeError, match=r"did not answer within 1\.5 seconds"):
            client.tasks()
        assert client.tasks() == {}


def test_the_client_handles_answers_of_a_proxy() -> None:
    busy = http_answer("503 Busy", b"", "retry-after: Wed, 21 Oct 2015 07:28:00 GMT", "connection: close")
    with FixedServer(busy, http_answer("200 OK", b'{"tasks": []}'), b"SSH-2.0-OpenSSH\r\n") as server:
        with memoro.Client(server.url) as client:
            assert client.tasks() == {}
        with memoro.Client(server.url) as client, pytest.raises(ServeError, match="SSH-2"):
            client.tasks()


def test_connections_of_threads_that_have_ended_are_closed(server: Running) -> None:
    with memoro.Client(server.url) as client:
        for _ in range(3):
            thread = threading.Thread(target=client.tasks)
            thread.start()
            thread.join()
            (only,) = client._connections.values()
            assert only.sock is not None
        first = only
        client.tasks()
        assert first.sock is None
