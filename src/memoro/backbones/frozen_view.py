"""A second view of a module tree: the same weights, frozen, in eval mode, without hooks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def frozen_view(
    module: nn.Module,
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    change_buffer: Callable[[Tensor], Tensor] | None = None,
    *,
    keeps_grad: Callable[[nn.Module], bool] = lambda module: False,
) -> nn.Module:
    """A copy of the module tree that shares its storage, except where `change` returns another tensor, or for buffers
    `change_buffer`, if that is given.

    The original is only read. Configs are shared, so the view follows a later change of the attention implementation;
    modes, `requires_grad` and hooks are its own, so nothing that is done to it shows in the original. `keeps_grad`
    names the modules whose `requires_grad` is kept: where torch picks its kernel by it, the bits of the result depend
    on it.
    """
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
                None
                if parameter is None
                else nn.Parameter(change(parameter.detach()), keep and parameter.requires_grad)
            )
        for name, buffer in old._buffers.items():
            new._buffers[name] = None if buffer is None else (change_buffer or change)(buffer.detach())
        for name, child in old._modules.items():
            new._modules[name] = None if child is None else visit(child, keep)
        new._non_persistent_buffers_set = set(old._non_persistent_buffers_set)
        return new

    return visit(module, False)
