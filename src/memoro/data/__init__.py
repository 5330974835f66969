"""Datasets: from folders, archives, tables and the hub to batches of pixels with their targets.

`load_data` and `load_columns` read splits of an `ImageSet`; a `Loader` makes batches.
"""

from memoro.data.dataset import DataOptions as DataOptions
from memoro.data.dataset import ImageSet as ImageSet
from memoro.data.dataset import Splits as Splits
from memoro.data.loader import Batch as Batch
from memoro.data.loader import Loader as Loader
from memoro.data.open import load_columns as load_columns
from memoro.data.open import load_data as load_data
from memoro.images import Augment as Augment
