"""Answers on their way: in pieces, and with a limit for all of them together."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memoro.serve.guard import answer
from memoro.serve.options import BUSY

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
                    await answer(send, 503, BUSY)
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
