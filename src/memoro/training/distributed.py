"""The processes that train together, as `torchrun` or `accelerate launch` started them. Mostly it is one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from memoro.extras import need

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
    """Where messages to the others have to be."""

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each tensor over all processes, in one message; all have one dtype."""
        if self.world == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.device)
        torch.distributed.all_reduce(flat)
        parts = torch.split(flat.to(tensors[0].device), [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives all processes the values that the main one has."""
        if self.world > 1:
            kept = [tensor.detach() if self.main else torch.zeros_like(tensor) for tensor in tensors]
            for tensor, value in zip(tensors, self.all_reduce(kept), strict=True):
                tensor.detach().copy_(value)

    def any(self, flag: bool) -> bool:
        """Whether it is so in one process or more."""
        return bool(self.all_reduce([torch.tensor(float(flag))])[0])

    def all_gather(self, value: Any) -> list[Any]:
        """What each process has to say, in their order. No process goes on before all have said it."""
        if self.world == 1:
            return [value]
        from accelerate.utils import gather_object

        return list(gather_object([value]))


ALONE = Processes()


def find_processes(device: torch.device) -> Processes:
    """Where this process stands. The first call joins it with the others, and waits for them."""
    need("accelerate")
    from accelerate import PartialState

    launched = "LOCAL_RANK" in os.environ
    # Without being told, Accelerate takes several processes on CPUs for one.
    state: Any = PartialState(cpu=launched and device.type == "cpu", timeout=TIMEOUT)
    return Processes(state.process_index, state.num_processes, max(state.local_process_index, 0), str(state.device))


def own_device() -> torch.device:
    """This process's GPU, where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
