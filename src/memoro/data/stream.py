"""An image stream: a set too big to hold, read from front to back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from memoro.data.augment import Purpose, uniform
from memoro.data.hub import KNOWN, fetch
from memoro.data.listing import encode, parse
from memoro.data.tables import Columns, choose, encoded, named, roles_of
from memoro.errors import DataError, ImageError

if TYPE_CHECKING:
    from memoro.heads import HeadKind


class StreamSample(NamedTuple):
    """One image of a stream. `number` counts from its beginning, so that it names the same image in every epoch."""

    number: int
    data: bytes
    target: Tensor


@dataclass(frozen=True, eq=False)
class ImageStream:
    """Images of one split in the order in which they arrive."""

    name: str
    labels: tuple[str, ...]
    kind: HeadKind
    table: Any
    columns: Columns
    length: int | None = None
    """How many images there are, where the source tells."""
    holdout: tuple[int, float, bool] | None = None
    """(seed, fraction, whether this is the held-out side) where one split was cut in two."""

    def samples(self) -> Iterator[StreamSample]:
        """Every image with its target. Images without a label are passed over."""
        for number, row in enumerate(self.table):
            if self.holdout is not None:
                seed, fraction, held = self.holdout
                if (uniform(1, seed, Purpose.STREAM, sample=number)[0] < fraction) != held:
                    continue
            where = self.where(number)
            cell = named([row[self.columns.values[0]]], self.columns)[0]
            if len(self.columns.values) > 1:
                cell = tuple(row[column] for column in self.columns.values)
            if cell is None and self.kind == "softmax":
                continue
            value = parse([cell], self.kind, lambda _, where=where: where)[0]  # type: ignore[misc]
            try:
                target = encode([value], self.labels, self.kind)[0]
            except KeyError as error:
                raise DataError(f"{where}: {error} is not among the labels; pass all of them as labels.") from None
            try:
                data = encoded(row[self.columns.image], where)
            except ImageError:
                data = b""  # the loader counts it among the unreadable
            yield StreamSample(number, data, target)

    def where(self, number: int) -> str:
        return f"{self.name}, image {number} of the stream"


@dataclass(frozen=True)
class Streams:
    """The splits of a stream, and what to know about them."""

    labels: tuple[str, ...]
    kind: HeadKind
    train: ImageStream | None
    val: ImageStream | None
    test: ImageStream | None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        first = self.train or self.val or self.test
        return "stream" if first is None else first.name.rpartition(":")[0] or first.name


def load_stream(
    source: Any,
    *,
    split: str | None = None,
    kind: HeadKind | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    val_fraction: float = 0.15,
    seed: int = 0,
    config: str | None = None,
) -> Streams:
    """The streams of a hub id, one of the known names, or an iterable dataset: nothing is stored on disk.

    What a stream cannot tell, it cannot check: images are not screened and duplicates not found, and a validation
    split, where there is none, takes each image by lot instead of class by class.
    """
    if isinstance(source, str) and source in KNOWN and KNOWN[source].hub is not None:
        known = KNOWN[source]
        source, label_column = known.hub, label_column or known.label_column
    tables, name = fetch(source, split=split, config=config, streaming=True)
    roles, notes = roles_of(tables, name)
    features = tables[next(iter(roles.values()))].features
    if features is None:
        tables = {key: table._resolve_features() for key, table in tables.items()}
        features = tables[next(iter(roles.values()))].features
    columns = choose(features, kind=kind, image_column=image_column, label_column=label_column, name=name)
    names = tuple(labels) if labels is not None else columns.labels
    if names is None:
        raise DataError(f"{name}: the column {columns.values[0]!r} does not list its labels; pass them as labels=[…].")
    streams = {}
    for role, key in roles.items():
        table = _encoded(tables[key], columns)
        streams[role] = ImageStream(f"{name}:{key}", names, columns.kind, table, columns, _length(tables[key], key))
    if "train" in streams and "val" not in streams and val_fraction > 0:
        whole = streams["train"]
        streams["train"] = replace(whole, holdout=(seed, val_fraction, False), length=None)
        streams["val"] = replace(whole, holdout=(seed, val_fraction, True), length=None)
        notes.append(f"{val_fraction:.0%} of train, drawn by lot with seed {seed}, became the validation split.")
    notes.append("a stream is not screened: unreadable images are found, counted and skipped while it is read.")
    return Streams(
        names, columns.kind, streams.get("train"), streams.get("val"), streams.get("test"), notes=tuple(notes)
    )


def _encoded(table: Any, columns: Columns) -> Any:
    import datasets

    table = table.select_columns([columns.image, *columns.values])
    if isinstance(table.features[columns.image], datasets.Image):
        table = table.cast_column(columns.image, datasets.Image(decode=False))
    return table


def _length(table: Any, split: str) -> int | None:
    splits = getattr(table.info, "splits", None) or {}
    return splits[split].num_examples if split in splits else None
