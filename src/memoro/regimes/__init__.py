"""The ways to train a task. All of them have the contract of `Regime`."""

from memoro.errors import TrainingError
from memoro.regimes.head import HEAD
from memoro.regimes.memory import MEMORY
from memoro.regimes.regime import Regime, TaskPlan

REGIMES: dict[str, Regime] = {regime.name: regime for regime in (HEAD, MEMORY)}


def find_regime(name: str) -> Regime:
    """The regime of this name."""
    if name not in REGIMES:
        raise TrainingError(f"no regime {name!r}. There are: {', '.join(REGIMES)}.")
    return REGIMES[name]


__all__ = ["REGIMES", "Regime", "TaskPlan", "find_regime"]
