"""Sets that come through `datasets`: its objects, what it saved to disk, and ids of the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memoro.errors import DataError

# owner/name, with a split behind a colon: owner/name:train, owner/name:train[:10%]
_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?::(?P<split>[\w\[\]:%+. -]+))?", re.ASCII)


def is_hub_id(source: str) -> bool:
    """Whether it could be a set of the hub; a relative path may look the same."""
    return _ID.fullmatch(source) is not None and not source.startswith((".", "-"))


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved this folder with `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def fetch(source: Any, *, split: str | None, config: str | None, streaming: bool = False) -> tuple[dict[str, Any], str]:
    """({split: table}, name) of a `datasets` object, a folder it saved, or a hub id."""
    import datasets

    if isinstance(source, Path):
        loaded, name = datasets.load_from_disk(str(source)), str(source)
    elif isinstance(source, str):
        loaded, name, split = _from_hub(source, split, config, streaming)
        if split is not None:
            return {split: loaded}, name
    else:
        loaded, name = source, "dataset"
    if not isinstance(loaded, dict):  # DatasetDict and IterableDatasetDict are dictionaries
        if not isinstance(loaded, (datasets.Dataset, datasets.IterableDataset)):
            raise DataError(f"{type(loaded).__name__} is no set of images; give a folder, a zip, a table or a Dataset.")
        loaded = {split or "train": loaded}
    elif split is not None:
        if split not in loaded:
            raise DataError(f"{name}: no split {split!r}; it has {', '.join(loaded)}.")
        loaded = {split: loaded[split]}
    for key, table in loaded.items():
        if isinstance(table, datasets.IterableDataset) != streaming:
            raise DataError(
                f"{name}: the split {key!r} is a{' stored' if streaming else 'n iterable'} dataset; load it with "
                f"{'load_data, or call to_iterable_dataset() on it' if streaming else 'load_stream'}."
            )
    return dict(loaded), name


def _from_hub(source: str, split: str | None, config: str | None, streaming: bool) -> tuple[Any, str, str | None]:
    import datasets

    match = _ID.fullmatch(source)
    if match is None:
        raise DataError(f"{source!r} is no id of the hub: those look like owner/name or owner/name:split.")
    repository, split = match["id"], split or match["split"]
    try:
        return datasets.load_dataset(repository, config, split=split, streaming=streaming), repository, split
    except Exception as error:  # the network, the hub and the files each fail in their own ways
        raise DataError(
            f"{source!r} is no file or folder here, and the hub did not deliver it: {str(error).splitlines()[0]}\n"
            f"Online, check the name at huggingface.co/datasets/{repository}. Offline, run `hf download --repo-type "
            f"dataset {repository} --local-dir FOLDER` where there is a network, and give that folder's "
            "images or Parquet file."
        ) from error
