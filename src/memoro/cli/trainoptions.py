"""The options of `train` and `sweep`, declared once, in the panels that their help shows.

Defaults are those of `RECIPES`, `TrainOptions` and `memoro.train`, which are not imported to keep `--help` fast; a test
compares them. Where recipes differ, the default is None: the recipe's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def _option(kind: Any, default: Any, panel: str, help: str, *names: str, **more: Any) -> tuple[Any, Any]:
    """An annotation as Typer reads it, and the default."""
    return Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel, **more)], default


def _check_folds(folds: int | None) -> int | None:
    if folds is not None and folds != 0 and folds < 2:
        raise typer.BadParameter(f"{folds} folds: choose 2 or more, or 0 for a validation split.")
    return folds


_DATA, _TASK, _RECIPE, _AUGMENTATION = "Data", "Task", "Recipe", "Augmentation"
_CHOOSING, _CACHE, _OUTPUT = "Model selection", "Cache", "Output"

TRAIN: dict[str, tuple[Any, Any]] = {
    "task": _option(str | None, None, _TASK, "Name of the task.", "--task", "-t", show_default="the dataset's name"),
    "regime": _option(
        str | None, None, _TASK, "What is trained; see above.",
        show_default="joint; memory with --recipe paper",
    ),
    "cells": _option(int | None, None, _TASK, "Memory cells in each layer.", show_default="0; 5 with memory"),
    "rank": _option(
        int | None, None, _TASK,
        "Rank of the low-rank weights (regimes joint and side).", show_default="4",
    ),
    "from_layer": _option(
        int | None, None, _TASK, "Layer at which the task forks from the backbone; later is cheaper.",
        show_default="two thirds of the depth; 0 with memory",
    ),
    "extends": _option(list[str] | None, None, _TASK, "Task file or hub id to build on; repeat for more."),
    "start_from": _option(
        str | None, None, _TASK,
        "Task file or hub id to start from; labels may be added or removed. A read-out is solved from DATA alone.",
    ),
    "kind": _option(
        Literal["class", "labels", "number"] | None, None, _DATA,
        "What a label is: one class, several labels (a|b) or a number.",
        show_default="inferred from the data",
    ),
    "label_column": _option(
        list[str] | None, None, _DATA, "Label column of a table; repeat to train a task for each in the same pass."
    ),
    "image_column": _option(
        str | None, None, _DATA, "Column of a table with the images.", show_default="path or image"
    ),
    "allow_absolute": _option(
        bool, False, _DATA, "Allow a table that you trust to name files outside its folder.", "--allow-absolute"
    ),
    "max_unreadable": _option(
        float, 0.05, _DATA, "Maximum fraction of unreadable images, which are skipped.", min=0, max=1
    ),
    "image_size": _option(
        int | None, None, _DATA, "Input size in pixels; resize and crop are scaled together.",
        show_default="the backbone's", min=1,
    ),
    "others": _option(
        str | None, None, _DATA,
        "50 or more photographs of anything else, to learn what is unfamiliar from: folder or .zip.",
        show_default="those known for the backbone",
    ),
    "workers": _option(int | None, None, _DATA, "Processes that decode images.", show_default="one per core"),
    "out": _option(
        str | None, None, _OUTPUT, "Task file to write, or a folder (tasks/) for several.", "--out", "-o",
        show_default="TASK.safetensors",
    ),
    "folder": _option(
        Path | None, None, _OUTPUT, "Run folder: metrics, checkpoint, report.", show_default="runs/TASK"
    ),
    "resume": _option(bool, False, _OUTPUT, "Continue from the checkpoint in the run folder.", "--resume"),
    "tensorboard": _option(bool, False, _OUTPUT, "Also write TensorBoard events.", "--tensorboard"),
    "recipe": _option(
        Literal["default", "paper"] | None, None, _RECIPE,
        "default (AdamW, plain images) or paper (SGD, random views; regime memory unless another is given).",
        show_default="paper with regimes head and memory",
    ),
    "lr": _option(
        float | None, None, _RECIPE, "Peak learning rate.",
        show_default="0.001 with joint and side; others try three",
    ),
    "epochs": _option(int, 15, _RECIPE, "Passes over the training images."),
    "steps": _option(int | None, None, _RECIPE, "Optimiser steps, instead of epochs."),
    "batch_size": _option(int, 32, _RECIPE, "Images per batch.", min=1),
    "optimizer": _option(
        Literal["sgd", "adamw"] | None, None, _RECIPE, "Optimiser to train with.", show_default="the recipe's"
    ),
    "momentum": _option(float, 0.9, _RECIPE, "Momentum of sgd."),
    "weight_decay": _option(
        float | None, None, _RECIPE, "Weight decay.", show_default="0.01; 0 with recipe paper"
    ),
    "clip": _option(float, 1.0, _RECIPE, "Maximum gradient norm of each tensor; 0: no clipping."),
    "memory_rate": _option(
        float | None, None, _RECIPE, "Learning rate of memory cells, as a fraction of --lr.",
        show_default="0.03 with sgd, 1 with adamw",
    ),
    "warmup": _option(int, 5, _RECIPE, "Steps of linear warm-up before the cosine schedule."),
    "label_smoothing": _option(float, 0.0, _RECIPE, "Probability spread evenly over all classes."),
    "balance": _option(bool, False, _RECIPE, "Weight classes inversely to their frequency.", "--balance"),
    "accumulate": _option(int, 1, _RECIPE, "Batches per optimiser step (gradient accumulation)."),
    "precision": _option(
        Literal["no", "bf16"], "no", _RECIPE, "Mixed precision; no is the backbone's dtype."
    ),
    "dtype": _option(
        str | None, None, _RECIPE, "Dtype of the backbone, such as float32.", show_default="the checkpoint's"
    ),
    "seed": _option(int, 0, _RECIPE, "Seed of the initial weights."),
    "data_seed": _option(int, 0, _RECIPE, "Seed of image order, augmentation and validation split."),
    "crop": _option(
        Literal["inception", "pad", "none"] | None, None, _AUGMENTATION,
        "Random resized crops (inception), random shifts (pad) or none.",
        show_default="inception in random views; none for numbers",
    ),
    "crop_scale": _option(
        float, 0.08, _AUGMENTATION, "Smallest fraction of the image area in an inception crop."
    ),
    "flip": _option(
        float | None, None, _AUGMENTATION,
        "Probability of a horizontal flip. Use 0 if left and right matter or images show text.",
        show_default="0.5 in random views; 0 for numbers",
    ),
    "views": _option(
        int | None, None, _AUGMENTATION,
        "Views of each image, used in turn: the plain one, then random ones. 0: a new random view every epoch.", min=0,
        show_default="1; 4 with recipe paper",
    ),
    "ensemble": _option(
        int | None, None, _CHOOSING,
        "Average this many runs of the best setting, from different seeds; 1: keep the best run only.", min=1,
        show_default="1; with --start-from, as many as the task has",
    ),
    "val_fraction": _option(float, 0.15, _CHOOSING, "Fraction of train to hold out if there is no validation split."),
    "folds": _option(
        int | None, None, _CHOOSING, "Cross-validation folds, to compare runs and to calibrate; 0: a validation split.",
        show_default="4 for small datasets", callback=_check_folds,
    ),
    "patience": _option(int, 0, _CHOOSING, "Stop a run after this many epochs without a better score; 0: never."),
    "cache": _option(
        bool | None, None, _CACHE, "Cache the backbone's features and statistics of the images on disk.",
        "--cache/--no-cache",
        show_default="statistics always, features on a CPU if they fit",
    ),
    "cache_folder": _option(
        Path | None, None, _CACHE, "Folder of the cache.", show_default="~/.cache/memoro/features"
    ),
    "cache_budget": _option(
        float | None, None, _CACHE, "Maximum size of the cache in GB.",
        show_default="a tenth of the free disk, 20 at most",
    ),
    "cache_dtype": _option(
        Literal["float16", "bfloat16", "float32"], "float16", _CACHE,
        "Data type of cached features: float16, bfloat16 or float32.", metavar="DTYPE",
    ),
}  # fmt: skip

SWEEP = TRAIN | {
    "cells": _option(
        str | None, None, _TASK, "Numbers of memory cells to try, separated by commas.",
        show_default="0; 0,5 with memory",
    ),
    "rank": _option(
        str | None, None, _TASK,
        "Ranks of the task's low-rank weights to try, such as 4,8,16 (regimes joint and side).",
        show_default="4,16 with joint and side if nothing else is varied",
    ),
    "from_layer": _option(
        str | None, None, _TASK, "Layers to fork at, separated by commas.",
        show_default="two thirds of the depth; 0 with memory",
    ),
    "lr": _option(
        str | None, None, _RECIPE, "Learning rates to try, separated by commas.",
        show_default="0.001 with joint and side; others try three",
    ),
    "seeds": _option(int, 1, _CHOOSING, "Number of seeds to try for each combination."),
}  # fmt: skip


def add_options(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds options to a command that takes them as `**settings`: Typer reads them from its signature."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
