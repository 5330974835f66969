"""Features and statistics of images, read from disk instead of computing the base pass again."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import bar, format_bytes, quoted
from memoro.data import Batch, ImageSet, Loader
from memoro.engine import featurestore
from memoro.engine.featurestore import (
    Buffer,
    FeatureStore,
    RecordFormat,
    Resident,
    StoreDtype,
    Writer,
    default_folder,
    free_memory,
    total_bytes,
)
from memoro.engine.streams import BasePass, Features, layer_bias, pool_pass
from memoro.errors import CacheError, DataError
from memoro.evaluation.logits import CachedBatch, collect_logits
from memoro.images import Preprocessing, output_size
from memoro.options import option
from memoro.processes import ALONE, Processes
from memoro.tasks.ridge import Read
from memoro.tasks.spec import ReadOut

GIGABYTE = 10**9
FREE_SHARE, MOST = 0.1, 20
"""The default budget: this share of the free space, at most this many gigabytes."""

Part = tuple[int, int]
"""Which part of how many."""
Buffers = dict[tuple[RecordFormat, int], Buffer]
"""Memory to read batches into, by record format and batch size."""


@dataclass(frozen=True)
class Cache:
    """Where features are kept, how much space they may take, and in which precision."""

    folder: Path = option(
        factory=default_folder, help="Folder of the cache.", name="cache_folder", shown="~/.cache/memoro/features"
    )
    budget: float | None = option(
        None,
        "Maximum size of the cache in GB.",
        name="cache_budget",
        shown="a tenth of the free disk, 20 at most",
    )
    """Over all backbones and sets; what was used longest ago is evicted first. Kept features count as free space."""
    dtype: StoreDtype = option("float16", "Data type of cached features.", name="cache_dtype")
    required: bool = True
    """Whether features that do not fit are an error; else they are computed again in every epoch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # a string is accepted
        if self.dtype not in get_args(StoreDtype):
            raise CacheError(f"features cannot be cached as {self.dtype!r}: choose {', '.join(get_args(StoreDtype))}.")

    @property
    def limit(self) -> float:
        """The budget in bytes."""
        if self.budget is not None:
            return self.budget * GIGABYTE
        there = self.folder.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        free = shutil.disk_usage(there).free + featurestore.total_bytes(self.folder)
        return min(FREE_SHARE * free, MOST * GIGABYTE)


def find_cache(cache: Cache | bool | None) -> Cache | None:
    """The cache with its settings. None: one that is used if it can be; False: none."""
    if isinstance(cache, Cache):
        return cache
    return None if cache is False else Cache(required=bool(cache))


class CachedLoader:
    """The batches of a loader, in its order, with features instead of pixels. Call `fill` before the first epoch.

    Loaders that are never read at the same time may share their `buffers`.
    """

    def __init__(
        self, loader: Loader, backbone: Backbone, cache: Cache, from_layer: int, buffers: Buffers | None = None
    ) -> None:
        self.loader, self.images, self.batch_size = loader, loader.images, loader.batch_size
        self._backbone = backbone
        size = output_size(loader.preprocessing)
        sample = torch.zeros(1, 3, *size, device=backbone.device, dtype=backbone.dtype)
        with torch.no_grad():
            tokens, context = backbone.anatomy.embed(sample)
        self._biases = [layer_bias(context, layer) for layer in range(from_layer, backbone.depth)]
        about = {
            "backbone": backbone.fingerprint.digest,
            "family": backbone.family,
            "functions": backbone.functions,
            "computed": str(backbone.dtype),
            "preprocessing": loader.preprocessing.to_json(),
            "versions": _versions(backbone),
        }
        shape = (from_layer, backbone.depth, backbone.dim, backbone.heads, tokens.shape[1])
        reads = ReadOut.of(backbone.anatomy)
        format = RecordFormat(*shape, cache.dtype, reads.from_layer, reads.statistics)
        self.store = FeatureStore(cache.folder, format, about)
        self.buffers: Buffers = {} if buffers is None else buffers
        self._digests = [bytes.fromhex(self.images.key(sample)) for sample in range(len(self.images))]
        self.views = range(loader.views or 1)
        self.keys = [[self._key(sample, view) for sample in range(len(self.images))] for view in self.views]
        """The keys of every image's record, a list for each view."""
        self._resident: Resident | None = None
        self._placed = False
        """Whether it was decided where features are read from."""

    def __len__(self) -> int:
        return len(self.loader)

    def _key(self, sample: int, view: int) -> bytes:
        """What a record depends on besides backbone and preprocessing: the image's content and its view."""
        loader, digest = self.loader, self._digests[sample]
        if loader.augment is None or (loader.views is not None and view == 0):
            return digest
        random = json.dumps([asdict(loader.augment), loader.seed, view, sample])
        return hashlib.sha256(digest + random.encode()).digest()

    def missing(self) -> list[dict[bytes, int]]:
        """For each view, the keys without a record and a sample of each: copies of an image have one record."""
        return [{keys[at]: at for at in self.store.missing(keys)} for keys in self.keys]

    def fill(self, tick: Callable[[int], None] = lambda images: None, part: Part = (0, 1)) -> None:
        """Computes what is missing, or of several processes this one's part of it; calls `tick` with the number of
        images after every batch."""
        # Damaged records are found amid training: there gradients and mixed precision may be on.
        exact = torch.autocast(self._backbone.device.type, enabled=False)
        # By key: a process that starts later may find some of it done.
        absent = [[at for key, at in view.items() if key[0] % part[1] == part[0]] for view in self.missing()]
        writer = Writer(self.store, sum(map(len, absent)))
        with torch.no_grad(), exact:
            for view, mine in enumerate(absent):
                for batch in self.loader.pick(mine, view) if mine else ():
                    samples = batch.index.tolist()
                    self._check_unchanged(samples, batch)
                    pixels = batch.on(self._backbone.device, self._backbone.dtype)
                    features = keep_features(self._backbone, pixels, self.store.format)
                    writer.add([self.keys[view][sample] for sample in samples], features)
                    tick(len(samples))
        self.store.refresh()
        self.loader.close()

    def _check_unchanged(self, samples: Sequence[int], batch: Batch) -> None:
        """Raises if an image is no longer what its key says: the record would be kept under the wrong key."""
        for sample, digest in zip(samples, batch.digests.numpy(), strict=True):
            if digest.tobytes() != self._digests[sample]:
                raise DataError(f"{self.images.where(sample)} has changed since it was screened: load the data again.")

    def epoch(self, number: int, start: int = 0) -> Iterator[CachedBatch]:
        """The batches of one epoch, without the first `start`."""
        view = self.loader.view(number) if self.loader.views else 0
        for samples, total in self.loader.parts(number, start):
            keys = [self.keys[view][sample] for sample in samples.tolist()]
            index = torch.from_numpy(samples)
            yield CachedBatch(partial(self._read, keys), self.images.targets[index], index, total)

    def statistics(self, samples: Sequence[int]) -> Tensor:
        """The pooled statistics (n, layers, statistics, dim) of some images, plain views."""
        keys = [self.keys[0][sample] for sample in samples]
        self._mend(keys)
        return self.store.statistics(keys)

    def _mend(self, keys: Sequence[bytes]) -> None:
        while self.store.discard_damaged(keys):
            self.store.refresh()  # another process may have computed them again already
            self.fill()

    @property
    def resident_bytes(self) -> int:
        """What its features take in memory."""
        return self.store.buffer_bytes(len({key for view in self.keys for key in view}), self._backbone.dtype)

    def _read(self, keys: Sequence[bytes]) -> Features:
        device = self._backbone.device
        if not self._placed:
            self._placed = True
            if 0 < self.resident_bytes <= free_memory(device):
                every = [key for view in self.keys for key in view]
                self._mend(every)
                self._resident = Resident(self.store, every, device, self._backbone.dtype)
        if self._resident is not None:
            return self._resident.read(keys, self._biases)
        self._mend(keys)
        place = (self.store.format, self.batch_size)
        if place not in self.buffers:
            self.buffers[place] = self.store.buffer(self.batch_size, self._backbone.dtype)
        return self.store.read(keys, self._biases, self._backbone.device, self.buffers[place])


def _versions(backbone: Backbone) -> dict[str, str]:
    """The versions of Pillow and of the backbone's libraries: another one may compute other features."""
    names = {"PIL", *(type(part).__module__.partition(".")[0] for part in backbone.module.modules())}
    return {name: str(getattr(sys.modules[name], "__version__", None)) for name in sorted(names)}


def keep_features(backbone: Backbone, pixels: Tensor, format: RecordFormat) -> Features:
    """A base pass with what records of this format hold."""
    base, layers = BasePass(backbone.anatomy, pixels, format.pool_from), []
    for number, layer in enumerate(base):
        if number >= format.from_layer:
            layers.append(layer)
    return Features(format.from_layer, layers, base.token, base.pooled)


def make_room(loaders: Sequence[CachedLoader], cache: Cache) -> None:
    """Evicts what the budget has no space for; a CacheError if the loaders do not fit."""
    with featurestore.writing(cache.folder):
        budget = cache.limit
    records = {(loader.store.folder, key): loader for loader in loaders for keys in loader.keys for key in keys}
    whole = sum(loader.store.format.size for loader in records.values())
    if whole > budget:
        raise CacheError(_too_big(loaders, whole, f"the budget is {format_bytes(budget)}", "`Cache.budget`"))
    _, needed = estimate(loaders)
    used = {file for loader in loaders for keys in loader.keys for file in loader.store.mark_used(keys)}
    if featurestore.evict(cache.folder, needed, budget, keep=used) + needed > budget:
        # The files in use also hold what is not needed, such as other images or earlier layers: start again.
        featurestore.evict(cache.folder, whole, budget)
    for loader in loaders:
        loader.store.refresh()
    _, needed = estimate(loaders)
    with featurestore.writing(cache.folder):
        cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(cache.folder).free
    if needed > 0.95 * free:
        raise CacheError(_too_big(loaders, needed, f"the disk has {format_bytes(free)} left", "`Cache.folder`"))


def estimate(loaders: Sequence[CachedLoader]) -> tuple[int, int]:
    """How many records must be computed, and how many bytes they take."""
    absent = {(loader.store.folder, key): loader for loader in loaders for view in loader.missing() for key in view}
    return len(absent), sum(loader.store.format.size for loader in absent.values())


def fill_caches(
    loaders: Sequence[CachedLoader],
    cache: Cache,
    *,
    what: str = "features",
    processes: Processes = ALONE,
    quiet: bool = False,
) -> None:
    """Computes what is missing on disk: the first process of each machine makes room, then all compute their parts. A
    CacheError in all of them if it does not fit."""

    def fill(tick: Callable[[int], None], part: Part) -> None:
        for loader in loaders:
            loader.store.refresh()  # loaders may share records
            loader.fill(tick, part)

    machines = processes.all_gather(platform.node())
    part = machines[: processes.rank].count(platform.node()), machines.count(platform.node())
    count, size = estimate(loaders)
    _in_step(processes, lambda: None if processes.local_rank else make_room(loaders, cache))
    with bar(f"{what} ({format_bytes(size)})", -(-count // part[1]), quiet=quiet or not count) as tick:
        _in_step(processes, lambda: fill(tick, part))
    # What others computed is on disk now. More is missing only if they saw other files than this process.
    _in_step(processes, lambda: fill(lambda images: None, (0, 1)))


def _in_step(processes: Processes, work: Callable[[], None]) -> None:
    """Does a part of the work that no process leaves before all have done it; an error of one is an error of all."""
    problem = None
    try:
        work()
    except CacheError as error:
        problem = str(error)
    for text in processes.all_gather(problem):
        if text is not None:
            raise CacheError(text)


def check_memory(loaders: Sequence[CachedLoader], device: torch.device, processes: Processes) -> None:
    """A CacheError in all processes if the features do not fit into the memory of the GPU of one."""

    def check() -> None:
        size, free = sum(loader.resident_bytes for loader in loaders), free_memory(device)
        if size > free:
            raise CacheError(
                f"the features take {format_bytes(size)}, and {format_bytes(free)} of the GPU's memory is for them. "
                "To read them from disk in every epoch, use `cache=True`."
            )

    _in_step(processes, check)


def _too_big(loaders: Sequence[CachedLoader], size: int, limit: str, option: str) -> str:
    views, layers = max(len(loader.views) for loader in loaders), loaders[0].store.format.layers
    choices = [f"more space ({option})", "`cache=False`, which computes every pass again"]
    if views > 1:
        choices.insert(0, f"fewer views (`views=1`: {format_bytes(size / views)})")
    if layers > 4:
        choices.insert(0, f"a later fork (4 layers: {format_bytes(size * 4 / layers)})")
    return f"the features take {format_bytes(size)}, and {limit}. Choose {', '.join(choices[:-1])} or {choices[-1]}."


def what_is_kept(cache: Cache) -> str:
    """How many features are on disk, where, and how to remove them."""
    command = ["memoro", "cache", "--clear", *([] if cache.folder == default_folder() else ["--folder", cache.folder])]
    size, limit = format_bytes(total_bytes(cache.folder)), format_bytes(cache.limit)
    where = f"{size} of features are cached in {cache.folder} for later trainings (at most {limit})"
    return f"{where}. To remove them: {quoted(*command)}"


STATISTICS_BATCH = 32


def read_statistics(
    backbone: Backbone,
    images: ImageSet,
    preprocessing: Preprocessing,
    cache: Cache | None,
    *,
    workers: int | None = None,
    processes: Processes = ALONE,
    quiet: bool = True,
) -> Read:
    """A function from the numbers (b) of some images to their statistics (b, layers, statistics, dim), on the CPU:
    plain views, from the first layer that read-outs read. They are kept on disk if there is a cache and they fit."""
    if cache is not None:
        plain = Loader(images, preprocessing, batch_size=STATISTICS_BATCH, workers=workers)
        kept = CachedLoader(plain, backbone, cache, backbone.depth)
        try:
            fill_caches([kept], cache, what="statistics", processes=processes, quiet=quiet)
            return lambda index: kept.statistics(index.tolist())
        except CacheError:
            if cache.required:
                raise
    anatomy, size = backbone.anatomy, max(STATISTICS_BATCH, processes.world)
    loader = Loader(images, preprocessing, batch_size=size, workers=workers, rank=processes.rank, world=processes.world)

    def pool(pixels: Tensor) -> list[Tensor]:
        pooled = pool_pass(anatomy, pixels, ReadOut.of(anatomy).from_layer)
        half = pooled.half()
        return [half if bool(torch.isfinite(half).all()) else pooled]

    with bar("statistics", len(images), quiet=quiet) as tick:
        (found,), _ = collect_logits(
            pool, backbone, loader, tick=tick, all_gather=processes.all_gather, keep_dtype=True
        )
    return lambda index: found[index]
