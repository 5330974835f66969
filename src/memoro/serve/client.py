"""A small client for the server. It needs nothing but Python's own library, except to send folders
and images that are decoded already."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from memoro.answer import AnswerDict
from memoro.errors import ImageError, ServeError
from memoro.serve.options import ServeOptions

if TYPE_CHECKING:
    from memoro.engine.answers import Pictures, Unfamiliar
    from memoro.images import Picture


PART_BYTES = 1024
"""More than the form needs for each file besides its bytes: a name may have 255, each of them written as three."""


class Client:
    """Asks a server that `memoro serve` started. Threads can share it; each has a connection of its own."""

    def __init__(self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, timeout: float = 30.0) -> None:
        """`timeout` is in seconds, and covers the time that a busy server asks the client to wait."""
        self._connections: dict[threading.Thread, http.client.HTTPConnection] = {}
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ServeError(f"{url!r} is not an address such as http://127.0.0.1:8000.")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts, self._token, self._timeout = parts, token, timeout

    def close(self) -> None:
        """Closes all connections; the next request opens a new one."""
        for connection in list(self._connections.values()):
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def predict(
        self,
        images: Pictures,
        tasks: Sequence[str] | None = None,
        *,
        top: int | None = None,
        unfamiliar: Unfamiliar = "mark",
        false_alarms: float | None = None,
    ) -> list[dict[str, AnswerDict]]:
        """What each task answers for each image: takes images, and returns answers, as `Composition.predict` does.

        Without `top`, with the probabilities of 5 labels; the library returns those of all.
        """
        answer = self.ask("predict", images, tasks, top=top, unfamiliar=unfamiliar, false_alarms=false_alarms)
        return [image["answers"] for image in answer["images"]]

    def explain(self, images: Pictures, tasks: Sequence[str] | None = None) -> list[dict[str, AnswerDict]]:
        """The same, with each answer's `attention`: where the task looked."""
        return [image["answers"] for image in self.ask("explain", images, tasks)["images"]]

    def ask(
        self,
        what: str,
        images: Pictures,
        tasks: Sequence[str] | None = None,
        *,
        top: int | None = None,
        base: bool = False,
        unfamiliar: Unfamiliar = "mark",
        false_alarms: float | None = None,
    ) -> dict[str, Any]:
        """The server's whole answer: `images`, `tasks` with their versions, `seconds`.

        More images than the server takes at once are sent in several requests: `images` has all of them, the rest is
        of the last request.
        """
        if isinstance(tasks, str):
            raise ServeError(f"tasks takes a list of names: [{tasks!r}].")
        if tasks is not None and not tasks:
            raise ServeError("name at least one task, or leave tasks out for all of them.")
        asked = {"tasks": tasks, "top_k": top, "base": base, "unfamiliar": unfamiliar, "false_alarms": false_alarms}
        query = urlencode({name: value for name, value in asked.items() if value is not None}, doseq=True)
        target, files, most = f"/v1/{what}?{query}", map(_encode, _list(images)), ServeOptions.max_images
        document: dict[str, Any] = {"images": []}
        waiting = list(islice(files, most))
        if not waiting:
            raise ServeError("there is no image to send.")
        while waiting:
            sizes = accumulate(len(data) + PART_BYTES for _, data in waiting[:most])
            count = max(1, sum(size <= ServeOptions.max_body for size in sizes))
            body, kind = _multipart(waiting[:count])
            try:
                answer = json.loads(self._request("POST", target, body, {"content-type": kind}))
            except ServeError as error:
                if error.status != 413 or count == 1:
                    raise
                most = count // 2  # the server's limits are lower, or `explain` is for many tasks
                continue
            for image in answer["images"]:
                if "error" in image:
                    raise ImageError(image["error"])
            document = {**answer, "images": document["images"] + answer["images"]}
            waiting = [*waiting[count:], *islice(files, count)]
        return document

    def tasks(self) -> dict[str, dict[str, Any]]:
        """What is known of each attached task, by name."""
        return {task["name"]: task for task in json.loads(self._request("GET", "/v1/tasks"))["tasks"]}

    def attach(self, file: str | Path) -> list[str]:
        """Attaches the tasks of a file; their names."""
        return list(json.loads(self._request("PUT", "/v1/tasks", Path(file).read_bytes()))["tasks"])

    def detach(self, name: str) -> None:
        """Detaches a task."""
        self._request("DELETE", f"/v1/tasks/{quote(name, safe='')}")

    def download(self, name: str) -> bytes:
        """The file of a task."""
        return self._request("GET", f"/v1/tasks/{quote(name, safe='')}/file")

    def _request(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        end = time.monotonic() + self._timeout
        sent = {**(headers or {}), **({} if self._token is None else {"authorization": f"Bearer {self._token}"})}
        while True:
            response, data = self._send(method, self._parts.path.rstrip("/") + target, body, sent)
            if response.status < 300:
                return data
            asked = response.getheader("retry-after", "")
            pause = float(asked) if asked.isdecimal() else 1.0  # a proxy may send a date
            if response.status != 503 or time.monotonic() + pause > end:
                raise ServeError(_message(data) or f"{self.url} answered {response.status}.", response.status)
            time.sleep(pause)

    def _send(
        self, method: str, target: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """One request. A connection that the server closed while it was idle is opened again."""
        connection = self._own_connection()
        while True:
            idle = connection.sock is not None
            try:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                return response, response.read()
            except BaseException as error:
                connection.close()  # the answer may still be on its way
                if idle and isinstance(error, (BrokenPipeError, ConnectionResetError)):
                    continue
                if isinstance(error, TimeoutError):
                    raise ServeError(f"{self.url} did not answer within {self._timeout:g} seconds.") from None
                if not isinstance(error, (OSError, http.client.HTTPException)):
                    raise
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ServeError(f"cannot reach {self.url} ({reason}): is `memoro serve` running there?") from None

    def _own_connection(self) -> http.client.HTTPConnection:
        """The connection of this thread. Those of threads that have ended are closed."""
        thread = threading.current_thread()
        if thread not in self._connections:
            for other, connection in list(self._connections.items()):
                if not other.is_alive():
                    self._connections.pop(other, connection).close()
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._connections[thread] = kind(str(self._parts.hostname), self._parts.port, timeout=self._timeout)
        return self._connections[thread]


def _message(data: bytes) -> str | None:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return None


def _list(images: Pictures) -> Iterator[Picture]:
    """Each of the images, as `Composition.predict` finds them."""
    some: Any = [images] if isinstance(images, (str, Path, bytes)) else images
    if isinstance(some, (list, tuple)) and all(isinstance(one, bytes) or _is_file(one) for one in some):
        return iter(some)
    from memoro.engine.answers import list_pictures  # for other images only: it takes long to import

    return (picture for _, picture in list_pictures(some))


def _is_file(image: Any) -> bool:
    return isinstance(image, (str, Path)) and not Path(image).is_dir()


def _encode(image: Picture) -> tuple[str, bytes]:
    """An image's name and its bytes; a decoded one as PNG, upright and in RGB, as the library itself sees it."""
    if isinstance(image, (bytes, bytearray)):
        return "image", bytes(image)
    if isinstance(image, (str, Path)):
        try:
            return Path(image).name, Path(image).read_bytes()
        except OSError as error:
            raise ImageError(f"{image}: cannot be read ({error.strerror}).") from None
    from PIL import Image, ImageOps  # for these only: it takes long to import

    from memoro.images import is_deep, open_image

    buffer = io.BytesIO()
    if isinstance(image, Image.Image) and is_deep(image):  # as it is: each task has a scale of its own
        ImageOps.exif_transpose(image).save(buffer, "TIFF")
        return "image.tif", buffer.getvalue()
    open_image(image).save(buffer, "PNG")
    return "image.png", buffer.getvalue()


def _multipart(files: Sequence[tuple[str, bytes]]) -> tuple[bytes, str]:
    """The body of a form with these files, and its content type."""
    boundary, parts = uuid.uuid4().hex, list[bytes]()
    for name, data in files:
        known = name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")  # as browsers do
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="images"; filename="{known}"\r\n\r\n'
        parts += [head.encode(errors="replace"), data, b"\r\n"]
    return b"".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"
