"""The laboratory: what exists to study the method, not to use it. The product never imports it.

`memoro lab` trains baselines and compares them with tasks, reproduces the paper's tables, and measures speed.
"""

from memoro.lab.baselines import (
    BASELINES,
    Baseline,
    NaiveConcatenation,
    evaluate_baseline,
    fit_baseline,
    load_baseline,
    save_baseline,
    train_baseline,
)

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
