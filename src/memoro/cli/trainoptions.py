"""The options of `train` and `sweep`, in the panels that their help shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

DATA, TASK, RECIPE = "Data", "Task", "Recipe"
AUGMENTATION, CHOOSING, CACHE = "Augmentation", "Choosing", "Cache"
OUTPUT, BASELINES = "Output", "Baselines"


def _option(panel: str, help: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **options)


def _check_folds(folds: int | None) -> int | None:
    if folds is not None and folds != 0 and folds < 2:
        raise typer.BadParameter(f"{folds} folds: choose 2 or more, or 0 for a validation split.")
    return folds


def _read_target(text: str) -> Path:
    """The path, made a folder where it ends like one: a Path does not keep that."""
    try:
        if text.endswith(("/", os.sep)):
            Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{text}: {error.strerror}") from None
    return Path(text)


Data = Annotated[
    list[str],
    typer.Argument(
        help="Folder of class folders, zip, CSV/Parquet, hub id or known set; NAME=DATA for each of several tasks.",
        show_default=False,
    ),
]
Columns = Annotated[
    list[str] | None,
    _option(DATA, "Column of a table; repeat for a task of each, in one pass.", "--label-column"),
]
ImageSize = Annotated[
    int | None,
    _option(DATA, "Pixels of an image's edge; resize and crop scale alike.", show_default="the backbone's"),
]
Workers = Annotated[int | None, _option(DATA, "Processes that decode images.", show_default="one a core")]
Streaming = Annotated[bool, _option(DATA, "Read a hub set as a stream, storing nothing; needs --steps.", "--streaming")]

TaskName = Annotated[str | None, _option(TASK, "Name of the task.", "--task", "-t", show_default="the set's name")]
RegimeName = Annotated[str, _option(TASK, "What is trained; see above.")]
Cells = Annotated[int, _option(TASK, "Memory cells in each layer.")]
CellCounts = Annotated[str, _option(TASK, "Numbers of memory cells to try, separated by commas.")]
FromLayer = Annotated[int, _option(TASK, "Layer at which the task forks off; later is cheaper.")]
FromLayers = Annotated[str, _option(TASK, "Layers to fork off at, to try, separated by commas.")]
Extends = Annotated[list[Path] | None, _option(TASK, "File of tasks to build on; repeat for more.")]

Rate = Annotated[float | None, _option(RECIPE, "Peak learning rate.", show_default="the best of three, in one pass")]
Rates = Annotated[
    str | None,
    _option(
        RECIPE,
        "Learning rates to try, separated by commas.",
        show_default="0.03,0.1,0.3; a hundredth of that with adamw",
    ),
]
Epochs = Annotated[int, _option(RECIPE, "Times that every image is seen.")]
Steps = Annotated[int | None, _option(RECIPE, "Optimiser steps, instead of epochs.")]
BatchSize = Annotated[int, _option(RECIPE, "Images to a batch.", min=1)]
Optimizer = Annotated[str, _option(RECIPE, "sgd or adamw.")]
Momentum = Annotated[float, _option(RECIPE, "Momentum of sgd.")]
WeightDecay = Annotated[float, _option(RECIPE, "Decay of the weights at each step.")]
Clip = Annotated[float, _option(RECIPE, "Largest norm of a tensor's gradient; 0 for no limit.")]
MemoryRate = Annotated[
    float | None,
    _option(RECIPE, "Share of the rate that memory learns at.", show_default="0.03 with sgd, 1 with adamw"),
]
Warmup = Annotated[int, _option(RECIPE, "Steps of linear warm-up before the cosine.")]
LabelSmoothing = Annotated[float, _option(RECIPE, "Share of the target that is spread over all classes.")]
Balance = Annotated[bool, _option(RECIPE, "Weight rare classes up.", "--balance")]
Accumulate = Annotated[int, _option(RECIPE, "Batches to an optimiser step.")]
Precision = Annotated[str, _option(RECIPE, "no (as the backbone is) or bf16 (mixed).")]
Seed = Annotated[int, _option(RECIPE, "Seed of the initial weights.")]
DataSeed = Annotated[int, _option(RECIPE, "Seed of image order, augmentation and validation split.")]

CropKind = Annotated[str, _option(AUGMENTATION, "inception (a random part), pad (shifted) or none.")]
CropScale = Annotated[float, _option(AUGMENTATION, "Smallest share of the image that an inception crop takes.")]
Flip = Annotated[float, _option(AUGMENTATION, "Probability of a mirror image.")]
Views = Annotated[
    int,
    _option(
        AUGMENTATION,
        "Views of an image, in turn: the plain one, then random ones. 0: a new one every epoch.",
        min=0,
    ),
]

ValFraction = Annotated[float, _option(CHOOSING, "Share of train held out where there is no validation split.")]
Folds = Annotated[
    int | None,
    _option(
        CHOOSING,
        "Folds to compare runs on, 2 or more; 0: a validation split.",
        show_default="4 for small sets",
        callback=_check_folds,
    ),
]
Patience = Annotated[int, _option(CHOOSING, "Epochs without a better score after which a run stops; 0: never.")]
Seeds = Annotated[int, _option(CHOOSING, "Initial weights to try of each combination.")]
Halving = Annotated[
    bool, _option(CHOOSING, "After every quarter of the epochs, stop the worse half of the runs.", "--halving")
]

UseCache = Annotated[
    bool | None,
    _option(
        CACHE,
        "Keep base passes on disk and read them back.",
        "--cache/--no-cache",
        show_default="where they fit, on a CPU",
    ),
]
CacheFolder = Annotated[Path | None, _option(CACHE, "Folder for them.", show_default="~/.cache/memoro/features")]
CacheBudget = Annotated[float, _option(CACHE, "Gigabytes that all kept passes may take.")]
CacheDtype = Annotated[str, _option(CACHE, "Kept as float16, bfloat16 or float32.")]

Out = Annotated[
    Path | None,
    _option(
        OUTPUT, "Task file, or folder/ for files.", "--out", "-o", show_default="TASK.safetensors", parser=_read_target
    ),
]
Folder = Annotated[Path | None, _option(OUTPUT, "Run folder: figures, pictures, checkpoint.", show_default="runs/TASK")]
Resume = Annotated[bool, _option(OUTPUT, "Go on from the run folder's checkpoint.", "--resume")]
TensorBoard = Annotated[bool, _option(OUTPUT, "Also write TensorBoard events.", "--tensorboard")]

Width = Annotated[int, _option(BASELINES, "Width of an adapter's bottleneck (regimes adapter, adapter+memory-full).")]
Rank = Annotated[int, _option(BASELINES, "Rank of LoRA's matrices (regime lora).")]
