"""A frozen Vision Transformer, ready for tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from memoro.backbones.anatomy import Anatomy
from memoro.backbones.fingerprint import Fingerprint, take_fingerprint
from memoro.errors import BackboneError
from memoro.images import Preprocessing


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen Vision Transformer: what `load_backbone` returns. The model that it was built around never changes."""

    name: str
    """Hub id, name of the folder or class: how a person finds it again. Task files store it, so it is not a path."""
    family: str
    model: nn.Module = field(repr=False)
    """What it was built around."""
    module: nn.Module = field(repr=False)
    """The same weights (or converted ones) as memoro computes with them: see `frozen_view`."""
    take_apart: Callable[[nn.Module], Anatomy] = field(repr=False)
    """The anatomy of such a module."""
    run_forward: Callable[[nn.Module, Tensor], Tensor] = field(repr=False)
    """What such a module's own forward answers to pixels."""
    preprocessing: Preprocessing
    labels: tuple[str, ...] = field(default=(), repr=False)
    """Names of the classes of the base's own classifier, if it has one."""
    image_size: tuple[int, int] = (224, 224)
    """(height, width) that the positions were learned at."""
    channels: int = 3
    functions: tuple[str, ...] = field(default=(), repr=False)
    """See `name_functions`: these are not part of the fingerprint, since each library has its own names for them."""
    checkpoint: Fingerprint | None = field(default=None, repr=False)
    """The fingerprint of the weights before they were rounded to a precision: tasks go by it."""

    @cached_property
    def anatomy(self) -> Anatomy:
        return self.take_apart(self.module)

    @property
    def dim(self) -> int:
        return self.anatomy.dim

    @property
    def depth(self) -> int:
        return self.anatomy.depth

    @property
    def heads(self) -> int:
        return self.anatomy.heads

    @property
    def dtype(self) -> torch.dtype:
        return self.anatomy.tensors["patch.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self.anatomy.tensors["patch.weight"].device

    @property
    def fingerprint(self) -> Fingerprint:
        """What a task file is bound to: the same in every precision."""
        return self._taken if self.checkpoint is None else self.checkpoint

    @cached_property
    def _taken(self) -> Fingerprint:
        """Of these weights, at first use."""
        vars(self)["_versions"] = self._count_versions()
        return take_fingerprint(self.anatomy.tensors, self.anatomy.heads)

    def _count_versions(self) -> tuple[int, ...]:
        """How often torch has written to each weight, if it counts that."""
        tensors = self.anatomy.tensors.values()
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)

    def original(self, pixel_values: Tensor) -> Tensor:
        """What the untouched model's own forward returns, by memoro's rule of what `"base"` is.

        It runs the user's own object if that computes with these weights as in eval mode, else `module`.
        """
        theirs, ours = next(self.model.parameters()), next(self.module.parameters())
        same = theirs.data_ptr() == ours.data_ptr() and not any(part.training for part in self.model.modules())
        return self.run_forward(self.model if same else self.module, pixel_values)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """The backbone on another device or in another dtype. This one and the user's model stay where they are."""
        return self if device is None and dtype is None else self.convert(_mover(device, dtype))

    def convert(self, change: Callable[[Tensor], Tensor]) -> Backbone:
        """The backbone with every weight passed through a function, which may return it as it is."""
        new = replace(self, module=frozen_view(self.module, change, keeps_grad=lambda _: True))
        if new.dtype == self.dtype and "_taken" in vars(self):
            self.check_unchanged()
            vars(new).update(_taken=self._taken, _versions=new._count_versions())  # of the same weights
        return new

    def in_precision(self, dtype: torch.dtype) -> Backbone:
        """The backbone with its weights rounded to another dtype, for tasks of this one. Buffers, such as rotary
        frequencies, keep theirs, as when `transformers` loads a checkpoint in a dtype."""
        if dtype == self.dtype:
            return self
        module = frozen_view(self.module, _mover(None, dtype), lambda buffer: buffer, keeps_grad=lambda _: True)
        new = replace(self, module=module, checkpoint=self.fingerprint)
        vars(new)["_versions"] = new._count_versions()
        return new

    def trainable_copy(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A second, frozen module with weights of its own, in the given dtype or the backbone's. For regimes that
        change weights: `take_apart` gives its anatomy."""
        return frozen_view(copy.deepcopy(self.module), _mover(None, dtype))

    def check_unchanged(self, *, read_weights: bool = False) -> None:
        """Raises if the model's weights have changed since the fingerprint was taken.

        It asks torch whether they were written to. That takes no time, but misses writes through `.data`:
        `read_weights` takes the fingerprint again.
        """
        known: Fingerprint | None = vars(self).get("_taken")
        changed = vars(self).get("_versions") not in {None, self._count_versions()}
        if not changed and (read_weights or self.checkpoint is None):
            here = take_fingerprint(self.anatomy.tensors, self.anatomy.heads) if known and read_weights else self._taken
            changed = known is not None and here.digest != known.digest
        if changed:
            raise BackboneError(
                f"the weights of {self.name} have changed since it was loaded: load the backbone again."
            )

    def check_pixels(self, pixel_values: Any) -> Tensor:
        """The pixels on the backbone's device, if they are a batch of images that it can take."""
        if not isinstance(pixel_values, Tensor):
            raise BackboneError(
                f"pixel_values is a {type(pixel_values).__name__}; pass a tensor (batch, {self.channels}, height, "
                "width), or use predict() for images and paths."
            )
        shape = tuple(pixel_values.shape)
        if pixel_values.ndim != 4 or shape[1] != self.channels:
            raise BackboneError(
                f"pixel_values has shape {shape}; {self.name} takes (batch, {self.channels}, height, width). "
                "Convert images to RGB, and add a batch axis to a single image with unsqueeze(0)."
            )
        if not pixel_values.is_floating_point():
            raise BackboneError(
                f"pixel_values is {pixel_values.dtype}; pass normalised floats (see backbone.preprocessing)."
            )
        rows, columns = self.anatomy.patch
        if shape[2] < rows or shape[3] < columns:
            raise BackboneError(f"images of {shape[2]}x{shape[3]} are smaller than one {rows}x{columns} patch.")
        return pixel_values.to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        # An anatomy is made of local functions, which cannot be pickled; it is taken again. The model and the module
        # share their weights, and would be two sets of them.
        state = {name: value for name, value in vars(self).items() if name not in {"anatomy", "_versions"}}
        return state | {"model": self.module}

    def __str__(self) -> str:
        return f"{self.name} ({self.family}, {self.depth} layers of {self.dim})"


@dataclass(frozen=True)
class BackboneRecord:
    """Which backbone a model belongs to: what `load_backbone` needs to find it again."""

    name: str
    family: str
    dim: int
    depth: int
    fingerprint: Fingerprint

    @classmethod
    def of(cls, backbone: Backbone) -> BackboneRecord:
        backbone.check_unchanged()
        return cls(backbone.name, backbone.family, backbone.dim, backbone.depth, backbone.fingerprint)

    def __str__(self) -> str:
        return f"{self.name} ({self.family}, {self.depth} layers of {self.dim}, fingerprint {self.fingerprint.short})"


def require_backbone(given: object) -> None:
    """Raises if it is something that `load_backbone` would have to load first, such as a name or a model."""
    if not isinstance(given, Backbone):
        what = repr(given) if isinstance(given, str) else type(given).__name__
        raise BackboneError(f"{what} is not a backbone: pass load_backbone({what}).")


def _mover(device: torch.device | str | None, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


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
