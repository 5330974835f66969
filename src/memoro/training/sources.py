"""The images of `memoro.train`: a set for each task, and how its settings are compared on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from memoro.data import ImageSet, Splits, load_columns, load_data
from memoro.data.screening import near_groups
from memoro.data.splits import fold_numbers, hold_out
from memoro.errors import TrainingError
from memoro.regimes import Regime
from memoro.tasks.spec import check_name
from memoro.training.recipe import Recipe, TrainOptions
from memoro.training.sweep import Grid

SMALL = 500
"""Below this number of training images, a validation split is too small to choose by: folds are used."""
ALL_LEARNED = 2000
"""Below this number, a regime with a read-out is calibrated by folds as well, and so learns from all images."""
FOLDS = 4

Sets = dict[str, Splits]


def name_sources(data: Any, task: str | None, columns: list[str] | None) -> dict[str | None, Any]:
    """The data of each task by its name; None where the data will name it."""
    if columns and (type(data) is dict or (task is not None and len(columns) > 1)):
        raise TrainingError(
            "`label_column` trains a task per column of one table: give one table, and `task` only for a single column."
        )
    if type(data) is dict and task is not None:
        raise TrainingError("to train several tasks, give NAME=DATA for each, and no `task`.")
    names = (task,) if task is not None or not columns else columns
    sources: dict[str | None, Any] = data if type(data) is dict else dict.fromkeys(names, data)
    for name in sources:
        if name is not None:
            check_name(name)
            if name.endswith(".safetensors"):
                raise TrainingError(
                    f"`task={name}`: a task's name is not a file. To start from that task, use "
                    f"`start_from={name}`; to build on it, `extends={name}`; to write to that file, `out={name}`."
                )
    return sources


def load_sources(
    sources: dict[str | None, Any],
    columns: list[str] | None,
    recipe: Recipe,
    options: TrainOptions,
    **reading: Any,
) -> Sets:
    """The sets by task name. Validation splits are cut later, as folds may be used instead. `reading` are options of
    `load_data`."""
    known: dict[str, Any] = {"workers": options.workers, "quiet": options.quiet, "phases": options.phases}
    cache = options.wanted_cache
    known |= {"seed": recipe.data_seed, "cache": False if cache is None else cache.folder, **reading}
    if columns:
        found = load_columns(next(iter(sources.values())), columns, val_fraction=0, **known)
        return {str(name): splits for name, splits in zip(sources, found.values(), strict=True)}
    sets: Sets = {}
    for name, source in sources.items():
        splits = source if isinstance(source, Splits) else load_data(source, val_fraction=0, **known)
        sets[check_name(name or splits.name.replace("/", "-").replace("\\", "-"))] = splits
    return sets


def choose_folds(
    sets: Sequence[Splits],
    regime: Regime,
    grid: Grid,
    folds: int | None,
    recipe: Recipe,
) -> list[int]:
    """The number of folds on which the settings of each set are compared, or its task is calibrated; 0: a validation
    split, which a read-out alone does not need either."""
    joint = 0 < regime.readout < 1
    if grid.choices == 1 and not joint:
        return [0] * len(sets)
    found = []
    for splits in sets:
        if splits.train is None or splits.val is not None:
            found.append(0)
        else:
            most = ALL_LEARNED if joint else SMALL
            found.append(_default_folds(splits.train, recipe, most) if folds is None else folds)
    return found if all(found) or _shared_table(sets) is None else [0] * len(sets)


def _default_folds(train: ImageSet, recipe: Recipe, most: int) -> int:
    """4 for fewer than `most` images, if they are enough for folds, else 0.

    A class with fewer images than folds is held out in some of them only; with a single image, in none.
    """
    if not 2 * FOLDS <= len(train) < most:
        return 0
    number = fold_numbers(train, FOLDS, recipe.data_seed)
    return FOLDS if all((number == fold).any() for fold in range(FOLDS)) else 0


def _shared_table(sets: Sequence[Splits]) -> Splits | None:
    """The first set where all are columns of one table: they are split alike, and so share every base pass."""
    first, *others = sets
    images = [one.train.source for one in sets if one.train is not None]
    alike = others and len(images) == len(sets) and all(source == images[0] for source in images)
    return first if alike else None


def cut_validation(splits: Splits, regime: Regime, folds: int, sets: Sets, recipe: Recipe) -> Splits:
    """The splits with a validation split, or with a note on folds. A read-out alone needs neither."""
    if splits.train is None or regime.readout == 1:
        return splits
    if folds:
        what = "the task is calibrated" if regime.readout else "runs are compared"
        text = f"{len(splits.train)} training images: {what} by {folds}-fold cross-validation."
        return replace(splits, notes=(*splits.notes, text, *near_groups(splits.train).notes))
    return hold_out(splits, recipe.val_fraction, recipe.data_seed, like=_shared_table(list(sets.values())))
