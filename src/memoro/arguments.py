"""Arguments that take one value or several, and NumPy integers."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any, TypeVar

T = TypeVar("T")


def several(values: T | Iterable[T]) -> tuple[T, ...]:
    """The values as a tuple. Text, and what cannot be iterated over, is a single value."""
    single: Any = values
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (single,)


def plain_int(value: Any) -> Any:
    """A whole number of any type as an int; anything else as it is."""
    return int(value) if isinstance(value, Integral) else value
