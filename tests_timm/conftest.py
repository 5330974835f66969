"""The slow oracle is shared with the other lane."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
