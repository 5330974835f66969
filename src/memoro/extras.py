"""Parts of an install that not everybody needs."""

from __future__ import annotations

from importlib.util import find_spec

from memoro.errors import TrainingError


def need(*modules: str, extra: str = "train") -> None:
    """Raises, naming the fix, where a module of an optional extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise TrainingError(f"this needs {', '.join(missing)}, not installed here: pip install 'memoro[{extra}]'.")
