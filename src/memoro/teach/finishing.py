"""Training the whole task in a process of its own, while labelling goes on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from memoro.errors import TeachError
from memoro.evaluation.metrics import name_split

MOST_TEXT = 2000
"""Letters of a message of the training."""
SCORES = "accuracy", "mean_average_precision", "r2"
"""The main metric for classes, several labels and numbers."""


@dataclass
class Finishing:
    """Runs `command`, which trains and writes `file`, then calls `attach` with what it wrote."""

    command: Sequence[str]
    """`memoro teach PHOTOS --finish` with all its options, without those for files."""
    file: Path
    folder: Path
    """The run folder: metrics and report."""
    attach: Callable[[bytes], Any]
    kept: Path | None = None
    """Where `attach` keeps the task."""
    state: Literal["none", "training", "done", "failed", "stopped"] = "none"
    known: dict[str, Any] = field(default_factory=dict)
    """What else the page shows: of how many labels, the score, the message."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def report(self) -> Path | None:
        """The report of a training that is done."""
        file = self.folder / "report.html"
        return file if self.state == "done" and file.is_file() else None

    def start(self, labels: int, before: Mapping[str, float] | None = None) -> None:
        """Starts a training on the labels that are on disk now. `before` says how good answers are until then."""
        with self._lock:
            if self.state == "training":
                raise TeachError("the task is being trained already: wait for it, or stop it first.")
            for name in ("metrics.jsonl", "report.html"):
                with suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)
            command = [sys.executable, "-m", "memoro", *self.command]
            # Files, not pipes: a training goes on when this process is killed.
            output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # `_wait` closes them
            self._process = subprocess.Popen(
                [*command, "--out", str(self.file), "--folder", str(self.folder), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
            self.state, self.known = "training", {"labels": labels, "before": before}
            threading.Thread(target=self._wait, args=(self._process, output, errors), daemon=True).start()

    def stop(self) -> None:
        """Stops a training; what was written before stays."""
        with self._lock:
            if self._process is not None and self.state == "training":
                self.state = "stopped"
                self._process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)

    def close(self) -> None:
        """Ends a training that still runs."""
        self.stop()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def to_json(self) -> dict[str, Any]:
        """What the page shows."""
        epochs = 0
        with suppress(OSError, ValueError, TypeError, AttributeError):  # it is being written
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            epochs = max((int(json.loads(line).get("epoch", 0)) for line in lines), default=0)
        return {"state": self.state, "labels": 0, **self.known, "report": self.report is not None, "epochs": epochs}

    def _wait(self, process: subprocess.Popen[bytes], *files: IO[bytes]) -> None:
        process.wait()
        texts = []
        for stream in files:
            with stream:
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
        output, errors = texts
        with self._lock:
            if self.state != "training":
                return
            try:
                if process.returncode:
                    message = errors.strip().removeprefix("error: ")[-MOST_TEXT:]
                    raise TeachError(message or f"exit code {process.returncode}")
                metrics = json.loads(output).get("metrics", {})
                self.attach(self.file.read_bytes())
                score = next((metrics[name] for name in SCORES if name in metrics), None)
                split = name_split(metrics["split"]) if metrics else None
                file = str(self.kept or self.file)
                self.known |= {"score": score, "split": split, "file": file, "ended": time.time()}
                self.state = "done"
            except Exception as error:  # whatever it is, the page says it
                self.state, self.known = "failed", {**self.known, "message": str(error)}


def shell_commands(command: Sequence[str], task: Path, tasks: Path, photos: Path) -> list[str]:
    """The commands that do the same from the shell."""
    lines = [
        ["memoro", *command, "--out", str(task)],
        ["memoro", "predict", str(photos), "--tasks", str(task)],
        ["memoro", "serve", "--tasks", str(tasks)],
    ]
    return [shlex.join(line) for line in lines]
