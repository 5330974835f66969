"""Regimes: what is trained. Each is an instance of `Regime`."""

from memoro.errors import TrainingError
from memoro.regimes.memory import HEAD, JOINT, MEMORY, READOUT, SIDE
from memoro.regimes.regime import Regime, TaskPlan

REGIMES: dict[str, Regime] = {regime.name: regime for regime in (HEAD, READOUT, MEMORY, SIDE, JOINT)}


def find_regime(regime: str | Regime) -> Regime:
    """The regime of this name; one that is given stays as it is."""
    if isinstance(regime, Regime):
        return regime
    if regime not in REGIMES:
        raise TrainingError(
            f"unknown regime {regime!r}; choose one of {', '.join(REGIMES)}. Methods that change the backbone's "
            "tokens, such as full and lora, are trained with memoro lab train-baseline."
        )
    return REGIMES[regime]


__all__ = ["REGIMES", "Regime", "TaskPlan", "find_regime"]
