"""What a file records of a training and its metrics is any JSON, written by anyone. These functions show it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 200


def describe_fact(value: object, most: int = MAX_TEXT) -> str:
    """Any value as a short text. It may contain control characters."""
    try:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    except RecursionError:
        text = "nested too deeply to show"
    except ValueError:  # Python writes no more than 4300 digits
        text = "a number too large to show"
    return text if len(text) <= most else f"{text[:most]}…"


def finite_number(value: object) -> float | None:
    """The value as a float, if it is a number that fits one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def short_facts(training: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The facts about a training that fit on a line; lists of numbers, and numbers that are too large, as text."""
    found: dict[str, str | int | float] = {}
    for name, value in training.items():
        if isinstance(value, (str, bool)) or finite_number(value) is not None:
            found[name] = value
        elif isinstance(value, (int, float)):
            found[name] = describe_fact(value)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(one, (int, float)) for one in value):
            found[name] = describe_fact(", ".join(map(describe_fact, value[:MAX_TEXT])))
    return found
