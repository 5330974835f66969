"""From whatever a user has to splits of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoro.data.folders import list_archive, list_folder
from memoro.data.hub import KNOWN, TRAIN, explain_known, fetch, find_known, is_hub_id, is_saved, with_rule
from memoro.data.listing import Listing, role_of
from memoro.data.splits import Splits, build_splits, hold_out
from memoro.data.tables import MANIFEST_SUFFIXES, list_manifest, list_tables
from memoro.errors import DataError

if TYPE_CHECKING:
    from memoro.heads import HeadKind

_FORMS = (
    "give a folder of class folders (or of train/ and test/ with class folders), a .zip of one, a .csv or .parquet "
    "with the columns path and label, a datasets.Dataset, a hub id like owner/name:train, or one of " + ", ".join(KNOWN)
)


def load_data(
    source: Any,
    *,
    split: str | None = None,
    kind: HeadKind | None = None,
    image_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    val_fraction: float = 0.15,
    fold: tuple[int, int] | None = None,
    seed: int = 0,
    config: str | None = None,
    allow_absolute: bool = False,
    screen: bool = True,
    screened: Splits | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Splits:
    """The splits of a folder, zip, CSV, Parquet file, `datasets` object, hub id or known name.

    `labels` are those of a task that the data must match; without them the training classes are taken, sorted. Where
    the data has no validation split, `val_fraction` of train becomes one (0: none, train stays whole), or with
    `fold=(k, n)` the k-th of n folds does. `split` uses one split of the data alone. `screen` decodes every image once:
    unreadable ones are left out and listed, more than 5 % of them is an error; duplicates are found on the way. What
    `screened` has seen of the same images is not decoded again.
    """
    columns: dict[str, Any] = {"kind": kind, "image_column": image_column, "label_column": label_column}
    path = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    if path is None:
        tables, name = fetch(source, split=split, config=config)
        listing, split = list_tables(tables, **columns, name=name), None
    elif path.exists():
        name = path.stem if path.is_file() else path.resolve().name
        listing = _list_path(path, columns, allow_absolute)
    elif str(source) in KNOWN:
        name = str(source)
        listing = _list_known(name, columns, allow_absolute)
    elif isinstance(source, str) and is_hub_id(source) and path.suffix.lower() not in {*MANIFEST_SUFFIXES, ".zip"}:
        tables, name = fetch(source, split=split, config=config)
        listing, split = list_tables(tables, **columns, name=name), None
    else:
        raise DataError(f"{str(source)!r}: there is no such file or folder; {_FORMS}.")
    if kind is not None and listing.kind != kind:
        raise DataError(
            f"{name}: class folders give one class per image (softmax); for {kind}, write a CSV or Parquet."
        )
    if split is not None:
        listing = _only(listing, split, name)
    return build_splits(
        listing,
        name,
        labels=labels,
        val_fraction=val_fraction,
        fold=fold,
        seed=seed,
        screen=screen,
        screened=screened,
        workers=workers,
        quiet=quiet,
    )


def load_columns(
    source: Any, columns: Sequence[str], *, val_fraction: float = 0.15, seed: int = 0, **options: Any
) -> dict[str, Splits]:
    """For each label column of a table the splits of its images, so cut that all columns have the same ones.

    Tasks that are trained on these share every base pass (`fit_tasks`). Options as for `load_data`.
    """
    if not columns or len(set(columns)) < len(columns):
        raise DataError("name one label column or more, each of them once.")
    found: dict[str, Splits] = {}
    first: Splits | None = None
    for column in columns:
        splits = load_data(source, label_column=column, val_fraction=0, seed=seed, screened=first, **options)
        splits = replace(splits, name=f"{splits.name}-{column}")
        first = first or splits
        found[column] = splits if splits.val is not None else hold_out(splits, val_fraction, seed, like=first)
    return found


def _list_path(path: Path, columns: dict[str, Any], allow_absolute: bool) -> Listing:
    if path.is_dir():
        if is_saved(path):
            tables, name = fetch(path, split=None, config=None)
            return list_tables(tables, **columns, name=name)
        if (path / TRAIN).is_file():
            return list_manifest(path / TRAIN, **columns, allow_absolute=allow_absolute)
        return list_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".zip":
        return list_archive(path)
    if suffix in MANIFEST_SUFFIXES:
        return list_manifest(path, **columns, allow_absolute=allow_absolute)
    raise DataError(f"{path} is no set of images: {_FORMS}.")


def _list_known(name: str, columns: dict[str, Any], allow_absolute: bool) -> Listing:
    known = KNOWN[name]
    local = find_known(known)
    if local is not None:
        return with_rule(_list_path(local, columns, allow_absolute), known)
    if known.hub is None:
        raise explain_known(known)
    columns = {**columns, "label_column": columns["label_column"] or known.label_column}
    try:
        tables, _ = fetch(known.hub, split=None, config=None)
    except DataError as error:
        raise explain_known(known, f" ({error.__cause__})") from None
    return with_rule(list_tables(tables, **columns, name=name), known)


def _only(listing: Listing, split: str, name: str) -> Listing:
    role = role_of(split)
    if role is None or role not in listing.parts:
        raise DataError(f"{name}: no split {split!r}; it has {', '.join(sorted(listing.parts))}.")
    return replace(listing, parts={role: listing.parts[role]})
