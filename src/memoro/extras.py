"""Optional dependencies."""

from __future__ import annotations

from importlib.util import find_spec

from memoro.errors import TrainingError


def need(*modules: str, extra: str = "train") -> None:
    """Raises, with the command that installs it, if a module of an optional extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise TrainingError(f"{', '.join(missing)} is not installed: pip install 'memoro[{extra}]'.")
