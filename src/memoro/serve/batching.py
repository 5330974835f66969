"""Dynamic batching: images of many requests share passes of the backbone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from memoro.answer import Answer
from memoro.engine.answers import Outputs, Routing
from memoro.engine.composition import Composition
from memoro.errors import ServeError
from memoro.images import Preprocessing
from memoro.serve.guard import Metrics
from memoro.serve.options import BUSY, ServeOptions

if TYPE_CHECKING:
    from memoro.serve.store import Attached

T = TypeVar("T")
Group = Preprocessing | None
"""Images that share a pass are prepared alike: by this, or by the client."""


class PassTime(NamedTuple):
    """Seconds that one pass took."""

    backbone: float
    tasks: float


@dataclass(frozen=True)
class Question:
    """What a request wants to know of its images."""

    attached: Attached
    tasks: list[str]
    """In the order of the composition."""
    top: int | None = None
    """The number of labels in an answer; None: only logits are asked for."""
    base: bool = False
    explain: bool = False
    routing: Routing = field(default_factory=Routing)

    @cached_property
    def groups(self) -> dict[Preprocessing, list[str]]:
        """The tasks by preprocessing; the backbone's own answer is asked for with its own preprocessing."""
        model = self.attached.model
        groups = model.passes(self.tasks)
        if self.base or not groups:
            groups.setdefault(model.backbone.preprocessing, [])
        return groups


@dataclass(eq=False)
class Item:
    """One image of a request, and what its passes computed for it."""

    question: Question
    images: Mapping[Any, Tensor]
    """By `Group`: bytes (height, width, 3), or pixels (3, height, width) that the client has prepared."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    arrived: float = field(default_factory=perf_counter)
    started: float = 0.0
    logits: dict[str, Tensor] = field(default_factory=dict)
    """(labels) by task, on the CPU; `base` is from the pass at the backbone's own preprocessing, if there is one."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """By task, if the question asks for answers."""
    passes: list[PassTime] = field(default_factory=list)
    error: Exception | None = None

    @property
    def model(self) -> Composition:
        return self.question.attached.model

    def names(self, group: Group) -> list[str]:
        """The tasks that are asked in the pass of a group; none for the backbone's own answer only."""
        return self.question.tasks if group is None else self.question.groups[group]


class Batcher:
    """Gathers items up to `max_batch` or for `max_delay_ms`, and runs them in one thread: one pass at a time.

    The items of a pass all have the composition that was current when their request came in.
    """

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self._options, self._metrics = options, metrics
        self._waiting: list[Item] = []
        self._admitted = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memoro-pass")

    def start(self) -> None:
        """Starts the work, in the event loop that serves the requests."""
        self._worker = asyncio.create_task(self._work())

    @contextmanager
    def admit(self, images: int) -> Iterator[None]:
        """A place in the queue for images that are about to be decoded."""
        self.check_room(images)
        self._admit(images)
        try:
            yield
        finally:
            self._admit(-images)

    def check_room(self, images: int = 1) -> None:
        """Raises if there is no room for so many; if not even for one, there is no need to read a body."""
        if self._closing or self._admitted + images > self._options.max_queue:
            raise ServeError(BUSY, 503)

    async def run(self, items: Sequence[Item]) -> None:
        """Returns when all items have been in their passes. If it is cancelled, those that still wait are dropped."""
        self._waiting += items
        self._changed.set()
        try:
            await asyncio.gather(*(item.done for item in items))
        finally:
            for item in items:
                item.done.cancel()
            self._waiting = [item for item in self._waiting if not item.done.cancelled()]

    async def call(self, function: Callable[[], T]) -> T:
        """Runs a function between two passes, in their thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Runs what waits, then stops."""
        self._closing = True
        self._changed.set()
        await self._worker
        self._thread.shutdown()

    def _admit(self, images: int) -> None:
        self._admitted += images
        self._metrics.queue.set(self._admitted)

    async def _work(self) -> None:
        while self._waiting or not self._closing:
            self._changed.clear()
            left = self._delay_left()
            if left > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if left == float("inf") else left):
                        await self._changed.wait()
                continue
            batch = self._take()
            await self.call(lambda batch=batch: run_batch(batch, self._metrics))  # type: ignore[misc]
            for item in batch:
                if not item.done.done():
                    item.done.set_result(None) if item.error is None else item.done.set_exception(item.error)

    def _delay_left(self) -> float:
        """Seconds until a pass should start."""
        if not self._waiting:
            return float("inf")
        if self._closing or len(self._waiting) >= self._options.max_batch:
            return 0.0
        return self._waiting[0].arrived + self._options.max_delay_ms / 1000 - perf_counter()

    def _take(self) -> list[Item]:
        """The oldest items of one composition, and at most `max_batch`."""
        model = self._waiting[0].model
        batch = [item for item in self._waiting if item.model is model][: self._options.max_batch]
        taken = set(map(id, batch))
        self._waiting = [item for item in self._waiting if id(item) not in taken]
        return batch


def run_batch(batch: Sequence[Item], metrics: Metrics) -> None:
    """One pass for each group of tasks that share a preprocessing, with all images that ask one of them."""
    start = perf_counter()
    members: dict[tuple[Group, tuple[int, ...]], list[Item]] = {}
    for item in batch:
        item.started = start
        metrics.stage_seconds.labels("queue").observe(start - item.arrived)
        for group, image in item.images.items():
            members.setdefault((group, tuple(image.shape)), []).append(item)
    for (group, _), items in members.items():
        model = items[0].model
        asked = Counter(name for item in items for name in item.names(group))
        names = [name for name in model.names if name in asked]
        try:
            stacked = torch.stack([item.images[group] for item in items])
            pixels = stacked if group is None else group.on(stacked, model.backbone.device)
            outputs, spent = run_pass(model, pixels, names)
        except Exception as error:  # one request must not stop the server for all others
            for item in items:
                item.error = error
            continue
        answers = {
            (name, top): outputs.answers(model.tasks[name], top)
            for top in {item.question.top for item in items if item.question.top is not None}
            for name in names
        }
        for row, item in enumerate(items):
            item.passes.append(spent)
            item.logits |= {name: outputs.logits[name][row] for name in item.names(group)}
            if group == model.backbone.preprocessing or "base" not in item.logits:
                item.logits["base"] = outputs.logits["base"][row]
            if item.question.top is not None:
                item.answers |= {name: answers[name, item.question.top][row] for name in item.names(group)}
        for name, images in asked.items():
            metrics.task_answers.labels(name).inc(images)
        metrics.passes.inc()
        metrics.batch_size.observe(len(items))
        metrics.stage_seconds.labels("backbone").observe(spent.backbone)
        metrics.stage_seconds.labels("tasks").observe(spent.tasks)


def run_pass(model: Composition, pixels: Tensor, names: Sequence[str]) -> tuple[Outputs, PassTime]:
    """What these tasks give for a batch of pixels, on the CPU."""
    start, seconds = perf_counter(), list[float]()
    with torch.no_grad():
        out = model.run(pixels.to(model.backbone.dtype), names, seconds=seconds)
        outputs = out.on_cpu(out.logits)
    return outputs, PassTime(sum(seconds), perf_counter() - start - sum(seconds))
