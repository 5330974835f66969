"""Ctrl-C during a training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only sets a flag, so that no step is left half done; a second Ctrl-C interrupts at once."""
    flag: list[bool] = []

    def handler(number: int, frame: Any) -> None:
        if flag:
            raise KeyboardInterrupt
        flag.append(True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(flag)
    finally:
        signal.signal(signal.SIGINT, before)
