"""All baselines by name."""

from memoro.lab.baselines.adapter import ADAPTER, ADAPTER_MEMORY
from memoro.lab.baselines.baseline import BaselineRegime
from memoro.lab.baselines.full import FULL
from memoro.lab.baselines.lora import LORA, LORA_ALL
from memoro.lab.baselines.memory_full import CLASS_FULL, MEMORY_FULL, VPT
from memoro.lab.baselines.propagated import PROPAGATED, PROPAGATED_ADDITIVE

BASELINES: dict[str, BaselineRegime] = {
    regime.name: regime
    for regime in (
        MEMORY_FULL, CLASS_FULL, VPT, ADAPTER, ADAPTER_MEMORY, PROPAGATED, PROPAGATED_ADDITIVE, FULL, LORA, LORA_ALL,
    )
}  # fmt: skip
