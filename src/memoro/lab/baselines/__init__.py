"""Baselines: regimes that change the backbone's own tokens. Each model answers in a pass of its own."""

from memoro.lab.baselines.baseline import Baseline, BaselinePlan, BaselineRegime
from memoro.lab.baselines.dense import NaiveConcatenation
from memoro.lab.baselines.file import load_baseline, save_baseline
from memoro.lab.baselines.methods import BASELINES
from memoro.lab.baselines.train import evaluate_baseline, fit_baseline, train_baseline
from memoro.regimes import REGIMES as TASK_REGIMES
from memoro.regimes import Regime

REGIMES: dict[str, Regime] = {**TASK_REGIMES, **{name: baseline.regime for name, baseline in BASELINES.items()}}
"""All regimes that the laboratory compares, by name: those that train tasks, and baselines."""

__all__ = [
    "BASELINES",
    "REGIMES",
    "Baseline",
    "BaselinePlan",
    "BaselineRegime",
    "NaiveConcatenation",
    "evaluate_baseline",
    "fit_baseline",
    "load_baseline",
    "save_baseline",
    "train_baseline",
]
