"""All settings of the server."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, fields

from memoro.errors import ServeError
from memoro.options import option

MAX_INPUT_SIDE = 1024
"""Pixels of a model's input: attention grows with the fourth power, and a task file may name any size."""
MAX_TASKS = 1000
BUSY = "the server is busy: try again in a second."
NO_TOKEN = "attaching is off: start the server with --token, or let it listen on loopback only."
PROXIED = "attaching through a proxy needs a token: start the server with --token."


@dataclass(frozen=True)
class ServeOptions:
    """Limits and access. The defaults suit one machine; host and token decide who may attach tasks."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all networks.")
    port: int = option(8000, "Port to listen on; 0: any free port.")
    token: str | None = option(
        None, "Bearer token for attaching and detaching. Without it, both work on loopback only, without a proxy."
    )
    read_token: str | None = option(
        None, "Bearer token for all other requests except health checks; without a token, also for attaching."
    )
    """The other token will do, too."""
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that requests may use, if a proxy is in front of a server on loopback; repeat for more.",
        name="allow_host",
        typed=list[str] | None,
    )
    max_batch: int = option(16, "Maximum number of images per pass of the backbone.")
    max_delay_ms: float = option(5.0, "Maximum time an image waits for others to share its pass.")
    max_queue: int = option(256, "Maximum number of images being decoded or waiting; more are refused with 503.")
    max_images: int = option(64, "Maximum number of images per request.")
    max_body: int = option(32 * 10**6, "Maximum bytes of a request, after decompression as well.")
    max_pixels: int = option(50_000_000, "Maximum pixels of an image, by its header.")
    timeout: float = option(30.0, "Maximum seconds per request, and again for reading the answer.")
    """From the headers of a request to its answer; it may ask for less with the header `x-request-timeout-ms`."""
    header_timeout: float = option(10.0, "Maximum seconds until the headers of a request are complete.")
    idle_timeout: float = option(60.0, "Seconds after which a connection without requests is closed.")
    max_connections: int = option(
        1024, "Maximum number of connections, at most half of the files that the process may open (ulimit -n)."
    )
    """The ones that have waited longest without a request make room for others. Three quarters of them may have a
    request at a time; more requests are refused with 503."""
    decoders: int = option(max(1, min(8, os.cpu_count() or 1)), "Threads that decode images and write answers.")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in {"port", "max_delay_ms"} else 1e-3 if field.name.endswith("timeout") else 1
            if isinstance(value, (int, float)) and not least <= value < float("inf"):
                raise ServeError(f"`{field.name}` must be at least {least}, not {value}.")
        if self.max_queue < max(self.max_batch, self.max_images):
            raise ServeError("`max_queue` must not be smaller than `max_batch` and `max_images`.")
        for name, token in (("token", self.token), ("read_token", self.read_token)):
            if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token):
                raise ServeError(f"`{name}` must have at least 8 printable ASCII characters and no spaces.")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def write_token(self) -> str | None:
        """The token that attaching and detaching need."""
        return self.token or self.read_token

    @property
    def may_write(self) -> bool:
        """Whether anyone at all may attach and detach tasks."""
        return self.token is not None or (self.loopback and not self.allowed_hosts)
