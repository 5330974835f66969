"""The server process: it starts and stops, and limits how many connections there are and how long each may wait."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from memoro.errors import ServeError
from memoro.serve.app import create_app
from memoro.serve.options import BUSY, ServeOptions
from memoro.serve.store import TaskStore

BACKLOG = 1024
"""Connections that the system holds until the server takes them."""

log = logging.getLogger("memoro.serve.connections")


class Limits:
    """What all connections of a server share."""

    def __init__(self, options: ServeOptions) -> None:
        free = _free_descriptors()
        self.connections = options.max_connections if free is None else max(1, min(options.max_connections, free // 2))
        """Half of the file descriptors. The others are for files, and for connections that are about to be closed."""
        self.at_once = BACKLOG if free is None else max(1, min(BACKLOG, free // 16))
        """Connections that are accepted before any of them is looked at. They may be four times as many until the
        first of them is closed."""
        self.options = options
        self.waiting: dict[Connection, None] = {}
        """Those without a request, the one that has waited longest first."""


class Connection(H11Protocol):
    """uvicorn's connection, with limits of its own: for the headers of a request, and for reading the answer.

    Where there are too many, the one that has waited longest without a request is closed: whoever opens connections
    and asks nothing keeps no one else out.
    """

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._headers: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update(begun=True)
        if len(self.connections) > self._limits.connections:
            next(iter(self._limits.waiting))._end(503, BUSY)
            log.warning("more than %s connections: idle ones are closed", self._limits.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limits.waiting.pop(self, None)
        _cancel(self._headers)
        _cancel(self._reading)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update(begun=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update(begun=False)
        if not self.transport.get_write_buffer_size():
            _cancel(self._reading)
            self._reading = None
        self._limit_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_reading()

    def _update(self, begun: bool) -> None:
        """Notes whether a request is in progress. If not, and one has begun, its headers must be complete in time, and
        so must a body that was answered before its end."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._limits.waiting.pop(self, None)
            _cancel(self._headers)
            self._headers = None
            return
        self._limits.waiting.setdefault(self)
        if begun and self._headers is None:
            seconds = self._limits.options.header_timeout
            message = f"the headers were not complete after {seconds:g} seconds."
            self._headers = self.loop.call_later(seconds, self._end, 408, message)

    def _limit_reading(self) -> None:
        """From now on the client has `timeout` seconds to read what was written."""
        if self._reading is None and self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(self._limits.options.timeout, self._check_read, self.cycle)

    def _check_read(self, cycle: Any) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size() and self.cycle is cycle:
            self.transport.abort()  # close() would wait until all is read
        self._limit_reading()

    def _end(self, status: int, error: str) -> None:
        """Closes the connection; a client that has sent a part of the headers gets the reason."""
        self._limits.waiting.pop(self, None)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            body = json.dumps({"error": error}).encode()
            retry = "retry-after: 1\r\n" if status == 503 else ""
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n{retry}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """uvicorn takes one number for connections that the system holds and for those that are accepted at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


class OncePerSecond(logging.Filter):
    """Lets the same message through once a second, without a traceback if descriptors have run out."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        self._last = {message: last for message, last in self._last.items() if now - last < 1}
        if record.msg in self._last:
            return False
        self._last[record.msg] = now
        if "out of system resource" in record.msg:  # asyncio's words when accept() fails
            record.exc_info = None
        return True


_SELDOM = OncePerSecond()


def quiet_logs() -> None:
    """Makes sure that a flood of connections is not a flood of lines."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "asyncio", log.name):
        logging.getLogger(name).addFilter(_SELDOM)


def _free_descriptors() -> int | None:
    """How many more files and connections this process may open; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    return None if most == resource.RLIM_INFINITY else max(0, most - used)


def run_server(
    store: TaskStore,
    options: ServeOptions,
    started: Callable[[str], None] = lambda url: None,
    extend: Callable[[FastAPI], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what it took in. `started` receives the address."""
    server = make_server(store, options, extend)
    listening = listen(options)
    started(address_of(listening))
    # uvicorn raises the signal that stopped it again once all is done: it has served its purpose then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    finally:
        listening.close()


def make_server(
    store: TaskStore, options: ServeOptions, extend: Callable[[FastAPI], None] | None = None
) -> uvicorn.Server:
    """uvicorn with the app. h11 limits the size of headers, which the faster httptools does not."""
    quiet_logs()
    limits = Limits(options)
    config = uvicorn.Config(
        create_app(store, replace(options, max_connections=limits.connections), extend),
        http=partial(Connection, limits),  # type: ignore[arg-type]  # uvicorn only calls it
        loop="asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        backlog=limits.at_once,
        timeout_keep_alive=options.idle_timeout,  # type: ignore[arg-type]  # asyncio takes fractions, too
        timeout_graceful_shutdown=int(options.timeout) + 5,
    )
    return Server(config)


def listen(options: ServeOptions) -> socket.socket:
    """The listening socket; port 0 takes a free one."""
    try:
        family, *_, place = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        advice = "; try `port=0`" if error.errno in {errno.EADDRINUSE, errno.EACCES} else ""
        raise ServeError(f"cannot listen on {options.host}:{options.port} ({error.strerror}){advice}.") from None
    listening.set_inheritable(True)
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
