"""Finished measurements: one JSON object per line, one file per table, shared by all tables of a folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from memoro.errors import DataError
from memoro.reproduce.plan import Key

LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Record:
    """One measurement, how long its job took, and what on."""

    table: str
    """The table that it was first measured for."""
    key: Key
    result: dict[str, Any]
    seconds: float
    """Of the whole job, whose methods shared the passes."""
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
        with file.open("a+", encoding="utf-8") as out:
            out.seek(0)
            whole = out.read().rpartition("\n")
            if whole[2]:  # a line that a crash cut off
                out.truncate(len((whole[0] + whole[1]).encode()))
            for record in records:
                out.write(json.dumps(vars(record), separators=(",", ":")) + "\n")
            out.flush()
            os.fsync(out.fileno())

    def current(self, kind: str, methods: Sequence[Any] | None = None) -> list[Record]:
        """The newest record of every measurement of a kind; only those whose `methods` are all among these.

        Records of earlier weights of a backbone are left out where the newest were measured with all methods that they
        were, on the same sets; else they have the fingerprint in the backbone's name.
        """
        newest: dict[str, Record] = {}
        weights: dict[str, str] = {}
        for record in self.entries:
            weights[record.key["backbone"]] = record.key["fingerprint"]
            if record.key["kind"] == kind and (methods is None or all(one in methods for one in record.key["methods"])):
                newest[_text(record.key)] = record
        measured: dict[tuple[str, str], set[str]] = {}
        for record in newest.values():
            measured.setdefault(_place(record), set()).add(_text(record.key["methods"]))
        found = []
        for record in newest.values():
            place, latest = _place(record), weights[record.key["backbone"]]
            if record.key["fingerprint"] != latest:
                # What a task costs is shown beside its accuracy, with the same weights.
                if kind != "counts" and measured[place] <= measured.get((place[0], latest), set()):
                    continue
                record = replace(record, key={**record.key, "backbone": f"{record.key['backbone']} ({place[1]})"})
            found.append(record)
        return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _place(record: Record) -> tuple[str, str]:
    """What a record is about, whatever the method: all else in its key, and the weights."""
    return _text({**record.key, "methods": None, "fingerprint": None}), record.key["fingerprint"]
