"""Regimes: what is trained. Each is an instance of `Regime`."""

from memoro.errors import TrainingError
from memoro.regimes.adapter import ADAPTER, ADAPTER_MEMORY
from memoro.regimes.baseline import Baseline, BaselineRegime
from memoro.regimes.full import FULL
from memoro.regimes.lora import LORA, LORA_ALL
from memoro.regimes.memory import HEAD, JOINT, MEMORY, READOUT, SIDE
from memoro.regimes.memory_full import CLASS_FULL, MEMORY_FULL, VPT
from memoro.regimes.propagated import PROPAGATED, PROPAGATED_ADDITIVE
from memoro.regimes.regime import Regime, TaskPlan

BASELINES: dict[str, BaselineRegime] = {
    regime.name: regime
    for regime in (
        MEMORY_FULL, CLASS_FULL, VPT, ADAPTER, ADAPTER_MEMORY, PROPAGATED, PROPAGATED_ADDITIVE, FULL, LORA, LORA_ALL,
    )
}  # fmt: skip
REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (HEAD, READOUT, MEMORY, SIDE, JOINT, *(baseline.regime for baseline in BASELINES.values()))
}


def find_regime(name: str) -> Regime:
    """The regime of this name."""
    if name not in REGIMES:
        raise TrainingError(f"unknown regime {name!r}; choose one of {', '.join(REGIMES)}.")
    return REGIMES[name]


__all__ = ["BASELINES", "REGIMES", "Baseline", "BaselineRegime", "Regime", "TaskPlan", "find_regime"]
