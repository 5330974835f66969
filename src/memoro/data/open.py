"""Opens whatever names images: a folder, zip, table, `datasets`, hub id or known name, or an object of Python."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from memoro.data.columns import PATH_COLUMNS, RawDataset, find_image_column, first_few, split_name
from memoro.data.dataset import DataOptions, DataSettings, ImageSet, Splits, unlabelled
from memoro.data.folders import open_archive, open_folder, read_tree
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
from memoro.data.screening import drop_unreadable
from memoro.data.source import Chain, Files, Objects, ParquetImages, Paths, Places, Source, is_endless
from memoro.data.splits import build_splits, hold_out
from memoro.data.tables import (
    TABLE_SUFFIXES,
    column_names,
    find_metadata,
    holds_bytes,
    open_images,
    open_parquet,
    read_columns,
    read_manifest,
    read_metadata,
    read_tables,
)
from memoro.errors import DataError, first_line
from memoro.images import PICTURE_TYPES
from memoro.images.finding import IMAGE_SUFFIXES, is_list, read_lines
from memoro.options import several

_SOURCES = (
    "give a folder of class folders (or of train/ and test/ with class folders), a .zip of one, a .csv, .jsonl or "
    ".parquet with the columns path and label, a datasets.Dataset, a hub id like owner/name:train, or one of "
    + ", ".join(KNOWN)
)
_OBJECTS = (
    "give a path, a datasets.Dataset, a pandas.DataFrame, a torch Dataset of (image, label), two lists (images, "
    "labels), or a list of such pairs"
)

Kind = Literal[
    "folder", "saved", "zip", "table", "file", "known", "hub", "nothing", "datasets", "frame", "torch", "list"
]


def kind_of(source: Any) -> Kind:
    """What a text or a path names; or what an object of Python is that holds images."""
    if not isinstance(source, (str, os.PathLike)):
        return _kind_of_object(source)
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        return "saved" if is_saved(path) else "folder"
    if path.exists():
        return "zip" if suffix == ".zip" else "table" if suffix in TABLE_SUFFIXES else "file"
    if str(source) in KNOWN:
        return "known"
    files = IMAGE_SUFFIXES | TABLE_SUFFIXES | {".zip"}
    if isinstance(source, str) and is_dataset_id(source) and suffix not in files and not path.parent.is_dir():
        return "hub"
    return "nothing"


def _kind_of_object(thing: Any) -> Kind:
    module = type(thing).__module__.partition(".")[0]
    if module == "datasets":
        return "datasets"
    if module == "pandas" and hasattr(thing, "columns"):
        return "frame"
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(thing, torch_data.Dataset) and hasattr(thing, "__len__"):
        return "torch"
    if isinstance(thing, (list, tuple)) and len(thing):
        return "list"
    raise DataError(f"{type(thing).__name__} is not a dataset; {_OBJECTS}.")


def check_place(source: Any) -> None:
    """Raises if nothing is where the images should be, before anything is read."""
    if isinstance(source, (str, os.PathLike)) and kind_of(source) in {"nothing", "file"}:
        path = Path(source).expanduser()
        if path.exists():
            raise DataError(f"{path} is not a dataset: {_SOURCES}.")
        raise DataError(f"{str(source)!r}: there is no such file or folder{_list_beside(path)}; {_SOURCES}.")


def load_data(source: Any, **options: Unpack[DataSettings]) -> Splits:
    """The splits of a folder, zip, CSV, JSON lines or Parquet file, hub id or known name; or of a `datasets` object,
    a `pandas.DataFrame`, a torch Dataset of (image, label), two lists (images, labels), or a list of such pairs.

    The keyword arguments are the fields of `DataOptions`: `split`, `kind`, `image_column`, `label_column`, `labels`,
    `class_folder`, `val_fraction`, `seed`, `config`, `allow_absolute`, `screen`, `cache`, `workers`, `quiet`.
    """
    return _load(source, DataOptions(**cast(dict[str, Any], options)))


def load_columns(source: Any, columns: str | Sequence[str], **options: Unpack[DataSettings]) -> dict[str, Splits]:
    """For each label column of a table the splits of its images; all columns hold out the same images.

    Tasks that are trained on these share every base pass (`fit_tasks`). Options as for `load_data`.
    """
    columns = several(columns)
    if not columns or len(set(columns)) < len(columns):
        raise DataError("name one or more label columns, each of them once.")
    common = DataOptions(**cast(dict[str, Any], options))
    found: dict[str, Splits] = {}
    first: Splits | None = None
    for column in columns:
        splits = _load(source, replace(common, label_column=column, val_fraction=0), first)
        splits = replace(splits, name=f"{splits.name}-{column}")
        first = first or splits
        found[column] = hold_out(splits, common.val_fraction, common.seed, like=first)
    return found


def load_any(source: Any, workers: int | None, cache: Path | bool = True, **reading: Any) -> tuple[ImageSet, int]:
    """The readable test images of a set, whatever its labels; all of them if it has no test split, or no labels. And
    how many cannot be read."""
    how: dict[str, Any] = {"workers": workers, "quiet": True, "cache": cache}
    most: dict[str, Any] = {"val_fraction": 0, "max_unreadable": 1.0, "measured_only": True}
    try:
        splits = source if isinstance(source, Splits) else load_data(source, **most, **how, **reading)
    except DataError:  # there are no labels, or they are not those of one task
        [images] = drop_unreadable([unlabelled(str(source), open_source([source], **reading))], **how)
        return images, len(images.skipped)
    return splits.to_measure()[1], len(splits.skipped)


def has_columns(source: Any, **options: Any) -> bool:
    """Whether labels come from the columns of a table, of which one may have the name of a task."""
    if isinstance(source, Splits):
        return False
    if not isinstance(source, (str, os.PathLike)):
        return True
    kind = kind_of(source)
    return kind != "zip" and (
        kind != "folder" or bool(find_metadata(Path(source).expanduser(), DataOptions(**options)))
    )


def _load(source: Any, options: DataOptions, checked: Splits | None = None) -> Splits:
    check_place(source)
    kind, name, chosen = kind_of(source), "dataset", options.split
    if kind in {"hub", "datasets"}:
        (tables, name), chosen = fetch(source, options.split, options.config), None
        raw = read_tables(tables, options, name)
    elif kind == "known":
        raw, name = _read_known(KNOWN[str(source)], options), str(source)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        raw, name = _read_path(path, options), path.stem if path.is_file() else path.resolve().name
    else:
        raw = _read_object(source, kind, options)
    if options.kind not in {None, raw.kind}:
        raise DataError(
            f"{name}: class folders give one class per image; for several labels or numbers, write a CSV file."
        )
    if chosen is not None:
        split = split_name(chosen)
        if split not in raw.splits:
            raise DataError(f"{name}: no split {chosen!r}; it has {', '.join(sorted(raw.splits))}.")
        raw = replace(raw, splits={split: raw.splits[split]})
    return build_splits(raw, name, options, checked)


def _read_path(path: Path, options: DataOptions) -> RawDataset:
    kind = kind_of(path)
    if kind == "saved":
        return read_tables(fetch(path)[0], options, str(path), path)
    if kind == "folder":
        if (path / INATURALIST).is_file():
            return read_manifest(path / INATURALIST, options)
        metadata = find_metadata(path, options)
        if metadata:
            return read_metadata(path, metadata, options)
    elif kind != "zip":
        return read_manifest(path, options)
    return read_tree(open_archive(path) if kind == "zip" else open_folder(path), options.class_folder)


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


def _read_object(source: Any, kind: Kind, options: DataOptions) -> RawDataset:
    table, objects = _columns_of(source, kind, options)
    if kind != "frame":  # paths that were named one by one are trusted, as in predictions
        options = replace(options, allow_absolute=True, image_column=None, label_column=None)
    where = "row" if kind == "frame" else "image"
    return read_columns(table, "dataset", Path(), lambda at: f"{where} {at}", options, objects)


def _columns_of(source: Any, kind: Kind, options: DataOptions) -> tuple[Mapping[str, Sequence[Any]], Source | None]:
    """The columns of an object, and a source of its images if these are not paths."""
    if kind == "frame":
        table: dict[str, Any] = {str(name): source[name].tolist() for name in source.columns}
        images: Any = table[find_image_column(table, options.image_column, "the table", PATH_COLUMNS)]
        labels: Any = None
    elif kind == "torch":
        images, labels = source, _labels_of(source)
    elif len(source) == 2 and all(_is_column(part) for part in source):
        images, labels = source
    elif all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in source):
        images, labels = zip(*source, strict=True)
    else:
        raise DataError(f"a list without labels: {_OBJECTS}.")
    if labels is not None:
        labels = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images, but {len(labels)} labels: give a label for each image.")
        kinds = {"multilabel": "labels", "regression": "value"}
        many = any(isinstance(label, (list, tuple, set)) for label in labels)
        column = kinds.get(options.kind or ("multilabel" if many else ""), "label")
        table = {"path": images, column: [list(one) if isinstance(one, set) else one for one in labels]}
    if kind != "torch" and all(isinstance(image, (str, os.PathLike)) for image in images):
        return {**table, **({} if labels is None else {"path": list(map(os.fspath, images))})}, None
    return table, Objects(images, kind == "torch")


def _is_column(part: Any) -> bool:
    """Whether it may be all images, or all labels, of a set."""
    return isinstance(part, (list, tuple)) or (hasattr(part, "tolist") and not isinstance(part, PICTURE_TYPES[:-2]))


def _labels_of(dataset: Any) -> list[Any]:
    """The label of each item of a torch Dataset: its `targets`, as those of torchvision have them, else by reading all;
    the names of `classes` if it has them."""
    labels = getattr(dataset, "targets", None)
    if labels is None or len(labels) != len(dataset):
        labels = [dataset[at][1] for at in range(len(dataset))]
    labels = [label.tolist() if hasattr(label, "tolist") else label for label in labels]
    classes = getattr(dataset, "classes", None)
    named = all(type(label) is int and 0 <= label < len(classes or ()) for label in labels)
    return [classes[label] for label in labels] if classes is not None and named else labels


def _list_beside(path: Path) -> str:
    """What there is instead of a file or folder that is not there."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        return ""
    return f" ({path.parent}/ has {first_few(names)})" if names and path.parent != Path() else ""


# ------------------------------------------------------------------------------------------------- images alone


def open_source(
    places: Sequence[Any], *, image_column: str | None = None, allow_absolute: bool = False, streaming: bool = False
) -> Source:
    """The images of files, folders and globs, zips, tables, and `datasets` objects, saved folders or hub ids; of lists
    of them in memory; of the paths in the lines of a file, `@list.txt`, or of the standard input, `-`.

    A table (.csv, .tsv, .jsonl, .parquet) has a column of paths; a Parquet file may contain the images instead. With
    `streaming`, a dataset of the hub is read from front to back and not stored.
    """
    found = [source for place in _expand(places) for source in _open(place, image_column, allow_absolute, streaming)]
    sources: list[Source] = []
    for is_file, some in groupby(found, key=lambda one: isinstance(one, str)):
        if is_file:  # neighbours, which may name an image twice
            sources.append(Files(tuple(map(str, some))))
        else:
            sources += [one for one in some if isinstance(one, Source)]
    if not sources:
        raise DataError("no images were named: give files, folders, zips, tables or hub ids.")
    if len(sources) > 1 and any(map(is_endless, sources)):
        raise DataError("the length of a stream is unknown: name one split only (owner/name:train), and nothing else.")
    return sources[0] if len(sources) == 1 else Chain(tuple(sources))


def _expand(places: Sequence[Any]) -> Iterator[Any]:
    """The places, with globs replaced by their zips and tables if they match any."""
    for place in places:
        matches = sorted(glob.glob(place, recursive=True)) if isinstance(place, str) and glob.has_magic(place) else []
        kinds = {Path(match).suffix.lower() for match in matches}
        yield from matches if kinds & (TABLE_SUFFIXES | {".zip"}) else [place]


def _open(place: Any, image_column: str | None, allow_absolute: bool, streaming: bool) -> Iterator[Source | str]:
    """The sources of a place; the place itself if it is a file, folder or glob of images."""
    kind = kind_of(place)
    if kind in {"datasets", "saved", "hub"}:
        source = Path(place).expanduser() if kind == "saved" else place
        yield from _open_datasets(source, image_column, allow_absolute, streaming)
    elif kind in {"frame", "torch", "list"}:
        yield Objects(place, kind == "torch")
    elif kind == "zip":
        yield open_archive(Path(place).expanduser())
    elif kind == "table":
        yield _open_table(Path(place).expanduser(), image_column, allow_absolute)
    else:
        yield Files((str(place),), tuple(read_lines(str(place)))) if is_list(str(place)) else str(place)


def _open_table(path: Path, image_column: str | None, allow_absolute: bool) -> Source:
    places = Places(os.path.dirname(path), anywhere=allow_absolute)
    if path.suffix.lower() != ".parquet":
        names = dict.fromkeys(column_names(path))
        return Paths(str(path), find_image_column(names, image_column, str(path), PATH_COLUMNS), places)
    with open_parquet(path) as file:
        kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
        column = image_column or next((name for name, kind in kinds.items() if holds_bytes(kind)), None)
        column = find_image_column(kinds, column, str(path), PATH_COLUMNS)
        if not holds_bytes(kinds[column]):
            return Paths(str(path), column, places)
        groups = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
        return ParquetImages(str(path), column, places, tuple(accumulate(groups)))


def _open_datasets(source: Any, image_column: str | None, allow_absolute: bool, streaming: bool) -> Iterator[Source]:
    """The splits of a `datasets` object, a folder that it saved, or a hub id, one after the other."""
    iterable = type(source).__name__ in {"IterableDataset", "IterableDatasetDict"}
    tables, name = fetch(source, streaming=streaming or iterable)
    is_folder = isinstance(source, Path)
    places = Places(str(source) if is_folder else os.getcwd(), not is_folder, allow_absolute)
    for split, table in tables.items():
        if table.features is None:
            table = table._resolve_features()
        column = find_image_column(table.features, image_column, name)
        sizes = getattr(table.info, "splits", None) or {}
        length = sizes[split].num_examples if split in sizes else None
        yield open_images(table, column, f"{name}:{split}" if len(tables) > 1 else name, places, length)
