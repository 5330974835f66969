"""Datasets: from folders, archives, tables and the hub to batches of pixels with their targets.

`load_data` and `load_columns` read splits of an `ImageSet`; a `Loader` makes batches.
"""

from memoro.data.dataset import DataOptions, ImageSet, Skipped, Splits
from memoro.data.hub import KNOWN, KnownSet
from memoro.data.loader import Batch, Loader
from memoro.data.open import load_any, load_columns, load_data, open_source
from memoro.data.splits import fold_numbers, hold_out, stratified_folds, stratified_split
from memoro.images import Augment

__all__ = [
    "KNOWN",
    "Augment",
    "Batch",
    "DataOptions",
    "ImageSet",
    "KnownSet",
    "Loader",
    "Skipped",
    "Splits",
    "fold_numbers",
    "hold_out",
    "load_any",
    "load_columns",
    "load_data",
    "open_source",
    "stratified_folds",
    "stratified_split",
]
