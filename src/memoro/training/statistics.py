"""Pooled statistics of images, which read-outs and familiarity are made from: kept on disk, or computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar, format_bytes
from memoro.data import ImageSet, Loader
from memoro.engine.streams import pool_pass
from memoro.errors import CacheError
from memoro.evaluation.logits import collect_logits
from memoro.images import Preprocessing
from memoro.tasks.ridge import Read
from memoro.tasks.spec import ReadOut
from memoro.training.cached import CachedLoader, estimate, fill_caches
from memoro.training.distributed import Processes
from memoro.training.group import content_key
from memoro.training.recipe import TrainOptions

BATCH = 32


class StatisticsReader:
    """Reads the statistics of sets of images; what is asked for again is not computed again."""

    def __init__(self, backbone: Backbone, options: TrainOptions, processes: Processes) -> None:
        self._backbone, self._options, self._processes = backbone, options, processes
        self._known: dict[Any, Read] = {}

    def read(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        """A function from the numbers (b) of some images to their statistics (b, layers, statistics, dim), on the CPU:
        plain views, from the first layer that read-outs read."""
        key = content_key(images), preprocessing
        if key not in self._known:
            self._known[key] = self._kept(images, preprocessing) or self._computed(images, preprocessing)
        return self._known[key]

    def _kept(self, images: ImageSet, preprocessing: Preprocessing) -> Read | None:
        """Statistics on disk; None where none are to be kept, or they do not fit."""
        cache = self._options.wanted_cache
        if cache is None:
            return None
        loader = Loader(images, preprocessing, batch_size=BATCH, workers=self._options.workers)
        kept = CachedLoader(loader, self._backbone, cache, self._backbone.depth)
        problem = None
        if self._processes.local_rank == 0:
            count, size = estimate([kept])
            try:
                with bar(f"statistics ({format_bytes(size)})", count, quiet=self._options.quiet or not count) as tick:
                    fill_caches([kept], cache, tick)
            except CacheError as error:
                problem = str(error)
        problems = [problem for problem in self._processes.all_gather(problem) if problem is not None]
        if problems and cache.required:
            raise CacheError(problems[0])
        if problems:
            return None
        if self._processes.local_rank:
            kept.store.refresh()
        return lambda index: kept.statistics(index.tolist())

    def _computed(self, images: ImageSet, preprocessing: Preprocessing) -> Read:
        """Statistics in memory."""
        anatomy, processes = self._backbone.anatomy, self._processes
        first = ReadOut.of(anatomy).from_layer
        common: dict[str, Any] = {"workers": self._options.workers, "rank": processes.rank, "world": processes.world}
        loader = Loader(images, preprocessing, batch_size=max(BATCH, processes.world), **common)

        def pool(pixels: Tensor) -> list[Tensor]:
            pooled = pool_pass(anatomy, pixels, first)
            half = pooled.half()
            return [half if bool(torch.isfinite(half).all()) else pooled]

        with bar("statistics", len(images), quiet=self._options.quiet) as tick:
            (found,), _ = collect_logits(
                pool, self._backbone, loader, tick=tick, all_gather=processes.all_gather, keep_dtype=True
            )
        return lambda index: found[index]
