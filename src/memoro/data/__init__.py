"""Images and what they show: from folders, zips, tables and the hub to batches of pixels."""

from memoro.data.augment import Augment
from memoro.data.dataset import ImageSet, Skipped
from memoro.data.hub import KNOWN, KnownSet
from memoro.data.load import load_columns, load_data
from memoro.data.loader import Batch, Loader
from memoro.data.screening import check_images
from memoro.data.splits import Splits, stratified_folds, stratified_split
from memoro.data.stream import ImageStream, Streams, load_stream

__all__ = [
    "KNOWN",
    "Augment",
    "Batch",
    "ImageSet",
    "ImageStream",
    "KnownSet",
    "Loader",
    "Skipped",
    "Splits",
    "Streams",
    "check_images",
    "load_columns",
    "load_data",
    "load_stream",
    "stratified_folds",
    "stratified_split",
]
