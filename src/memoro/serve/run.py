"""Starting the server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from memoro.backbones import Backbone, BackboneRecord
from memoro.errors import ServeError
from memoro.serve.app import create_app
from memoro.serve.connections import BACKLOG, Connection, Limits, Server, quiet_logs
from memoro.serve.folder import read_task_files
from memoro.serve.options import ServeOptions
from memoro.serve.store import TaskStore


def open_store(places: Sequence[str | Path], load: Callable[[BackboneRecord | None], Backbone]) -> TaskStore:
    """The tasks of a folder, or of anything else that `-t` takes, on the backbone that `load` gives for most of
    them."""
    given = read_task_files(places)
    return TaskStore(load(given.backbone), given)


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
        found = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ServeError(f"cannot listen on {options.host}:{options.port} ({error.strerror}); try --port 0.") from None
    found.set_inheritable(True)
    return found


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
