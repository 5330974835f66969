"""Checkpoints: all that a training needs to continue as if nothing had happened.

No pickle, one file, written whole, with a checksum over all of it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from memoro.backbones import Backbone
from memoro.console import format_count
from memoro.data import ImageSet
from memoro.errors import TrainingError
from memoro.files import free_names, write_whole
from memoro.training.cached import Cache
from memoro.training.recipe import METRICS
from memoro.training.run import PROGRESS, LossScale, Run, RunGroup

KEY, CHECKSUM = "memoro-checkpoint", "crc32"
MOST_TEXT = 80
"""The most characters of a setting in the message of a refused resume."""


def save_checkpoint(path: Path, groups: Sequence[RunGroup], identity: dict[str, Any], seconds: float) -> None:
    """Writes the state of all runs: of those that are done, only the best weights. `identity` must be the same for a
    resume."""
    tensors: dict[str, Tensor] = {}
    records = []
    for number, (run, finished) in enumerate((run, group.finished) for group in groups for run in group.runs):
        going = run.stopped is None and not finished
        state = run.optimizer.state_dict()["state"] if going else {}
        for index, (name, parameter) in enumerate(run.trained.items()):
            if going:
                tensors[f"{number}.now.{name}"] = parameter.detach()
            if run.best_score is not None and not (going and torch.equal(run.best[name], parameter)):
                tensors[f"{number}.best.{name}"] = run.best[name]
            for key, value in state.get(index, {}).items():
                if value is not None:
                    tensors[f"{number}.optimizer.{index}.{key}"] = torch.as_tensor(value, device="cpu")
        facts = {name: getattr(run, name) for name in ("history", "best_score", "best_epoch", "stopped", "diverged")}
        records.append({**facts, "loss_scale": asdict(run.loss_scale)})
    progress = [{name: getattr(group, name) for name in PROGRESS} for group in groups]
    finished = all(group.finished for group in groups)
    record = {"progress": progress, "finished": finished, "seconds": seconds, "runs": records, "identity": identity}
    text, data = json.dumps(record), {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    write_whole(path, save(data, metadata={KEY: text, CHECKSUM: checksum(text, data)}))


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of a record and of its tensors with their names, dtypes and shapes."""
    found = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def read_identity(path: Path) -> dict[str, Any]:
    """The identity of the training that wrote a checkpoint."""
    with _damage(path):
        return dict(_read(path)[0]["identity"])


def make_way(path: Path) -> str | None:
    """Renames the checkpoint and the metrics of an interrupted training; says so, if there was one."""
    if not path.is_file():
        return None
    try:
        record, _ = _read(path)
        if record["finished"] or not any(progress["step"] for progress in record["progress"]):
            return None
    except Exception:  # damaged, or of another version: not ours to throw away
        pass
    files = [file for file in (path.with_name(METRICS), path) if file.exists()]  # a kill in between loses neither
    names = " and ".join(file.rename(new).name for file, new in zip(files, free_names(files), strict=True))
    return (
        f"{path.parent} holds an interrupted training. Its files were renamed to {names}: to continue it, rename them "
        "back and use `resume=True`."
    )


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong with a damaged checkpoint into a TrainingError."""
    try:
        yield
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise TrainingError(
            f"{path} is damaged, or is not a checkpoint ({error}): start over without `resume`."
        ) from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if checksum(metadata[KEY], tensors) != metadata[CHECKSUM]:
        raise ValueError("its checksum does not match")
    return dict(json.loads(metadata[KEY])), tensors


def load_checkpoint(path: Path, groups: Sequence[RunGroup], identity: dict[str, Any]) -> float:
    """Restores all runs from a checkpoint; returns the seconds of training so far."""
    with _damage(path):
        record, tensors = _read(path)
        changed, details = compare_identities(record["identity"], json.loads(json.dumps(identity)))
        if changed:
            raise TrainingError(
                f"cannot resume: {', '.join(changed)} differ from those of the checkpoint in {path.parent}"
                f"{f' ({details})' if details else ''}. Use the same settings and data, or start over without `resume`."
            )
        runs = [run for group in groups for run in group.runs]
        for number, (run, state) in enumerate(zip(runs, record["runs"], strict=True)):
            _restore(run, state, {name: tensors[name] for name in tensors if name.startswith(f"{number}.")}, number)
        for group, progress in zip(groups, record["progress"], strict=True):
            for name in PROGRESS:
                setattr(group, name, progress[name])
        return float(record["seconds"])


def _restore(run: Run, state: dict[str, Any], tensors: Mapping[str, Tensor], number: int) -> None:
    steps: dict[int, dict[str, Tensor]] = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(run.trained.items()):
            now, best = f"{number}.now.{name}", f"{number}.best.{name}"
            if now in tensors:
                parameter.copy_(tensors[now])
            if state["best_score"] is not None:  # weights that are the best until now are there once
                run.best[name] = tensors[best if best in tensors else now].to(parameter)
            prefix = f"{number}.optimizer.{index}."
            if entries := {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}:
                steps[index] = entries
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": steps})
    run.history, run.best_epoch = state["history"], state["best_epoch"]
    run.best_score = None if state["best_score"] is None else tuple(state["best_score"])
    run.stopped, run.diverged = state["stopped"], state["diverged"]
    run.loss_scale = LossScale(**state["loss_scale"])


def compare_identities(saved: dict[str, Any], here: dict[str, Any]) -> tuple[list[str], str]:
    """The keys that differ, and the settings among them with their values there and here.

    Lists have an entry for each run. If the number of runs differs, they are compared as sets.
    """
    sides = (saved, here)
    runs = [len(identity.get("recipe") or ()) for identity in sides]

    def comparable(value: Any) -> Any:
        return {json.dumps(entry) for entry in value} if isinstance(value, list) and runs[0] != runs[1] else value

    changed = [key for key in here if comparable(saved.get(key)) != comparable(here[key])]
    details = []
    if runs[0] != runs[1]:
        changed = changed or ["runs"]
        details.append(f"{format_count(runs[0], 'run')} in the checkpoint, {runs[1]} now")
    for key in changed:
        if key in {"recipe", "task", "preprocessing", "features"}:
            there, now = (_settings(key, identity.get(key)) for identity in sides)
            for name in dict.fromkeys((*now, *there)):
                values = [", ".join(dict.fromkeys(side.get(name, ["none"]))) for side in (there, now)]
                if values[0] != values[1]:
                    texts = [text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…" for text in values]
                    details.append(f"{name} {texts[0]} in the checkpoint, {texts[1]} now")
    return changed, "; ".join(details)


def _settings(name: str, value: Any) -> dict[str, list[str]]:
    """The values of each setting, one for each run, as text; nested settings by `augment.flip`."""
    found: dict[str, list[str]] = {}
    for run in value if isinstance(value, list) else [{name: value}]:
        for setting, part in run.items():
            for key, inner in (part if isinstance(part, dict) else {"": part}).items():
                path = f"{setting}.{key}" if key else setting
                found.setdefault(path, []).append(json.dumps(inner, ensure_ascii=False))
    return found


def run_identity(backbone: Backbone, runs: Sequence[Run], cache: Cache | None) -> dict[str, Any]:
    """All that must be the same for a resume to be the same training."""
    sets = {id(images): images for run in runs for images in (run.splits.train, run.splits.val)}
    digests = {key: _data_digest(images) for key, images in sets.items()}
    tasks, data = [], []
    for run in runs:
        start = {} if run.start_from is None else {"start_from": run.start_from}
        tasks.append({**run.task.identity(), "regime": run.regime.name, **start})
        held_out = None if run.held_out is None else hashlib.sha256(run.held_out.tobytes()).hexdigest()
        splits = {"train": digests[id(run.splits.train)], "val": digests[id(run.splits.val)]}
        data.append({**splits, "held_out": held_out})
    return {
        "recipe": [run.recipe.to_json() for run in runs],
        "task": tasks,
        "backbone": backbone.fingerprint.digest,
        "precision": str(backbone.dtype).removeprefix("torch."),
        "data": data,
        "preprocessing": [run.preprocessing.to_json() for run in runs],
        "features": None if cache is None else cache.dtype,
    }


def _data_digest(images: ImageSet | None) -> str | None:
    """A hash of a set's images and targets, in order."""
    if images is None:
        return None
    whole = hashlib.sha256(images.targets.numpy().tobytes())
    for index in range(len(images)):
        whole.update((images.key(index) if images.digests is not None else images.where(index)).encode())
    return whole.hexdigest()


def where_it_continues(path: Path, groups: Sequence[RunGroup], seconds: float) -> str:
    """What the user is told when a training continues from a checkpoint."""
    done = ", ".join(
        f"step {group.step + 1} of {group.total_steps} (epoch {group.epoch + 1})"
        for group in groups
        if not group.finished
    )
    if not done:
        return f"the training in {path.parent} is already finished: only evaluating it again."
    return f"resuming in {path.parent} at {done}, after {seconds:.0f} s of training."


def check_agreement(processes: Sequence[tuple[dict[str, Any], bool]], path: Path | None) -> None:
    """Raises if processes do not train the same, by identity, or not all of them found the checkpoint: they would wait
    for each other forever."""
    first, *others = processes
    for number, (identity, found) in enumerate(others, start=1):
        changed = [key for key, value in first[0].items() if identity.get(key) != value]
        if changed:
            raise TrainingError(
                f"process {number} and process 0 have different {', '.join(changed)}: all need the same."
            )
        if found != first[1]:
            raise TrainingError(f"some processes cannot find {path}: to resume, every machine needs the run folder.")
