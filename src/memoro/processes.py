"""The processes that train together, as `torchrun` or `accelerate launch` started them, usually one; and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from memoro.errors import need

TIMEOUT = timedelta(days=1)
"""How long a process waits for the others: one may compute features for hours. The launcher ends all if one dies."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train together. All of them hold the same weights after every step."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Its number on its machine."""
    device: str = "cpu"
    """Where tensors must be to be sent."""

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each tensor over all processes, in one message; all have one dtype."""
        if self.world == 1 or not tensors:
            return list(tensors)
        from accelerate.utils import reduce

        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.device)
        summed = reduce(flat, reduction="sum").to(tensors[0].device)
        parts = torch.split(summed, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives every process the main one's values."""
        if self.world > 1:
            from accelerate.utils import broadcast

            for tensor in tensors:
                tensor.detach().copy_(broadcast(tensor.detach().to(self.device)))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one process."""
        return bool(self.all_reduce([torch.tensor(float(flag), device="cpu")])[0])

    def all_gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank. No process continues before all have sent theirs."""
        if self.world == 1:
            return [value]
        from accelerate.utils import gather_object

        return list(gather_object([value]))


ALONE = Processes()


def find_processes(device: torch.device) -> Processes:
    """This process among the launched ones. The first call joins the group and waits for the others."""
    need("accelerate")
    from accelerate import PartialState

    launched = "LOCAL_RANK" in os.environ
    # Unless told otherwise, Accelerate treats several processes on CPUs as one.
    state: Any = PartialState(cpu=launched and device.type == "cpu", timeout=TIMEOUT)
    return Processes(state.process_index, state.num_processes, max(state.local_process_index, 0), str(state.device))


@contextmanager
def printing_once(device: torch.device) -> Iterator[bool]:
    """Within, only the main process prints; whether this is the one."""
    if find_processes(device).main:
        yield True
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield False


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
