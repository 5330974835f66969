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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memoro.errors import TeachError

MOST_TEXT = 2000
"""Letters of a message of the training."""


@dataclass
class Finishing:
    """Runs `command`, which trains and writes `file`, then calls `attach` with what it wrote."""

    command: Sequence[str]
    """`memoro teach PHOTOS --finish` with all its options, without those for files."""
    file: Path
    folder: Path
    """The run folder: metrics and report."""
    attach: Callable[[bytes], Any]
    state: str = "none"
    """none, training, done, failed or stopped."""
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    """What the command printed."""
    labels: int = 0
    """Images that were learned from."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def start(self, labels: int) -> None:
        """Starts a training on the labels that are on disk now."""
        with self._lock:
            if self.state == "training":
                raise TeachError("the task is being trained already: wait for it, or stop it first.")
            output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the thread that waits
            errors = tempfile.TemporaryFile()  # noqa: SIM115
            arguments = [*self.command, "--out", str(self.file), "--folder", str(self.folder), "--json"]
            with suppress(OSError):
                self._progress_file.unlink(missing_ok=True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memoro", *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )
            self.state, self.message, self.result, self.labels = "training", "", {}, labels
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
        found: dict[str, Any] = {"state": self.state, "message": self.message, "labels": self.labels}
        if self.state == "training":
            found["epochs"] = self._epochs()
        if self.state == "done":
            metrics = {name: value for name, value in self.result.get("metrics", {}).items() if name != "worst_classes"}
            report = self.folder / "report.html"
            found |= {"file": str(self.file), "metrics": metrics, "report": str(report) if report.is_file() else None}
        return found

    @property
    def _progress_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _epochs(self) -> int:
        """The epochs that are done, by the run folder."""
        try:
            lines = self._progress_file.read_text().splitlines()
            return max((int(json.loads(line).get("epoch", 0)) for line in lines), default=0)
        except (OSError, ValueError, TypeError, AttributeError):
            return 0

    def _wait(self, process: subprocess.Popen[bytes], output: Any, errors: Any) -> None:
        code = process.wait()
        with output, errors:
            output.seek(0)
            errors.seek(0)
            text, problem = output.read().decode(errors="replace"), errors.read().decode(errors="replace")
        with self._lock:
            if self.state != "training":
                return
            try:
                if code:
                    raise TeachError(problem.strip().removeprefix("error: ")[-MOST_TEXT:] or f"exit code {code}")
                self.result = json.loads(text)
                self.attach(self.file.read_bytes())
                self.state = "done"
            except Exception as error:  # whatever it is, the page says it
                self.state, self.message = "failed", str(error)


def shell_commands(command: Sequence[str], task: Path, tasks: Path, photos: str) -> list[str]:
    """The commands that do the same from the shell."""
    lines = [
        ["memoro", *command, "--out", str(task)],
        ["memoro", "predict", photos, "--tasks", str(task)],
        ["memoro", "serve", "--tasks", str(tasks)],
    ]
    return [shlex.join(line) for line in lines]
