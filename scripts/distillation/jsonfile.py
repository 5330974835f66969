"""JSON files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memoro.files import write_whole


def write_json(path: Path, content: Any) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
