"""The documentation's blocks are read as the other lane reads them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
