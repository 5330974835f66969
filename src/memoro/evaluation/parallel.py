"""Predictions by several processes: one for each GPU of this machine, or the workers of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from memoro import __version__
from memoro.backbones.load import own_device
from memoro.console import format_count
from memoro.data.source import Chain, Stream
from memoro.data.workers import worker_count
from memoro.engine.answers import Decode, Prediction
from memoro.errors import DataError, MemoroError, first_line, need
from memoro.evaluation.bulk import MANIFEST, Job, Shard, Todo, finish
from memoro.evaluation.predictions import Predictor, Tally
from memoro.images import NamedPicture
from memoro.options import option

CPUS = 4
"""CPUs per worker on machines without GPUs."""
PATIENCE = 60.0
"""Seconds without a ready worker after which the user is told."""
MAX_DEATHS = 3
"""How many workers may die on the same shard, or before they are ready."""


@dataclass(frozen=True)
class RayOptions:
    """The cluster to answer on. Any of these options asks for one."""

    ray: bool = option(False, "Use the Ray cluster of $RAY_ADDRESS or of this machine, or start one here.")
    address: str | None = option(None, "Use this Ray cluster, such as head:6379.", name="ray_address")
    workers: int | None = option(
        None, "Number of Ray workers.", name="ray_workers", shown="one per GPU, or per 4 cores"
    )

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise DataError(f"`ray_workers` {self.workers}: choose 1 or more.")

    @property
    def wanted(self) -> bool:
        return self != RayOptions()


class Worker:
    """A process of the cluster with the backbone and the tasks, which it gets once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.decode: Decode | None = None

    def ready(self, version: str, place: str, cpus: int) -> None:
        """Prepares the models. Raises if this machine has another version of memoro, or other files."""
        here = os.uname().nodename
        if version != __version__:
            raise DataError(f"memoro {__version__} is installed on {here}: install {version} there.")
        if not os.path.isdir(place):
            raise DataError(
                f"{place}, where the command was started, does not exist on {here}: start it in a folder that all "
                "machines share."
            )
        os.chdir(place)  # relative paths mean the same as for the command
        if not (self.job.folder / MANIFEST).is_file():
            raise DataError(f"{self.job.folder} is not visible on {here}: use a folder that all machines share.")
        torch.set_num_threads(cpus)
        self.job = replace(self.job, predictor=self.job.predictor.on(own_device(None)))
        self.decode = self.job.predictor.decoder(min(worker_count(None, None), cpus) if cpus > 1 else 0)

    def answer(self, shard: Shard) -> Tally:
        return self.job.answer(shard, self.decode)


def check_ray(job: Job) -> None:
    """Raises if Ray is not installed, or the job is not for several processes."""
    sources = job.source.sources if isinstance(job.source, Chain) else (job.source,)
    if any(isinstance(source, Stream) for source in sources):
        raise DataError("a stream is read from front to back, by one process: leave out `ray` or `streaming`.")
    need("ray", extra="ray")


def place_workers(machines: Sequence[Mapping[str, float]], wanted: int | None = None) -> tuple[int, int, int]:
    """The number of workers, and the cores and GPUs of each. There are as many as are wanted; else one for each GPU, or
    without GPUs one for every `CPUS` cores of a machine, where a smaller machine counts as one worker.

    `machines` have the resources `CPU` and `GPU`. A worker runs on a single machine. It gets as many cores as possible
    while there is room for all workers; if there is none, one core, and some workers wait.
    """
    cpus = [int(machine.get("CPU", 0)) for machine in machines]
    gpus = [int(machine.get("GPU", 0)) for machine in machines]
    use_gpus = any(map(min, cpus, gpus))

    def room(each: int) -> int:
        return sum(min(own // each, cards) if use_gpus else own // each for own, cards in zip(cpus, gpus, strict=True))

    usual = room(1) if use_gpus else sum(max(1, own // CPUS) for own in cpus if own)
    count = wanted or usual or 1  # a cluster that grows when work waits may have no machine yet
    each = next((each for each in range(max(cpus, default=1), 1, -1) if room(each) >= count), 1)
    return count, each, int(use_gpus)


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster: the one that this process uses already, that at `address` or $RAY_ADDRESS, or a new
    one on this machine."""
    import ray

    own = not ray.is_initialized()
    if own:
        try:
            ray.init(address, log_to_driver=False, include_dashboard=None if address else False, logging_level="error")
        except (ConnectionError, ValueError) as error:
            where = address or "RAY_ADDRESS"
            raise DataError(f"no Ray cluster at {where} ({first_line(error)}); see `ray status`.") from None
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def answer_on_ray(
    job: Job,
    todo: Todo,
    *,
    address: str | None = None,
    workers: int | None = None,
    tick: Callable[[int], None] = lambda count: None,
    tell: Callable[[str], None] = lambda message: None,
) -> Tally:
    """Answers all that is left on a cluster (see `_connected`).

    `place_workers` says how many workers there are. The shard of one that dies is given to another. The files are those
    that `answer_here` would write. `tell` is called with a message if no worker becomes ready.
    """
    with _connected(address) as ray:
        count, each, gpus = place_workers([node["Resources"] for node in ray.nodes() if node["Alive"]], workers)
        kind = ray.remote(num_cpus=each, num_gpus=gpus)(Worker)
        shipped = ray.put(job)
        calls: dict[Any, tuple[Any, Shard | None]] = {}  # what each call is for; None: the worker starts
        idle: list[Any] = []
        shards, again = todo.shards(job), deque[Shard]()
        deaths: Counter[int | None] = Counter()
        whole, told = Tally(), False

        def start() -> None:
            worker = kind.remote(shipped)
            calls[worker.ready.remote(__version__, os.getcwd(), each)] = (worker, None)

        for _ in range(count):
            start()
        left = next(shards, None)
        while left is not None or again or any(shard for _, shard in calls.values()):
            while idle and (again or left is not None):
                worker, shard = idle.pop(), again.popleft() if again else left
                if shard is left:
                    left = next(shards, None)
                calls[worker.answer.remote(shard)] = (worker, shard)
            ready, _ = ray.wait(list(calls), timeout=PATIENCE)
            if not ready:
                if not told and not any(shard for _, shard in calls.values()):
                    needs = f"{format_count(each, 'core')} {'and a GPU ' if gpus else ''}of one machine"
                    tell(f"no worker is ready after {PATIENCE:.0f} s; each needs {needs}. See `ray status`.")
                    told = True
                continue
            [done] = ready
            worker, shard = calls.pop(done)
            try:
                found = ray.get(done)
            except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                number = None if shard is None else shard.number
                deaths[number] += 1
                if deaths[number] > MAX_DEATHS * (count if shard is None else 1):
                    what = "before they were ready" if shard is None else f"over shard {number}"
                    raise DataError(
                        f"{deaths[number]} workers died {what}, possibly out of memory ({error})."
                    ) from None
                if shard is not None:
                    again.append(shard)
                start()
                continue
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, MemoroError) else error) from None
            idle.append(worker)
            if shard is not None:
                whole.merge(found)
                tick(found.images)
        finish(job)
        return whole


CHUNK = 16
"""Batches that a process is given at once: it decodes the next one while the GPU is busy."""
AHEAD = 2
"""Chunks under way for each process."""


def list_devices(name: str | None) -> list[torch.device]:
    """All GPUs of this machine for `cuda` or no name, else the device of this name."""
    if name in {None, "cuda"} and torch.cuda.is_available():
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return [own_device(name)]


@dataclass(frozen=True)
class SharedPredictor(Predictor):
    """A predictor whose images are answered by several processes, in order. They have their own decoders."""

    pool: ProcessPoolExecutor = field(repr=False)
    processes: int = 1

    def predict(self, pictures: Iterator[NamedPicture], decode: Decode | None = None) -> Iterator[Prediction]:
        chunks = iter(lambda: list(islice(pictures, CHUNK * self.how.batch_size)), [])
        waiting: deque[Future[list[Prediction]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(self.pool.submit(_answer, chunk))
                if len(waiting) == AHEAD * self.processes:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a process of a GPU died, possibly out of memory: choose a smaller `batch_size`, or one GPU with "
                "`device='cuda:0'`."
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def decoder(self, workers: int) -> None:
        """The processes decode for themselves."""


@contextmanager
def share(predictor: Predictor, devices: Sequence[torch.device], workers: int) -> Iterator[Predictor]:
    """The predictor on these devices, with so many processes that decode for all of them together. On a single device
    it is as it was."""
    if len(devices) < 2:
        yield predictor
        return
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    places: Any = context.SimpleQueue()
    for device in devices:
        places.put(str(device))
    given = (predictor.on("cpu"), places, -(-workers // len(devices)), torch.backends.cuda.matmul.allow_tf32)
    with ProcessPoolExecutor(len(devices), context, initializer=_start, initargs=given) as pool:
        yield SharedPredictor(predictor.backbone, predictor.models, predictor.how, pool, len(devices))


_here: dict[str, Any] = {}
"""In a process of a device: its predictor and decoder."""


def _start(predictor: Predictor, places: Any, workers: int, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    _here["predictor"] = predictor.on(places.get())
    _here["decode"] = _here["predictor"].decoder(workers)


def _answer(chunk: list[NamedPicture]) -> list[Prediction]:
    return list(_here["predictor"].predict(iter(chunk), _here["decode"]))
