"""`memory-full`: patches and class token attend to memory too, as in the paper before it masks. `class-full`: the
model's own class token alone. `vpt`: prompts for each layer (VPT-deep)."""

from __future__ import annotations

from collections.abc import Mapping

from memoro.backbones import Backbone
from memoro.errors import BackboneError
from memoro.lab.baselines.baseline import BaselineRegime, Shapes
from memoro.lab.baselines.dense import run_dense


def shape_memory(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    """Class token (except where the family has none, as SigLIP) and memory: dim + depth * cells * dim, Table 5."""
    token: Shapes = {} if backbone.anatomy.class_token is None else {"class_token": (backbone.dim,)}
    return token | _shape_prompts(backbone, sizes)


def _shape_prompts(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    # VPT-deep drops what a layer makes of its prompts, so only their keys and values count: they are memory.
    return {"memory": (backbone.depth, sizes["cells"], backbone.dim)}


def _shape_class(backbone: Backbone, sizes: Mapping[str, int]) -> Shapes:
    if backbone.anatomy.class_token is None:
        raise BackboneError(
            f"{backbone.name} ({backbone.family}) has no class token, which regime 'class-full' trains. Use "
            "'head', 'vpt', or 'memory' with 0 cells, which adds a class token."
        )
    return {"class_token": (backbone.dim,)}


MEMORY_FULL = BaselineRegime("memory-full", ("cells",), shape_memory, run_dense)
CLASS_FULL = BaselineRegime("class-full", (), _shape_class, run_dense)
VPT = BaselineRegime("vpt", ("cells",), _shape_prompts, run_dense)
