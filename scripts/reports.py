"""What the comparisons have in common: data with a test split, results as JSON beside a Markdown report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import memoro
from memoro.data import Splits


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of every comparison."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="sets with a test split")
    help = "the report (NAME.new.md where NAME.md has been edited); results are written as JSON beside it"
    parser.add_argument("--out", type=Path, required=True, help=help)
    return parser


def load_splits(source: str, labels: Sequence[str] | None = None) -> Splits:
    """A set whose training images are not split further."""
    splits = memoro.load_data(source, val_fraction=0, labels=labels, quiet=True)
    assert splits.train is not None, f"{source} has no training images"
    assert splits.test is not None, f"{source} has no test split"
    return splits


def load_results(out: Path) -> dict[str, Any]:
    """The results of earlier calls, or nothing."""
    file = out.with_suffix(".json")
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return results


GENERATED = "<!-- Generated. Remove this line after editing: the next call then leaves the file as it is. -->"


def write_report(out: Path, results: dict[str, Any], lines: Iterable[str]) -> Path:
    """Writes the results and the report; returns where the report is: beside `out` where that has been edited."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    if out.is_file() and GENERATED not in out.read_text():
        out = out.with_suffix(".new.md")
    out.write_text("\n".join([*lines, "", GENERATED]) + "\n")
    return out


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]
