"""Image streams: datasets too big to store, read from front to back (iterable-style)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from memoro.data.annotations import encode, labelled_rows, parse
from memoro.data.augment import Purpose, uniform
from memoro.data.columns import Columns, check_numbers, choose_columns
from memoro.data.dataset import MAX_UNREADABLE, SPLITS, AnySplits, DataOptions, Labelled, SplitName
from memoro.data.hub import KNOWN, fetch
from memoro.data.tables import Places, encoded_image, match_splits, undecoded
from memoro.errors import DataError, ImageError


class StreamSample(NamedTuple):
    """One image of a stream. `number` counts from its beginning, so that it names the same image in every epoch."""

    number: int
    data: bytes
    target: Tensor


@dataclass(frozen=True, eq=False)
class ImageStream(Labelled):
    """An iterable-style dataset: the images of one split in the order in which they arrive."""

    table: Any
    columns: Columns
    places: Places
    length: int | None = None
    """How many images there are, where the source tells."""
    holdout: tuple[int, float, bool] | None = None
    """(seed, fraction, whether this is the held-out side) where one split was cut in two."""
    max_unreadable: float = MAX_UNREADABLE

    def samples(self) -> Iterator[StreamSample]:
        """Every image with its target. Images without a label are left out."""
        for number, row in enumerate(self.table):
            if self.holdout is not None:
                seed, fraction, held = self.holdout
                if (uniform(1, seed, Purpose.STREAM, sample=number)[0] < fraction) != held:
                    continue
            where = self.where(number)
            cells = self.columns.cells({column: [row[column]] for column in self.columns.values})
            if not labelled_rows(cells, self.kind):
                continue
            try:
                [target] = encode(parse(cells, self.kind, lambda _, where=where: where), self.labels, self.kind)  # type: ignore[misc]
            except KeyError as error:
                raise DataError(f"{where}: {error} is not among the labels; pass all of them as labels.") from None
            try:
                data = encoded_image(row[self.columns.image], where, self.places)
            except ImageError:
                data = b""  # the loader counts it among the unreadable
            yield StreamSample(number, data, target)

    def where(self, number: int) -> str:
        return f"{self.name}, image {number} of the stream"


@dataclass(frozen=True, eq=False)
class Streams(AnySplits[ImageStream]):
    """The splits of a stream."""


def load_stream(source: Any, **options: Any) -> Streams:
    """The streams of a hub id, a known name, or an iterable dataset: nothing is stored on disk. Options: `DataOptions`.

    Images of a stream are not checked in advance and duplicates not found. A validation split, where there is none,
    takes each image at random instead of class by class.
    """
    chosen = DataOptions(**options)
    if isinstance(source, str) and source in KNOWN and KNOWN[source].hub is not None:
        known = KNOWN[source]
        source, chosen = known.hub, replace(chosen, label_column=chosen.label_column or known.label_column)
    tables, name = fetch(source, chosen.split, chosen.config, streaming=True)
    keys, notes = match_splits(tables, name)
    first = next(iter(keys.values()))
    if tables[first].features is None:
        tables = {key: table._resolve_features() for key, table in tables.items()}
    columns = choose_columns(tables[first].features, chosen, name)
    labels = columns.labels if chosen.labels is None else tuple(chosen.labels)
    if labels is None:
        raise DataError(f"{name}: the column {columns.values[0]!r} does not list its labels; pass them as labels=[…].")
    if columns.kind == "regression":
        notes += check_numbers(columns.values, labels, name)
    places = Places(os.getcwd(), hub=True, anywhere=chosen.allow_absolute)
    streams: dict[SplitName, ImageStream] = {}
    for split, key in keys.items():
        table, sizes = tables[key], getattr(tables[key].info, "splits", None) or {}
        length = sizes[key].num_examples if key in sizes else None
        table = undecoded(table, columns.image, *columns.values)
        common = (f"{name}:{key}", labels, columns.kind, table, columns, places, length)
        streams[split] = ImageStream(*common, max_unreadable=chosen.max_unreadable)
    seed, fraction = chosen.seed, chosen.val_fraction
    if "train" in streams and "val" not in streams and fraction > 0:
        whole = streams["train"]
        streams["train"] = replace(whole, holdout=(seed, fraction, False), length=None)
        streams["val"] = replace(whole, holdout=(seed, fraction, True), length=None)
        notes.append(f"{fraction:.0%} of train (random, seed {seed}) became the validation split.")
    notes.append("images of a stream are checked while it is read: unreadable ones are counted and left out.")
    train, val, test = map(streams.get, SPLITS)
    return Streams(name, labels, columns.kind, train, val, test, notes=tuple(notes))
