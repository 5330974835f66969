"""The laboratory: what exists to study the method, not to use it. The product never imports it.

`memoro lab` trains baselines and compares them with tasks, reproduces the paper's tables, and measures speed.
"""

from importlib import import_module
from typing import Any

__all__ = [
    "BASELINES",
    "Baseline",
    "NaiveConcatenation",
    "evaluate_baseline",
    "fit_baseline",
    "load_baseline",
    "save_baseline",
    "train_baseline",
]


def __getattr__(name: str) -> Any:
    # They import torch, which reads settings that some commands of `memoro lab` make first.
    if name not in __all__:
        raise AttributeError(f"module 'memoro.lab' has no attribute {name!r}")
    return getattr(import_module("memoro.lab.baselines"), name)
