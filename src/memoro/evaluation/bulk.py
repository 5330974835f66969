"""Predictions for millions of images: shards of a fixed order, each written whole and once, by one process or many."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from filelock import Timeout

from memoro.console import format_count
from memoro.data.source import Key, Source, is_endless
from memoro.engine.answers import Decode, Prediction
from memoro.errors import DataError
from memoro.evaluation.predictions import Predictor, Tally, check_form, read_errors, write_predictions
from memoro.files import LOCK, hold_folder, open_whole, write_whole

IMAGES = "_images.list"
"""Readers of Parquet folders leave out names with an underscore, and no other reader knows the suffix."""
MANIFEST = "_manifest.json"
"""Describes what the shards in a folder answer. Readers of Parquet folders leave out names with an underscore."""
FORMAT = 2
_PARTS = (".part-*.part", f".{MANIFEST}.*.part", f".{IMAGES}.*.part")  # what is left of a write that was killed
SHARD_SIZE = 8192

Hashes = npt.NDArray[np.uint64]
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What to answer, how, and where the answers go."""

    source: Source
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
    """Images of the source; None if that is not known in advance."""
    answered: Tally
    """What the existing shards hold."""
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
            text = f"another job is writing to {job.folder}: wait for it, or choose another folder."
            raise DataError(text) from None
        except OSError as error:
            text = f"cannot write to {job.folder} ({error.strerror}): choose another folder."
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
                f"{folder} already has {format_count(len(done), 'shard')} of answers. To continue, add `resume=True`; "
                "to start anew, choose another folder."
            )
        _compare(folder, _read_manifest(folder / MANIFEST), manifest)
        if not endless:
            changes = update_list(folder / IMAGES, job.source, job.shard_size, done)
    else:
        there = folder.iterdir() if folder.is_dir() else ()
        ours = (MANIFEST, IMAGES, LOCK, *_PARTS)
        if folder.is_file() or any(not any(map(file.match, ours)) for file in there):
            raise DataError(f"{folder} is not an empty folder: choose another one.")
        if not endless:
            write_list(folder / IMAGES, cut_shards(job.source.keys(), job.shard_size))
        write_whole(folder / MANIFEST, json.dumps(manifest, ensure_ascii=True, indent=1).encode())
    sizes = {} if endless else {shard.number: len(shard.keys) for shard in job.shards()}
    answered = Tally(sum(sizes.get(number, job.shard_size if endless else 0) for number in done))
    for number in sorted(done):
        for error in read_errors(job.path(number), job.form):
            answered.merge(Tally(0, 1, error))
    return Todo(None if endless else sum(sizes.values()), answered, done, changes)


def finish(job: Job) -> None:
    """Removes what killed processes left behind, once all shards are there."""
    for parts in _PARTS:
        for file in job.folder.glob(parts):
            with suppress(OSError):
                file.unlink()


def answer_here(job: Job, todo: Todo, *, workers: int = 0, tick: Callable[[int], None] = lambda count: None) -> Tally:
    """Answers all that is left, in this process. Returns what the new shards hold."""
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
    raise DataError(f"{path} is missing or damaged: choose another folder.")


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
        different = [_NAMES.get(key, f"`{key}`") for key in keys]
        raise DataError(
            f"{folder} has answers of another job, and these differ: {', '.join(different)}. Repeat the command as it "
            "was, or choose another folder."
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


class Shard(NamedTuple):
    """The unit of work: consecutive images, whose answers are one file."""

    number: int
    keys: Sequence[Key]


def cut_shards(keys: Iterable[Key], size: int, first: int = 0) -> Iterator[Shard]:
    """The images in shards, numbered from `first` on. Only the keys of one are in memory."""
    rest = iter(keys)
    while some := list(islice(rest, size)):
        yield Shard(first, some)
        first += 1


def write_list(path: Path, shards: Iterable[Shard]) -> None:
    """Writes the list; an error if it would be empty."""
    with open_whole(path) as file:
        for shard in shards:
            file.write(json.dumps(shard.keys).encode() + b"\n")
        if not file.tell():
            raise DataError("the source contains no images.")


def read_list(path: Path) -> Iterator[Shard]:
    """All shards of a job, in order."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                keys = [tuple(key) if isinstance(key, list) else key for key in json.loads(line)]
                yield Shard(number, keys)
    except (OSError, ValueError, TypeError):
        raise DataError(f"{path} is missing or damaged: choose another folder.") from None


def update_list(path: Path, source: Source, size: int, done: Collection[int]) -> list[str]:
    """Makes the list of an earlier run that of the source as it is now; returns what has changed, for the user.

    Shards that are `done` stay. What is new gets shards of its own; what is gone leaves those that are not done.
    """
    listed = _hash_all(key for shard in read_list(path) for key in shard.keys)
    present = _hash_all(source.keys())
    if np.array_equal(listed, present):
        return []
    new, gone, answered = _Some(), _Some(), _Some()

    def update() -> Iterator[Shard]:
        number = -1
        for number, keys in read_list(path):
            missing = _outside(keys, present)
            gone.add(missing)
            if number in done:
                answered.add(missing)
            dropped = set() if number in done else set(missing)
            yield Shard(number, [key for key in keys if key not in dropped])
        added = (key for shard in cut_shards(source.keys(), size) for key in _outside(shard.keys, listed))
        for shard in cut_shards(added, size, number + 1):
            new.add(shard.keys)
            yield shard

    write_list(path, update())
    told = [f"New since this job began: {new}."] if new.count else []
    if gone.count:
        rest = f"; rows stay for {answered.count} of them" if answered.count else ""
        told.append(f"Gone since this job began: {gone}{rest}.")
    return told


class _Some:
    """How many images, and one of them."""

    def __init__(self) -> None:
        self.count, self.example = 0, ""

    def add(self, keys: Sequence[Key]) -> None:
        if keys and not self.count:
            self.example = str(keys[0][1] if isinstance(keys[0], tuple) else keys[0])
        self.count += len(keys)

    def __str__(self) -> str:
        return f"1 image ({self.example})" if self.count == 1 else f"{self.count} images, such as {self.example}"


def _hash_keys(keys: Sequence[Key]) -> Hashes:
    """A number for each: millions of them fit in memory."""
    digests = (hashlib.blake2b(repr(key).encode(), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), np.uint64)


def _hash_all(keys: Iterable[Key]) -> Hashes:
    parts = [_hash_keys(shard.keys) for shard in cut_shards(keys, 8192)]
    return np.sort(np.concatenate([np.empty(0, np.uint64), *parts]))


def _outside(keys: Sequence[Key], known: Hashes) -> list[Key]:
    """The keys whose hashes are not among the sorted ones."""
    if not len(known):
        return list(keys)
    hashes = _hash_keys(keys)
    at = np.searchsorted(known, hashes).clip(max=len(known) - 1)
    return [key for key, same in zip(keys, known[at] == hashes, strict=True) if not same]
