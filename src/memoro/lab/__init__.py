"""The laboratory: what exists to study the method, not to use it. The product never imports it.

`memoro lab` trains baselines and compares them with tasks, reproduces the paper's tables, and measures speed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memoro.lab.baselines import BASELINES as BASELINES
    from memoro.lab.baselines import Baseline as Baseline
    from memoro.lab.baselines import NaiveConcatenation as NaiveConcatenation
    from memoro.lab.baselines import evaluate_baseline as evaluate_baseline
    from memoro.lab.baselines import fit_baseline as fit_baseline
    from memoro.lab.baselines import load_baseline as load_baseline
    from memoro.lab.baselines import save_baseline as save_baseline
    from memoro.lab.baselines import train_baseline as train_baseline

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


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # They import torch, which reads settings that some commands of `memoro lab` make first.
        if name not in __all__:
            raise AttributeError(f"module 'memoro.lab' has no attribute {name!r}")
        return getattr(import_module("memoro.lab.baselines"), name)
