"""Datasets: from folders, archives, tables, the hub and streams to batches of pixels with their targets.

`load_data`, `load_columns` and `load_stream` read splits of an `ImageSet` or `ImageStream`; a `Loader` makes batches.
"""

from memoro.data.augment import Augment
from memoro.data.dataset import DataOptions, ImageSet, Skipped, Splits
from memoro.data.hub import KNOWN, KnownSet
from memoro.data.load import load_columns, load_data
from memoro.data.loader import Batch, Loader
from memoro.data.splits import fold_numbers, hold_out, stratified_folds, stratified_split
from memoro.data.stream import ImageStream, Streams, load_stream

__all__ = [
    "KNOWN",
    "Augment",
    "Batch",
    "DataOptions",
    "ImageSet",
    "ImageStream",
    "KnownSet",
    "Loader",
    "Skipped",
    "Splits",
    "Streams",
    "fold_numbers",
    "hold_out",
    "load_columns",
    "load_data",
    "load_stream",
    "stratified_folds",
    "stratified_split",
]
