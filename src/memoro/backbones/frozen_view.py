"""A second view of a module tree: the same weights, frozen, in eval mode, without hooks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def frozen_view(
    module: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    keeps_grad: Callable[[nn.Module], bool] = lambda module: False,
) -> nn.Module:
    """A copy of the module tree that shares its storage (unless dtype or device ask for another).

    The original is only read. Configs are shared, so the frozen_view follows a later change of the attention
    implementation; modes, `requires_grad` and hooks are its own, so nothing that is done to it shows in the original.
    `keeps_grad` names the modules whose `requires_grad` is kept all the same: where torch picks its kernel by it, the
    bits of the result depend on it.
    """

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    seen: dict[int, nn.Module] = {}

    def visit(old: nn.Module, keep: bool) -> nn.Module:
        keep = keep or keeps_grad(old)
        if id(old) in seen:
            return seen[id(old)]
        new = seen[id(old)] = object.__new__(type(old))
        # nn.Module() lists what torch itself keeps per module: empty hooks, empty registries.
        state = {**old.__dict__, **nn.Module().__dict__}
        state.pop("forward", None)  # an instance's patched forward is a hook by another name
        new.__dict__ = state
        new.training = False
        for name, parameter in old._parameters.items():
            new._parameters[name] = (
                None if parameter is None else nn.Parameter(move(parameter), keep and parameter.requires_grad)
            )
        for name, buffer in old._buffers.items():
            new._buffers[name] = None if buffer is None else move(buffer)
        for name, child in old._modules.items():
            new._modules[name] = None if child is None else visit(child, keep)
        new._non_persistent_buffers_set = set(old._non_persistent_buffers_set)
        return new

    return visit(module, False)
