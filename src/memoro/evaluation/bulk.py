"""Predictions for millions of images: shards of a fixed order, each written whole and once, by one process or many."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from filelock import Timeout

from memoro.backbones import Backbone
from memoro.console import format_count
from memoro.data.decoding import DecodeAhead
from memoro.data.unlabelled import Unlabelled, is_endless
from memoro.engine.answers import (
    AnswerOptions,
    Decode,
    NamedPicture,
    Pass,
    Prediction,
    answer_pictures,
    new_decoder,
)
from memoro.engine.composition import compose
from memoro.errors import DataError
from memoro.evaluation.imagelist import IMAGES, Shard, cut_shards, read_list, update_list, write_list
from memoro.evaluation.predictions import Tally, check_form, read_errors, write_predictions
from memoro.files import LOCK, hold_folder, open_whole, write_whole
from memoro.tasks.spec import hash_record
from memoro.tasks.task import Task

MANIFEST = "_manifest.json"
"""Describes what the shards in a folder answer. Readers of Parquet folders leave out names with an underscore."""
FORMAT = 2
_PARTS = (".part-*.part", f".{MANIFEST}.*.part", f".{IMAGES}.*.part")  # what is left of a write that was killed
SHARD_SIZE = 8192

T = TypeVar("T")


@dataclass(frozen=True)
class Predictor:
    """Tasks on one backbone, and how they answer. It can be sent to other machines."""

    backbone: Backbone
    models: tuple[Task, ...]
    how: AnswerOptions

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]

    @cached_property
    def passes(self) -> list[Pass]:
        return compose(self.backbone, self.models).prediction_passes()

    def on(self, device: torch.device | str) -> Predictor:
        """The same on another device."""
        return Predictor(self.backbone.to(device), self.models, self.how)

    def predict(self, pictures: Iterator[NamedPicture], decode: Decode | None = None) -> Iterator[Prediction]:
        """The prediction for each image, in order. They are decoded here, or as `decoder` says."""
        return answer_pictures(pictures, self.passes, self.names, self.how, decode)

    def decoder(self, workers: int) -> Decode | None:
        """Decodes images for `predict` in this many processes, which end with it."""
        return DecodeAhead(new_decoder(self.passes), workers) if workers else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Predictor, (self.backbone, self.models, self.how)  # passes are functions, and built where they run

    def describe(self) -> dict[str, Any]:
        """All that decides the answers, as JSON."""
        how = self.how
        return {
            "backbone": self.backbone.fingerprint.digest,
            "tasks": {model.name: _hash(model) for model in self.models},
            "top": how.top,
            "unfamiliar": how.routing.unfamiliar,
            "false_alarms": how.routing.false_alarms,
            "embeddings": how.embeddings,
        }


def _hash(model: Task) -> str:
    """Of a model's weights and of what is reported besides its logits."""
    calibration, familiarity = model.spec.calibration, model.spec.familiarity
    record = {
        "content": model.content_hash(),
        "calibration": None if calibration is None else asdict(calibration),
        "familiarity": None if familiarity is None else [familiarity.slope, familiarity.offset, familiarity.noticed],
    }
    return hash_record(record, {} if familiarity is None else familiarity.tensors)


@dataclass(frozen=True)
class Job:
    """What to answer, how, and where the answers go."""

    source: Unlabelled
    predictor: Predictor
    folder: Path
    form: str = "parquet"
    shard_size: int = SHARD_SIZE
    raw_csv: bool = False

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.{self.form}"

    def shards(self) -> Iterator[Shard]:
        """All shards: those of the list that `begin` wrote, or for an endless stream what it has."""
        if is_endless(self.source):
            return cut_shards(self.source.keys(), self.shard_size)
        return read_list(self.folder / IMAGES)

    def answer(
        self, shard: Shard, decode: Decode | None = None, *, tick: Callable[[int], None] = lambda count: None
    ) -> Tally:
        """Answers a shard and writes its file, which appears when it is whole. Returns what it holds.

        `tick` is called with the number of images after each batch. A shard beyond the end of a stream has no file.
        """
        tally, how = Tally(), self.predictor.how
        found = self.predictor.predict(self.source.read(shard.keys), decode)
        batches = iter(lambda: list(islice(found, how.batch_size)), [])
        batch = next(batches, None)
        if batch is None:
            return tally

        def write(file: BinaryIO, batches: Iterable[list[Prediction]]) -> None:
            rows = (prediction for batch in batches for prediction in batch)
            form = {"embeddings": how.embeddings, "raw_csv": self.raw_csv}
            write_predictions(rows, self.form, file, how.top, **form)

        # The answers are written while the next batches are computed.
        with open_whole(self.path(shard.number)) as file, _in_thread(partial(write, file)) as put:
            while batch is not None:
                for prediction in batch:
                    tally.add(prediction)
                put(batch)
                tick(len(batch))
                batch = next(batches, None)
        return tally


class Todo(NamedTuple):
    """What is left of a job."""

    images: int | None
    """Images of the source; None where that is not known in advance."""
    answered: int
    """Images in shards that exist."""
    done: frozenset[int]
    """The numbers of these shards."""
    changes: Sequence[str] = ()
    """What is new in the source, and what is gone, since the job began."""

    def shards(self, job: Job) -> Iterator[Shard]:
        """Those that do not exist."""
        return (shard for shard in job.shards() if shard.keys and shard.number not in self.done)


@contextmanager
def claim(job: Job) -> Iterator[None]:
    """Keeps other processes from writing to the job's folder meanwhile."""
    with ExitStack() as held:
        try:
            held.enter_context(hold_folder(job.folder))
        except Timeout:
            text = f"another job is writing to {job.folder}: wait for it, or choose another folder with --out."
            raise DataError(text) from None
        except OSError as error:
            text = f"cannot write to {job.folder} ({error.strerror}): choose another folder with --out."
            raise DataError(text) from None
        yield


def begin(job: Job, *, resume: bool = False) -> Todo:
    """Lists the images and writes the manifest of a new job, or with `resume` compares both with those of the shards
    that are there: shards of another job are an error.
    """
    check_form(job.form, job.predictor.how.embeddings)
    endless, folder = is_endless(job.source), job.folder
    sources = job.source.describe()
    trusted = [source.pop("allow_absolute", False) for source in sources]
    manifest = {
        "version": FORMAT,
        "source": sources,
        "allow_absolute": any(trusted),
        **job.predictor.describe(),
        "format": job.form,
        "raw_csv": job.raw_csv,
        "shard_size": job.shard_size,
    }
    changes: Sequence[str] = ()
    done = frozenset(_numbers(job))
    if done:
        if not resume:
            raise DataError(
                f"{folder} already has {format_count(len(done), 'shard')} of answers. To continue, add --resume; "
                "to start anew, choose another folder with --out."
            )
        _compare(folder, _read_manifest(folder / MANIFEST), manifest)
        if not endless:
            changes = update_list(folder / IMAGES, job.source, job.shard_size, done)
    else:
        there = folder.iterdir() if folder.is_dir() else ()
        ours = (MANIFEST, IMAGES, LOCK, *_PARTS)
        if folder.is_file() or any(not any(map(file.match, ours)) for file in there):
            raise DataError(f"{folder} is not an empty folder: choose another one with --out.")
        if not endless:
            write_list(folder / IMAGES, cut_shards(job.source.keys(), job.shard_size))
        write_whole(folder / MANIFEST, json.dumps(manifest, ensure_ascii=True, indent=1).encode())
    if endless:
        return Todo(None, len(done) * job.shard_size, done)
    sizes = {shard.number: len(shard.keys) for shard in job.shards()}
    return Todo(sum(sizes.values()), sum(sizes.get(number, 0) for number in done), done, changes)


def count_answered(job: Job, todo: Todo) -> Tally:
    """What the shards hold that exist."""
    tally = Tally(todo.answered)
    for number in sorted(todo.done):
        for image, error in read_errors(job.path(number), job.form):
            tally.unreadable += 1
            tally.first = tally.first or Prediction(image, {}, error)
    return tally


def finish(job: Job) -> None:
    """Removes what killed processes left behind, once all shards are there."""
    for parts in _PARTS:
        for file in job.folder.glob(parts):
            with suppress(OSError):
                file.unlink()


def answer_here(job: Job, todo: Todo, *, workers: int = 0, tick: Callable[[int], None] = lambda count: None) -> Tally:
    """Answers all that is left, in this process. Returns what was found."""
    whole, decode = Tally(), job.predictor.decoder(workers)
    for shard in todo.shards(job):
        found = job.answer(shard, decode, tick=tick)
        whole.merge(found)
        if found.images < len(shard.keys):  # the end of a stream
            break
    finish(job)
    return whole


def _numbers(job: Job) -> Iterator[int]:
    for file in job.folder.glob("part-*.*"):
        number = file.stem.removeprefix("part-")
        if number.isdecimal():
            yield int(number)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    except (OSError, ValueError):
        pass
    raise DataError(f"{path} is missing or damaged: choose another folder with --out.")


_NAMES = {
    "version": "the version of memoro",
    "source": "the images",
    "backbone": "the backbone",
    "tasks": "the tasks",
}
"""What a user would call the parts of a manifest; the others are options."""


def _compare(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    keys = [key for key in new if old.get(key) != new[key]]
    if keys:
        different = [_NAMES.get(key, f"--{key.replace('_', '-')}") for key in keys]
        raise DataError(
            f"{folder} has answers of another job, and these differ: {', '.join(different)}. Repeat the command as it "
            "was, or choose another folder with --out."
        )


@contextmanager
def _in_thread(consume: Callable[[Iterator[T]], None]) -> Iterator[Callable[[T], None]]:
    """A function that passes items to `consume`, which runs in a thread; at the end it has finished, or its error is
    raised."""
    items: queue.Queue[T | None] = queue.Queue(4)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            consume(iter(items.get, None))
        except BaseException as error:
            errors.append(error)
            while items.get() is not None:  # whoever waits to put an item must go on
                pass

    def put(item: T) -> None:
        if errors:
            raise errors[0]
        items.put(item)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield put
    finally:
        items.put(None)
        items.put(None)  # `consume` may fail after it took the first one
        thread.join()
    if errors:
        raise errors[0]
