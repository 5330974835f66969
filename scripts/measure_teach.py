"""Measures what `memoro teach` saves: labels needed by choice of images, and label errors that are noticed.

    python scripts/measure_teach.py labels a.zip b.zip --backbone FOLDER --image-size 112 --keep /tmp/kept --out results/teach.md
    python scripts/measure_teach.py errors a.zip b.zip --backbone FOLDER --image-size 112 --keep /tmp/kept --out results/teach.md

A simulated labeller knows all labels and gives those of the images that are suggested. Statistics are kept as .npz files,
so a second call computes no pass. With cleanlab installed (in an environment of its own, not memoro's), `errors` writes
the answers for `scripts/measure_cleanlab.py` too. Results of other sets, backbones and ways stay in the report.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import memoro
from memoro.backbones import Backbone
from memoro.data import ImageSet, Loader
from memoro.data.near import near_groups
from memoro.engine.streams import pool_pass
from memoro.pages.charts import Line
from memoro.tasks.taskspec import ReadOut
from memoro.teach.learning import Lesson, solve, used_labels
from memoro.teach.suggestions import Scene, suggest
from memoro.teach.suspects import rank, second_look
