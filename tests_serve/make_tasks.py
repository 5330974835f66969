"""Writes tasks with random weights for memoro-tiny to a folder, and an image. Runs where memoro is installed.

python tests_serve/make_tasks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

import memoro

folder = Path(sys.argv[1])
backbone = memoro.load_backbone("memoro-tiny")
generator = torch.Generator().manual_seed(0)
kinds = {"pets": "softmax", "tags": "multilabel", "weight": "regression", "my fruits": "softmax"}
for name, kind in kinds.items():
    task = memoro.new_task(backbone, name, ["cat", "dog", "bird"][: 1 if kind == "regression" else 3], head=kind)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    task.update_spec(preprocessing=backbone.preprocessing)
    memoro.save_task(task, folder / "tasks" / f"{name}.safetensors")
Image.effect_noise((80, 60), 90).convert("RGB").save(folder / "image.png")
