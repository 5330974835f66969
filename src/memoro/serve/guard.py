"""What every request and answer passes: hosts, tokens, sizes, time limits, and the metrics that count them."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Collection, Coroutine, Mapping
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memoro.errors import ServeError
from memoro.serve.options import BUSY, NO_TOKEN, PROXIED, ServeOptions

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All that `/metrics` shows, in a registry of this server's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry: Any = {"registry": self.registry}
        self.requests = Counter("memoro_requests", "Requests answered.", ["endpoint", "status"], **registry)
        self.errors = Counter(
            "memoro_errors", "Requests answered with a status of 400 or more.", ["status"], **registry
        )
        self.request_seconds = Histogram(
            "memoro_request_seconds", "Time from first byte to answer.", ["endpoint"], buckets=SECONDS, **registry
        )
        self.queue = Gauge("memoro_queue_images", "Images that are being decoded or waiting.", **registry)
        self.batch_size = Histogram("memoro_batch_size", "Images in a pass.", buckets=IMAGES, **registry)
        self.passes = Counter("memoro_backbone_passes", "Passes of the backbone.", **registry)
        self.stage_seconds = Histogram(
            "memoro_stage_seconds",
            "Time by stage: decode and queue (of an image), backbone and tasks (of a pass).",
            ["stage"],
            buckets=SECONDS,
            **registry,
        )
        self.task_answers = Counter("memoro_task_answers", "Images that a task answered.", ["task"], **registry)
        self.tasks = Gauge("memoro_tasks", "Tasks attached.", **registry)

    def render(self, attached: Collection[str]) -> bytes:
        """The text format of Prometheus, with counts of the attached tasks only."""
        self.tasks.set(len(attached))
        # A pass that was running during a detach may count for the task afterwards.
        for name in {row.labels["task"] for metric in self.task_answers.collect() for row in metric.samples}:
            if name not in attached:
                self.task_answers.remove(name)
        return generate_latest(self.registry)


OPEN = ("/healthz", "/v2/health/live", "/v2/health/ready", "/", "/page/")
"""No token is needed for load balancers and for the page, which asks for it. `/page/` stands for all below it."""
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
CONTENT_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
BODIES = 8
"""How many bodies of the largest size may be in memory at once."""
MAX_TARGET = 16 << 10
INTERNAL = "internal error; the server's log has the details."
PROXY_HEADERS = (b"forwarded", b"x-forwarded-", b"via")
"""The prefixes of the headers that proxies add."""

T = TypeVar("T")

log = logging.getLogger("memoro.serve")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client closes the connection meanwhile."""

    async def wait_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Guard:
    """Wraps the app. Its own answers and the app's have the same security headers and are counted alike."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._held = 0  # bytes of bodies in memory
        self._requests = 0  # in progress
        self._hosts = {"localhost", "127.0.0.1", "[::1]", options.host.lower(), f"[{options.host.lower()}]"}
        self._hosts |= {host.lower() for host in options.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        start, status, held, deadline = perf_counter(), 0, 0, asyncio.timeout(None)
        self._requests += 1
        headers = {name.lower(): value for name, value in scope["headers"]}

        async def limited() -> Message:
            """Receives the body, counting it as it comes: a length that the client states proves nothing."""
            nonlocal held
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                held, self._held = held + size, self._held + size
                self._check_size(held)
                if self._held > BODIES * self._options.max_body:
                    raise ServeError(BUSY, 503)
            return message

        async def secured(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                set_by_app = {name for name, _ in message["headers"]}
                extra = [pair for pair in [*HEADERS, CONTENT_POLICY] if pair[0] not in set_by_app]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        async def answering(message: Message) -> None:
            if not deadline.expired():  # how long the client may take to read the answer is the connection's concern
                deadline.reschedule(None)
            await secured(message)

        try:
            self._check(scope, headers)
            async with deadline:
                deadline.reschedule(asyncio.get_running_loop().time() + self._timeout(headers))
                await self._app(scope, limited, answering)
        except ServeError as error:
            await error_response(error.status or 500, str(error))(scope, receive, secured)
        except TimeoutError:
            if status == 0:
                changing = scope["method"] in {"PUT", "POST", "DELETE"} and "/tasks" in scope["path"]
                more = "; the change may still take effect: list the tasks to check" if changing else ""
                text = f"the deadline passed before the answer was ready{more}."
                await error_response(504, text)(scope, receive, secured)
        except ClientDisconnect:
            status = 499
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await error_response(500, INTERNAL)(scope, receive, secured)
        finally:
            self._held -= held
            self._requests -= 1
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.request_seconds.labels(endpoint).observe(perf_counter() - start)
            if status >= 400:
                self._metrics.errors.labels(str(status)).inc()

    def _timeout(self, headers: dict[bytes, bytes]) -> float:
        asked = headers.get(b"x-request-timeout-ms")
        if asked is None:
            return self._options.timeout
        if not asked.isdigit() or len(asked) > 9 or int(asked) == 0:
            raise ServeError("x-request-timeout-ms must be a whole number of milliseconds.", 400)
        return min(int(asked) / 1000, self._options.timeout)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        options = self._options
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_TARGET:
            raise ServeError("the address is too long.", 414)
        if options.loopback:
            self._check_site(headers)
        changing = scope["path"].startswith("/v1/tasks") and scope["method"] not in {"GET", "HEAD", "OPTIONS"}
        writing = changing or scope["path"].startswith("/v1/teach")  # those images are private, too
        if writing and not options.may_write:
            raise ServeError(NO_TOKEN, 403)
        if writing and options.write_token is None and any(name.startswith(PROXY_HEADERS) for name in headers):
            raise ServeError(PROXIED, 403)
        needed = [options.write_token] if writing else [options.read_token, options.token] if options.read_token else []
        given = headers.get(b"authorization", b"")
        # All are compared, whatever the first one gives: the time says nothing about any of them.
        matches = [hmac.compare_digest(given, f"Bearer {token}".encode()) for token in needed if token is not None]
        if scope["path"] not in OPEN and not scope["path"].startswith(OPEN[-1]):
            if matches and not any(matches):
                raise ServeError("send a valid token: 'Authorization: Bearer TOKEN'.", 401)
            if self._requests > max(1, options.max_connections * 3 // 4):
                raise ServeError(BUSY, 503)
        stated = headers.get(b"content-length", b"0")
        self._check_size(int(stated) if stated.isdigit() and len(stated) < 20 else 0)

    def _check_site(self, headers: dict[bytes, bytes]) -> None:
        """A page of another site can make a browser send requests to loopback, by its own name or by ours."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if _without_port(host) not in self._hosts:
            raise ServeError("this host name is not allowed here: start the server with --allow-host NAME.", 403)
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin.decode("latin-1").lower()) != host:
            raise ServeError("requests from pages of other sites are not allowed.", 403)

    def _check_size(self, size: int) -> None:
        if size > self._options.max_body:
            raise ServeError(f"the body is larger than {self._options.max_body} bytes.", 413)


def _netloc(origin: str) -> str | None:
    """The host and port of an origin, None if it is not an address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _without_port(host: str) -> str:
    """`[::1]:8000` and `localhost:8000` without the port."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def error_response(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as JSON: `{"error": "…"}`, the same for all routes and protocols."""
    more = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(status, {})
    return Response(
        json.dumps({"error": error}, separators=(",", ":")), status, {**(headers or {}), **more}, "application/json"
    )


PIECE = 1 << 16
"""Bytes that are handed over at once. Answers up to this size are not counted."""


class Sending:
    """Wraps the app. While a client does not read, the rest of its answer stays here and not in the connection, so that
    it is gone when the connection is; and if all that is held would be more than `most` bytes, the answer is a 503."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, refused = 0, False

        async def bounded(message: Message) -> None:
            nonlocal held, refused
            if message["type"] == "http.response.start":
                size = int(dict(message["headers"]).get(b"content-length", 0))
                # One alone may be larger.
                refused = size > PIECE and self._held > 0 and self._held + size > self._most
                if refused:
                    await error_response(503, BUSY)(scope, receive, send)
                elif size > PIECE:
                    held, self._held = size, self._held + size
            elif message["type"] == "http.response.body" and not refused:
                body, last = message.get("body", b""), 0
                for last in range(PIECE, len(body), PIECE):
                    await send({**message, "body": body[last - PIECE : last], "more_body": True})
                message = {**message, "body": body[last:]}
            if not refused:
                await send(message)

        try:
            await self._app(scope, receive, bounded)
        finally:
            self._held -= held
