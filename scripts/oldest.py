"""Prints the lower bound of every dependency as a constraint for pip, so that they can be tested (make test-oldest)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds(project: dict[str, object]) -> dict[str, str]:
    """The oldest version of each dependency that is allowed, of the core and of all extras."""
    extras = project.get("optional-dependencies")
    assert isinstance(extras, dict)
    listed = [*project["dependencies"], *(one for some in extras.values() for one in some)]  # type: ignore[misc]
    found: dict[str, str] = {}
    for line in listed:
        if line.startswith("memoro["):
            continue
        match = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", line)
        if match is None:
            raise SystemExit(f"{PYPROJECT}: {line!r} has no lower bound: write NAME>=VERSION.")
        name, version = match.groups()
        if found.setdefault(name, version) != version:
            raise SystemExit(f"{PYPROJECT}: {name} has two lower bounds, {found[name]} and {version}.")
    return found


if __name__ == "__main__":
    for name, version in lower_bounds(tomllib.loads(PYPROJECT.read_text())["project"]).items():
        print(f"{name}=={version}")
