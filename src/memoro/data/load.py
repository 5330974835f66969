"""From a folder, archive, table, `datasets` object, hub id or known name to splits of images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memoro.arguments import several
from memoro.data.annotations import RawDataset, first_few, split_name
from memoro.data.dataset import DataOptions, Splits
from memoro.data.folders import read_archive, read_folder
from memoro.data.hub import (
    INATURALIST,
    KNOWN,
    KnownSet,
    apply_rule,
    explain_known,
    fetch,
    find_known,
    is_dataset_id,
    is_saved,
)
from memoro.data.manifests import TABLE_SUFFIXES, find_metadata, read_manifest, read_metadata
from memoro.data.splits import build_splits, hold_out
from memoro.data.tables import read_tables
from memoro.errors import DataError, first_line

_SOURCES = (
    "give a folder of class folders (or of train/ and test/ with class folders), a .zip of one, a .csv, .jsonl or "
    ".parquet with the columns path and label, a datasets.Dataset, a hub id like owner/name:train, or one of "
    + ", ".join(KNOWN)
)


def load_data(source: Any, **options: Any) -> Splits:
    """The splits of a folder, zip, CSV, JSON lines or Parquet file, `datasets` object, hub id or known name.

    The keyword arguments are the fields of `DataOptions`: `split`, `kind`, `image_column`, `label_column`, `labels`,
    `val_fraction`, `seed`, `config`, `allow_absolute`, `screen`, `workers`, `quiet`.
    """
    return _load(source, DataOptions(**options))


def load_columns(source: Any, columns: str | Sequence[str], **options: Any) -> dict[str, Splits]:
    """For each label column of a table the splits of its images; all columns hold out the same images.

    Tasks that are trained on these share every base pass (`fit_tasks`). Options as for `load_data`.
    """
    columns = several(columns)
    if not columns or len(set(columns)) < len(columns):
        raise DataError("name one or more label columns, each of them once.")
    common = DataOptions(**options)
    found: dict[str, Splits] = {}
    first: Splits | None = None
    for column in columns:
        splits = _load(source, replace(common, label_column=column, val_fraction=0), first)
        splits = replace(splits, name=f"{splits.name}-{column}")
        first = first or splits
        found[column] = hold_out(splits, common.val_fraction, common.seed, like=first)
    return found


def has_columns(source: Any, **options: Any) -> bool:
    """Whether labels come from the columns of a table, of which one may have the name of a task."""
    if isinstance(source, Splits):
        return False
    path = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    if path is None or not path.is_dir():
        return path is None or path.suffix.lower() != ".zip"
    return is_saved(path) or bool(find_metadata(path, DataOptions(**options)))


def _load(source: Any, options: DataOptions, checked: Splits | None = None) -> Splits:
    path = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) else None
    is_file = path is not None and path.suffix.lower() in {*TABLE_SUFFIXES, ".zip"}
    split = options.split
    if path is not None and path.exists():
        name, raw = path.stem if path.is_file() else path.resolve().name, _read_path(path, options)
    elif path is not None and str(source) in KNOWN:
        name, raw = str(source), _read_known(KNOWN[str(source)], options)
    elif path is None or (isinstance(source, str) and is_dataset_id(source) and not (is_file or path.parent.is_dir())):
        tables, name = fetch(source, split, options.config)
        raw, split = read_tables(tables, options, name), None
    else:
        raise DataError(f"{str(source)!r}: there is no such file or folder{_list_beside(path)}; {_SOURCES}.")
    if options.kind not in {None, raw.kind}:
        raise DataError(
            f"{name}: class folders give one class per image; for several labels or numbers, write a CSV file."
        )
    if split is not None:
        chosen = split_name(split)
        if chosen not in raw.splits:
            raise DataError(f"{name}: no split {split!r}; it has {', '.join(sorted(raw.splits))}.")
        raw = replace(raw, splits={chosen: raw.splits[chosen]})
    return build_splits(raw, name, options, checked)


def _list_beside(path: Path) -> str:
    """What there is instead of a file or folder that is not there."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        return ""
    return f" ({path.parent}/ has {first_few(names)})" if names and path.parent != Path() else ""


def _read_path(path: Path, options: DataOptions) -> RawDataset:
    suffix = path.suffix.lower()
    if path.is_dir():
        if is_saved(path):
            return read_tables(fetch(path)[0], options, str(path), path)
        if (path / INATURALIST).is_file():
            return read_manifest(path / INATURALIST, options)
        metadata = find_metadata(path, options)
        return read_metadata(path, metadata, options) if metadata else read_folder(path)
    if suffix == ".zip":
        return read_archive(path)
    if suffix in TABLE_SUFFIXES:
        return read_manifest(path, options)
    raise DataError(f"{path} is not a dataset: {_SOURCES}.")


def _read_known(known: KnownSet, options: DataOptions) -> RawDataset:
    local = find_known(known)
    if local is not None:
        return apply_rule(_read_path(local, options), known)
    if known.hub is None:
        raise explain_known(known)
    try:
        tables, _ = fetch(known.hub)
    except DataError as error:
        raise explain_known(known, f" ({first_line(error.__cause__)})") from None
    options = replace(options, label_column=options.label_column or known.label_column)
    return apply_rule(read_tables(tables, options, known.name), known)
