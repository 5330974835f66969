"""What a loss is multiplied by in float16, so that gradients do not underflow."""

from __future__ import annotations

from dataclasses import dataclass

START = 2.0**16
GROWTH = 1000
"""After so many steps without an overflow, a scale that was halved is doubled again."""


@dataclass
class LossScale:
    """The scale of one run. In other precisions it is 1, and stays so."""

    value: float = 1.0
    most: float = 1.0
    good_steps: int = 0
    """Steps since the scale was halved."""

    @classmethod
    def of(cls, *, half: bool) -> LossScale:
        return cls(START, START) if half else cls()

    def shrink(self) -> bool:
        """Halves the scale because gradients overflowed; whether it could."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def count(self) -> None:
        """Counts a step without an overflow."""
        self.good_steps += 1
        if self.good_steps % GROWTH == 0 and self.value < self.most:
            self.value *= 2
