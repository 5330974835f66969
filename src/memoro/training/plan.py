"""Planning: from data and options to a plan for each task, the list of runs that are compared. Nothing is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memoro.backbones import Backbone
from memoro.data import DataOptions, ImageSet, Splits, load_columns, load_data
from memoro.data.open import check_place
from memoro.data.screening import near_groups
from memoro.data.splits import SINGLE_IMAGES, Index, fold_numbers, hold_out
from memoro.errors import TrainingError
from memoro.evaluation.metrics import COLUMNS
from memoro.heads import HEADS
from memoro.images import Preprocessing
from memoro.options import plain_int, several
from memoro.regimes import Regime, TaskPlan
from memoro.regimes.start import start_from
from memoro.tasks.spec import check_name
from memoro.tasks.task import Task, check_sizes
from memoro.training.recipe import SKIPPED, Recipe, TrainOptions
from memoro.training.run import Run

SMALL = 500
"""Below this number of training images, a validation split is too small to choose by: folds are used."""
ALL_LEARNED = 2000
"""Below this number, a regime with a read-out is calibrated by folds as well, and so learns from all images."""
FOLDS = 4
MOST_BYTES = 80
"""The most bytes in the name of a run folder that joins those of several tasks."""

Sets = dict[str, Splits]
Sizes = dict[str, tuple[int | None, ...]]
"""The values of `cells`, `from_layer` and `rank`; None is the regime's own."""


class Setting(NamedTuple):
    """One combination of what varies. `seed` is that of the initial weights; order and views of the images are the same
    for all."""

    cells: int | None
    from_layer: int | None
    rank: int | None
    lr: float
    seed: int


def combine(
    rates: Sequence[float],
    *,
    cells: Sequence[int | None] = (None,),
    from_layer: Sequence[int | None] = (None,),
    rank: Sequence[int | None] = (None,),
    seeds: Sequence[int] = (0,),
) -> tuple[Setting, ...]:
    """All combinations of these values."""
    if not all(map(len, (cells, from_layer, rank, rates, seeds))):
        raise TrainingError("training needs at least one value each for cells, from_layer, rank, lr and seeds.")
    return tuple(dict.fromkeys(starmap(Setting, product(cells, from_layer, rank, rates, seeds))))


@dataclass(frozen=True)
class Plan:
    """One task to train with every setting, and its images."""

    name: str
    regime: Regime
    splits: Splits
    preprocessing: Preprocessing
    recipe: Recipe
    settings: Sequence[Setting]
    folds: int = 0
    """Score every setting by cross-validation on this many stratified folds of train; a last run learns from all images
    and becomes the task. 0: score on the validation split."""
    extends: Sequence[Task] = ()
    start: Task | None = None
    """A task whose weights every run starts from."""

    @property
    def score_name(self) -> str:
        """What the settings are compared by."""
        return f"{f'{self.folds}-fold' if self.folds else 'validation'} {COLUMNS[HEADS[self.splits.kind].main_metric]}"

    @property
    def parts(self) -> list[Index | None]:
        """What is held out in each run of a setting: the training images of each fold, then none."""
        if self.folds:
            assert self.splits.train is not None
            number = fold_numbers(self.splits.train, self.folds, self.recipe.data_seed)
            held_out = [np.flatnonzero(number == fold) for fold in range(self.folds) if (number == fold).any()]
            if not held_out:
                raise TrainingError(f"{self.splits.name}: folds need at least two images of a class: set folds to 0.")
            return [*held_out, None]
        if self.splits.val is None and len(self.settings) > 1:
            why = "set `val_fraction` above 0"
            if SINGLE_IMAGES in self.splits.notes:
                why = "every class has a single image: give one `lr`, one seed and one of each size, or add images"
            raise TrainingError(f"{self.splits.name} has no validation images to choose by: {why}.")
        return [None]

    def start_runs(self, backbone: Backbone) -> dict[Setting, list[Run]]:
        """The runs of each setting, with their untrained tasks."""
        parts, runs = self.parts, dict[Setting, list[Run]]()
        start = None if self.start is None else self.start.content_hash()
        for setting in self.settings:
            sizes = {name: size for name, size in setting._asdict().items() if name not in {"lr", "seed"}}
            wanted = TaskPlan(
                self.name, self.splits.labels, self.splits.kind, extends=self.extends, seed=setting.seed, **sizes
            )
            tasks = [self._make(backbone, wanted) for _ in parts]
            made = setting._replace(**{name: getattr(tasks[0], name) for name in sizes})
            recipe = replace(self.recipe, lr=setting.lr, seed=setting.seed)
            # None may stand for a size that is given as well: the first one counts.
            runs.setdefault(
                made,
                [
                    Run(task, recipe, self.regime, self.splits, self.preprocessing, part, start)
                    for task, part in zip(tasks, parts, strict=True)
                ],
            )
        return runs

    def _make(self, backbone: Backbone, wanted: TaskPlan) -> Any:
        task = self.regime.build(backbone, wanted)
        if self.start is not None:
            task = start_from(self.start, task, wanted.seed - self.recipe.seed)
        task.update_spec(training={**task.spec.training, "seed": wanted.seed})
        return task


def choose_rates(lr: Any, regime: Regime, recipe: Recipe) -> tuple[float, ...]:
    """The learning rates that were asked for; without any, those of the regime."""
    if lr is None:
        rates = regime.rates[recipe.optimizer]
        return rates[len(rates) // 2 :][:1] if regime.readout == 1 else rates
    try:
        rates = tuple(map(float, several(lr)))
    except (TypeError, ValueError):
        raise TrainingError(f"lr {lr!r}: choose one or more numbers, such as 0.001.") from None
    for rate in rates:
        replace(recipe, lr=rate)  # raises if it is none
    return rates


def check_seeds(seeds: int) -> int:
    """The number of seeds to compare; raises if it is none."""
    count = plain_int(seeds)
    if not isinstance(count, int) or count < 1:
        raise TrainingError(f"seeds {seeds!r}: choose a whole number, 1 or more.")
    return count


def choose_sizes(wanted: Mapping[str, Any], regime: Regime, start: Task | None, backbone: Backbone) -> Sizes:
    """The sizes of the task to start from, or those that were asked for without those that the regime does not have.
    Raises if others were asked for."""
    free = (None,)
    asked = {name: tuple(map(plain_int, several(values))) for name, values in wanted.items()}
    if start is not None:
        start.spec.check_backbone(backbone)
        own: Sizes = {"cells": (start.cells,), "from_layer": (start.from_layer,), "rank": (start.rank,)}
        if any(asked[name] not in {free, own[name]} for name in own):
            raise TrainingError(
                f"{start.name!r} keeps its cells, rank and layers: leave out `cells`, `rank` and `from_layer`."
            )
        return own
    if regime.name in {"head", "readout"}:
        if any(asked["cells"]) or asked["from_layer"] not in {free, (backbone.depth,)}:
            raise TrainingError(f"regime {regime.name!r} has no layers of its own: leave out `cells` and `from_layer`.")
        return {**asked, "cells": free, "from_layer": free}
    if not regime.composes:
        for name in ("cells", "rank"):
            if asked[name] != free and name not in regime.sizes(backbone.depth):
                raise TrainingError(f"regime {regime.name!r} has no {name}: leave out `{name}`.")
    for values in product(*asked.values()) if regime.composes else ():
        given = {name: size for name, size in zip(asked, values, strict=True) if size is not None}
        check_sizes(backbone, regime.name, **{**regime.sizes(backbone.depth), **given})
    return asked


def name_sources(
    data: Any, task: str | None, columns: Sequence[str] | None, start: Task | None
) -> dict[str | None, Any]:
    """The data of each task by its name; None if the data will name it."""
    if columns and (type(data) is dict or (task is not None and len(columns) > 1)):
        raise TrainingError(
            "`label_column` trains a task per column of one table: give one table, and `task` only for a single column."
        )
    if type(data) is dict and task is not None:
        raise TrainingError("to train several tasks, give NAME=DATA for each, and no `task`.")
    names = (task,) if task is not None or not columns else columns
    sources: dict[str | None, Any] = data if type(data) is dict else dict.fromkeys(names, data)
    for name, source in sources.items():
        if name is not None:
            check_name(name)
            if name.endswith(".safetensors"):
                raise TrainingError(
                    f"`task={name}`: a task's name is not a file. To start from that task, use "
                    f"`start_from={name}`; to build on it, `extends={name}`; to write to that file, `out={name}`."
                )
        check_place(source)
    if start is not None and len(sources) > 1:
        raise TrainingError("`start_from` continues one task: give one set of images, and one `label_column` at most.")
    return sources


def load_sources(sources: Mapping[str | None, Any], columns: Sequence[str] | None, reading: DataOptions) -> Sets:
    """The sets by task name. Validation splits are cut later, as folds may be used instead."""
    if columns:
        found = load_columns(next(iter(sources.values())), columns, **vars(reading))
        return {str(name): splits for name, splits in zip(sources, found.values(), strict=True)}
    sets: Sets = {}
    for name, source in sources.items():
        splits = source if isinstance(source, Splits) else load_data(source, **vars(reading))
        sets[check_name(name or splits.name.replace("/", "-").replace("\\", "-"))] = splits
    return sets


def cut_sets(
    sets: Sets, regime: Regime, several_runs: bool, folds: int | None, recipe: Recipe
) -> list[tuple[str, Splits, int]]:
    """Each set with a validation split, or with the number of folds on which its settings are compared or its task is
    calibrated instead. A read-out alone needs neither."""
    joint, counts = 0 < regime.readout < 1, dict.fromkeys(sets, 0)
    if not regime.composes:  # each run has its own passes: no folds unless asked for
        folds = folds or 0
    for name, splits in sets.items() if several_runs or joint else ():
        if splits.train is not None and splits.val is None:
            most = ALL_LEARNED if joint else SMALL
            counts[name] = _default_folds(splits.train, recipe, most) if folds is None else folds
    # Columns of one table are split alike, and so share every base pass.
    first, *others = sets.values()
    images = [splits.train.source for splits in sets.values() if splits.train is not None]
    alike = bool(others) and len(images) == len(sets) and all(source == images[0] for source in images)
    if alike and not all(counts.values()):
        counts = dict.fromkeys(sets, 0)
    cut = []
    for (name, splits), count in zip(sets.items(), counts.values(), strict=True):
        if splits.train is not None and count:
            what = "the task is measured" if regime.readout else "runs are compared"
            text = f"{len(splits.train)} training images: {what} by {count}-fold cross-validation."
            splits = replace(splits, notes=(*splits.notes, text, *near_groups(splits.train).notes))
        elif splits.train is not None and regime.readout < 1:
            splits = hold_out(splits, recipe.val_fraction, recipe.data_seed, like=first if alike else None)
        cut.append((name, splits, count))
    return cut


def _default_folds(train: ImageSet, recipe: Recipe, most: int) -> int:
    """4 for fewer than `most` images, if they are enough for folds, else 0.

    A class with fewer images than folds is held out in some of them only; with a single image, in none.
    """
    if not 2 * FOLDS <= len(train) < most:
        return 0
    number = fold_numbers(train, FOLDS, recipe.data_seed)
    return FOLDS if all((number == fold).any() for fold in range(FOLDS)) else 0


def preprocessing_of(
    backbone: Backbone, options: TrainOptions, splits: Splits, own: Preprocessing | None = None
) -> Preprocessing:
    """The backbone's preprocessing at the wanted size; without one, the task's `own` if it was trained before.

    Images of more than 8 bits have the scale that the task was trained with before, else that of its data set.
    """
    steps = own or backbone.preprocessing
    if options.image_size is not None:
        steps = backbone.preprocessing.at(options.image_size)
    levels = splits.train.levels if splits.train is not None else None
    white = None if own is None else own.white
    if white is None:
        white = None if levels is None else levels.white
    elif levels is not None and levels.high > white:
        options.note(
            f"warning: the task was trained with {white:,.6g} as white, and {splits.name} has values up to "
            f"{levels.high:,.6g}: brighter pixels become white. Train a new task if that matters."
        )
    return replace(steps, white=white)


def keep_known_rate(plan: Plan, options: TrainOptions) -> Plan:
    """The plan with a single learning rate if there are no images to choose one with."""
    if plan.folds or plan.splits.val is not None or len(plan.settings) == 1:
        return plan
    rates = list(dict.fromkeys(setting.lr for setting in plan.settings))
    middle = rates[len(rates) // 2]
    options.note(f"{plan.name}: no validation images to choose a learning rate with: using {middle:g}.")
    return replace(plan, settings=[setting for setting in plan.settings if setting.lr == middle])


def find_notes(plans: Sequence[Plan], options: TrainOptions) -> list[str]:
    """Options without effect, and properties of the data."""
    notes, folds, settings, regime = list[str](), options.folds, len(plans[0].settings), plans[0].regime
    start = plans[0].start
    if start is not None and start.members > 1:
        seeds = len({setting.seed for setting in plans[0].settings})
        which = "each seed starts from another one" if seeds > 1 else "the first one is trained further"
        notes.append(f"{start.name!r} is an ensemble of {start.members} members: {which}.")
    if folds and not any(plan.folds for plan in plans):
        why = "there is only one setting" if settings == 1 else "there is a validation split"
        notes.append(f"`folds={folds}` is not used, because {why}.")
    if plans[0].recipe.patience and any(plan.folds for plan in plans):
        notes.append("`patience` is not used: the runs of a cross-validation are compared at the end.")
    notes += dict.fromkeys(text for plan in plans for text in plan.splits.notes)
    if options.folder is not None and any(plan.splits.skipped for plan in plans):
        notes.append(f"all images that were left out are listed in {options.folder / SKIPPED}.")
    if options.resume and options.checkpoint is not None and not options.checkpoint.is_file():
        notes.append(f"there is no checkpoint in {options.folder}: starting from the beginning.")
    if settings > 1 and not regime.composes:
        notes.append(f"regime {regime.name!r} has a pass of its own, so its {settings} runs need separate passes.")
    return notes


def name_folder(options: TrainOptions, names: Sequence[str]) -> TrainOptions:
    """With `{task}` in the run folder replaced: by `a+b` for the tasks a and b; for many, which no file name could
    hold, by the first one and a hash of all."""
    if options.folder is None:
        return options
    whole = "+".join(names)
    if len(names) > 1 and len(whole.encode()) > MOST_BYTES:
        first = names[0].encode()[: MOST_BYTES // 2].decode(errors="ignore")
        whole = f"{first}+{len(names) - 1}-more-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return replace(options, folder=Path(str(options.folder).replace("{task}", whole)))
