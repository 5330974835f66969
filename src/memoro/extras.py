"""Optional dependencies."""

from __future__ import annotations

from importlib.util import find_spec

from memoro.errors import MemoroError


def need(*modules: str, extra: str = "train") -> None:
    """Raises, with the command that installs it, if a module of an optional extra is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise MemoroError(f"{names} not installed: pip install 'memoro[{extra}]'.")
