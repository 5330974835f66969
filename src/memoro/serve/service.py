"""From encoded images to answers: decode, batch, format."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from starlette.responses import Response
from torch import Tensor

from memoro.engine.explain import Explanation
from memoro.errors import ImageError, ServeError
from memoro.images import Decoder, Preprocessing
from memoro.serve.batching import Batcher, Item, Question
from memoro.serve.guard import Metrics
from memoro.serve.options import BUSY, MAX_INPUT_SIDE, ServeOptions
from memoro.serve.store import Attached, TaskStore

T = TypeVar("T")
DESCRIPTORS = 8
"""Files that a change of the store may open at a time, and some more."""
READERS = 2
"""Threads that expand and parse bodies. A small body may take a hundred times its size then."""


Upload = tuple[str, bytes]
"""The name of an image, and the image as it came in."""


class Service:
    """What the routes call."""

    def __init__(self, store: TaskStore, options: ServeOptions, metrics: Metrics) -> None:
        self.store, self.options, self.metrics = store, options, metrics
        self.batcher = Batcher(options, metrics)
        self._pool = ThreadPoolExecutor(options.decoders, thread_name_prefix="memoro-decode")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="memoro-read")
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="memoro-store")
        self.making_file = asyncio.Semaphore(1)
        """Files that are being made are not counted in the budget for answers yet."""

    async def close(self) -> None:
        """Finishes what was taken in."""
        await self.batcher.close()
        for pool in (self._pool, self._readers, self._changes):
            pool.shutdown()

    async def in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function that expands or parses a body."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def change(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a change of the store, after those that came before it: they would wait for each other anyway."""

        def run() -> T:
            check_descriptors()
            return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._changes, run)

    async def predict(self, question: Question, uploads: Sequence[Upload]) -> bytes:
        """The JSON document that answers the question for each image."""
        start = perf_counter()
        with self.batcher.admit(len(uploads)):
            decoded = await self._prepare(question, uploads)
            seconds = {"decode": perf_counter() - start}
            items = [one for one in decoded if isinstance(one, Item)]
            if not items:
                raise next(one for one in decoded if isinstance(one, ImageError))
            await self.batcher.run(items)
            for item in items if question.explain else ():
                await self._explain(question, item)
        passes = {id(spent): spent for item in items for spent in item.passes}.values()
        seconds["queue"] = max(item.started - item.arrived for item in items)
        seconds["backbone"] = sum(spent.backbone for spent in passes)
        seconds["tasks"] = sum(spent.tasks for spent in passes)
        return await self.in_pool(_write_answers, question, uploads, decoded, len(passes), seconds, start)

    async def logits(self, question: Question, images: Sequence[Upload] | Tensor) -> dict[str, Tensor]:
        """(images, labels) for each task asked, and `base` if that is asked for; all images must be readable."""
        with self.batcher.admit(len(images)):
            decoded = await self._prepare(question, images)
            if errors := [one for one in decoded if isinstance(one, ImageError)]:
                raise errors[0]
            items = [one for one in decoded if isinstance(one, Item)]
            await self.batcher.run(items)
        names = [*question.tasks, *(["base"] if question.base else [])]
        return {name: torch.stack([item.logits[name] for item in items]) for name in names}

    async def _explain(self, question: Question, item: Item) -> None:
        """Adds each task's attention to the answers for an image. Passes of other requests run in between."""
        model = question.attached.model

        def explain(pixels: Tensor, names: list[str]) -> dict[str, Explanation]:
            return model.explain(pixels, names, normalised=True)

        for steps, names in model.passes(question.tasks).items():
            pixels = steps.normalise(item.images[steps][None]).to(model.backbone.dtype)
            maps = await self.batcher.call(partial(explain, pixels, names))
            for name in names:
                item.answers[name] = replace(item.answers[name], attention=maps[name].describe())

    async def _prepare(self, question: Question, images: Sequence[Upload] | Tensor) -> Sequence[Item | ImageError]:
        """An item for each image, or why it cannot be read."""
        if isinstance(images, Tensor):
            model = question.attached.model
            model.backbone.check_pixels(images)
            model.check_size(question.tasks, (images.shape[-2], images.shape[-1]))
            return [Item(question, {None: pixels}) for pixels in images]

        async def decode(upload: Upload) -> Item | ImageError:
            start = perf_counter()
            try:
                images = await self.in_pool(prepare, upload, question, self.options.max_pixels)
            except ImageError as error:
                return error
            self.metrics.stage_seconds.labels("decode").observe(perf_counter() - start)
            return Item(question, images)

        return await asyncio.gather(*map(decode, images))


def choose_tasks(attached: Attached, asked: Sequence[str] | None) -> list[str]:
    """The tasks that a request asks, in the order of the composition. A name may be several, separated by commas."""
    if asked is None:
        return attached.model.names
    names = {part for name in asked for part in ([name] if name in attached.info else name.split(","))}
    if unknown := sorted(names - set(attached.info)):
        raise ServeError(f"there is no task {unknown[0]!r}; GET /v1/tasks lists them.", 404)
    return [name for name in attached.model.names if name in names]


def check_descriptors() -> None:
    """Raises if a change would fail halfway because the process has too many files open."""
    with ExitStack() as files:
        try:
            for _ in range(DESCRIPTORS):
                files.enter_context(open(os.devnull, "rb"))
        except OSError:
            raise ServeError(BUSY, 503) from None


def prepare(upload: Upload, question: Question, max_pixels: int) -> dict[Preprocessing, Tensor]:
    """The image for each preprocessing (height, width, 3), exactly as `Composition.predict` prepares it."""
    decode = Decoder(tuple(question.groups), max_pixels)
    decoded, failures = decode([upload])
    name, _ = upload
    if failures:
        raise ImageError(f"{name}: {failures[0]}")
    images = {steps: batch[0][0] for steps, batch in zip(decode.preprocessings, decoded, strict=True)}
    least = max(question.attached.model.backbone.anatomy.patch)
    for image in images.values():
        if min(image.shape[:2]) < least or max(image.shape[:2]) > MAX_INPUT_SIDE:
            size = f"{image.shape[1]}x{image.shape[0]}"
            raise ImageError(
                f"{name}: {size} pixels after resizing; the model takes {least} to {MAX_INPUT_SIDE} a side."
            )
    return images


def _write_answers(
    question: Question,
    uploads: Sequence[Upload],
    decoded: Sequence[Item | ImageError],
    passes: int,
    seconds: dict[str, float],
    start: float,
) -> bytes:
    images: list[dict[str, Any]] = []
    for (upload, _), item in zip(uploads, decoded, strict=True):
        if isinstance(item, ImageError):
            images.append({"name": upload, "error": str(item)})
            continue
        routed = {name: question.routing.apply(item.answers[name]) for name in question.tasks}
        answers = {name: answer.to_json() for name, answer in routed.items() if answer is not None}
        base = {"base": item.logits["base"].tolist()} if question.base else {}
        images.append({"name": upload, "answers": answers, **base})
    document = {
        "images": images,
        "tasks": {name: {"version": question.attached.version(name)} for name in question.tasks},
        "passes": passes,
        "seconds": {**seconds, "total": perf_counter() - start},
    }
    return write_json(document)


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(write_json(document), status, headers, "application/json")


def write_json(document: Any) -> bytes:
    """JSON as bytes. Numbers that JSON does not know are an error of the model, not of the server."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise ServeError("an answer to this image is not a finite number.", 422) from None
