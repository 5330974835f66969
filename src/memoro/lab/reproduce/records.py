"""Finished measurements: one JSON object per line, one file per table, shared by all tables of a folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from memoro.errors import DataError
from memoro.lab.reproduce.plan import Key

LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Record:
    """One measurement, how long its job took, and what on."""

    table: str
    """The table that it was first measured for."""
    key: Key
    result: dict[str, Any]
    seconds: float
    """How long the whole job took, whose methods shared the passes."""
    together: int
    """How many methods that were."""
    machine: dict[str, Any]
    date: str
    command: str
    """As the user typed it, without the folders of files."""

    @classmethod
    def now(
        cls, table: str, key: Key, result: dict[str, Any], seconds: float, together: int, command: str = ""
    ) -> Record:
        date, result = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), dict(json.loads(json.dumps(result)))
        return cls(table, key, result, round(seconds, 1), together, this_machine(), date, command)

    @property
    def method(self) -> str:
        return str(self.key["methods"][0]["name"])


def this_machine() -> dict[str, Any]:
    """Cores, threads and versions: no names and no paths."""
    from memoro import __version__

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "architecture": platform.machine(),
        "versions": {"memoro": __version__, "python": platform.python_version()}
        | {name: version(name) for name in LIBRARIES},
    }


@dataclass
class Records:
    """The measurements in a folder. Those of this process are kept in memory too, so that all processes agree."""

    folder: Path
    entries: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Records:
        """All that is recorded there, oldest first. A last line that was cut off by a crash is left out."""
        entries = []
        for file in sorted(folder.glob("*.jsonl")):
            lines = file.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, start=1):
                try:
                    entries.append(Record(**json.loads(line)))
                except (ValueError, TypeError) as error:
                    if number == len(lines):
                        continue
                    raise DataError(f"{file}, line {number} is not a record ({error}): remove that line.") from None
        return cls(folder, sorted(entries, key=lambda record: record.date))

    def find(self, key: Key) -> Record | None:
        """The newest record of a measurement."""
        return next((record for record in reversed(self.entries) if record.key == key), None)

    def add(self, records: Sequence[Record], *, write: bool = True) -> None:
        """Appends to the table's file, on disk before this returns; `write` is for one process of several."""
        self.entries += records
        if not write or not records:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{records[0].table}.jsonl"
        lines = "".join(json.dumps(vars(record), separators=(",", ":")) + "\n" for record in records)
        with file.open("ab+", buffering=0) as out:
            out.seek(0)
            whole = out.read()
            if not whole.endswith(b"\n"):  # a line that a crash cut off
                out.truncate(whole.rfind(b"\n") + 1)
            out.write(lines.encode())  # one call, so that lines of processes that share the folder do not mix
            os.fsync(out.fileno())

    def current(self, kind: str, methods: Sequence[Any] | None = None) -> list[Record]:
        """The newest record of every measurement of a kind; only those whose `methods` are all among these.

        Records of earlier weights of a backbone, and of other images under the name of a set, are left out.
        """
        weights: dict[str, str] = {}
        images: dict[str, str] = {}
        for record in self.entries:
            weights[record.key["backbone"]] = record.key["fingerprint"]
            images |= record.key["images"]
        newest: dict[str, Record] = {}
        for record in self.entries:
            key = record.key
            wanted = key["kind"] == kind and (methods is None or all(one in methods for one in key["methods"]))
            same = key["fingerprint"] == weights[key["backbone"]] and key["images"].items() <= images.items()
            if wanted and same:
                newest[json.dumps(key, sort_keys=True)] = record
        return list(newest.values())
