"""Writes the pages that come from the code, for `make docs`: `PYTHONPATH=scripts python -m website build/reference`."""

from __future__ import annotations

import sys
from pathlib import Path

from website.commands import command_pages
from website.python import python_pages


def main(folder: Path) -> None:
    for name, text in [*python_pages().items(), *command_pages().items()]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
