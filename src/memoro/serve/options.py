"""All settings of the server."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, fields

from memoro.errors import ServeError

MAX_INPUT_SIDE = 1024
"""Pixels of a model's input: attention grows with the fourth power, and a task file may name any size."""
MAX_TASKS = 1000
BUSY = "the server is busy: try again in a second."
NO_TOKEN = "attaching is off: start the server with --token, or let it listen on loopback only."
PROXIED = "attaching through a proxy needs a token: start the server with --token."


@dataclass(frozen=True)
class ServeOptions:
    """Limits and access. The defaults suit one machine; whoever may attach tasks is decided by host and token."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    """Needed to attach and detach; without one, that is allowed on loopback only, not through a proxy."""
    read_token: str | None = None
    """Needed for everything else but health, and to attach and detach where it is the only token; the other token will
    do, too."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names in requests to a server on loopback: that of a proxy in front of it."""
    max_batch: int = 16
    """Images in a pass of the backbone."""
    max_delay_ms: float = 5.0
    """How long an image waits for others to share its pass."""
    max_queue: int = 256
    """Images that are being decoded or waiting; more are refused with 503."""
    max_images: int = 64
    """In one request."""
    max_body: int = 32 * 10**6
    """Bytes of one request, after decompression as well."""
    max_pixels: int = 50_000_000
    """Of one image, by its header."""
    timeout: float = 30.0
    """Seconds for a request, from its headers to its answer; it may ask for less with the header
    `x-request-timeout-ms`. The client has as long again to read the answer."""
    header_timeout: float = 10.0
    """Seconds until the headers of a request must be complete."""
    idle_timeout: float = 60.0
    """Seconds after which a connection is closed, if no other request comes."""
    max_connections: int = 1024
    """At most half as many as the process may open files; the ones that have waited longest without a request make room
    for others. Three quarters of them may have a request at a time; more requests are refused with 503."""
    decoders: int = max(1, min(8, os.cpu_count() or 1))
    """Threads that decode images and write answers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in {"port", "max_delay_ms"} else 1e-3 if field.name.endswith("timeout") else 1
            if isinstance(value, (int, float)) and not least <= value < float("inf"):
                raise ServeError(f"{field.name.replace('_', '-')} must be at least {least}, not {value}.")
        if self.max_queue < max(self.max_batch, self.max_images):
            raise ServeError("max-queue must not be smaller than max-batch and max-images.")
        for option, token in (("token", self.token), ("read-token", self.read_token)):
            if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token):
                raise ServeError(f"{option} must have at least 8 printable ASCII characters and no spaces.")

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
