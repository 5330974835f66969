"""The slow oracle is shared with the other lane."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
torch.set_num_threads(1)
