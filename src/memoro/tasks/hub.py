"""Tasks on the Hugging Face hub. A repository, like a local copy of it, is a folder with a task file and a card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from memoro.backbones.load import is_hub_id, is_hub_reachable
from memoro.console import format_count, printable
from memoro.errors import TaskFileError, first_line
from memoro.files import keep_copy, write_whole
from memoro.pages.plots import MAX_CONFUSION, draw_confusion
from memoro.tasks.record import describe_fact, finite_number, short_facts
from memoro.tasks.task import Task
from memoro.tasks.taskfile import FILE, MAX_FILE, is_task_id, save_tasks


def download_task(name: str, revision: str | None, token: str | None) -> Path:
    """The task file of a repository, in the hub's own cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    how: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": not is_hub_reachable()}
    try:
        size = hf_hub_download(name, FILE, dry_run=True, **how).file_size
        if size is not None and size <= MAX_FILE:
            return Path(hf_hub_download(name, FILE, **how))
    except Exception as error:  # the network, the hub and the cache each fail in their own ways
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise TaskFileError(f"{name} on the hub has no {FILE}, so it is not a memoro task.") from None
        offline = isinstance(error, LocalEntryNotFoundError)
        reason = "it cannot be reached" if offline else first_line(error)[:200].rstrip(".")
        raise TaskFileError(
            f"'{name}' is not a file or folder here, and could not be downloaded from the hub ({reason}). "
            f"Online, check the name at huggingface.co/{name}. Offline, run `hf download {name} --local-dir FOLDER` on "
            "another machine and give that folder."
        ) from None
    found = "has no known size" if size is None else f"is {size >> 20} MiB"
    raise TaskFileError(f"{name}/{FILE} on the hub {found}; task files must not exceed {MAX_FILE >> 20} MiB.")


def push_task(
    task: Task,
    name: str,
    token: str | None,
    private: bool | None,
    revision: str | None,
    license: str | None,
    base_model: str | None,
) -> str:
    """Uploads what `save_pretrained` writes; returns the address of the commit."""
    from huggingface_hub import HfApi

    if not is_task_id(name) or "@" in name:
        raise TaskFileError(f"{name!r} is not a name of a repository on the hub: those look like owner/name.")
    with TemporaryDirectory() as folder:
        task.save_pretrained(folder, repo_id=name, license=license, base_model=base_model)
        try:
            api = HfApi(token=token)
            api.create_repo(name, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/pr/"):
                api.create_branch(name, branch=revision, exist_ok=True)
            return str(
                api.upload_folder(
                    repo_id=name, folder_path=folder, revision=revision, commit_message=f"Upload task {task.name}"
                )
            )
        except Exception as error:  # as above
            reason = first_line(error)[:200].rstrip(".")
            raise TaskFileError(
                f"could not upload to {name} ({reason}). Check that you are online and logged in (`hf auth "
                "login`), and that you may write to this repository."
            ) from None


MAX_LABELS = 50
MAX_ROWS = 30
MAX_TEXT = 120


def save_pretrained(
    tasks: Sequence[Task],
    folder: str | Path,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Writes a folder as the hub keeps it; returns it: tasks in one file, a card, README.md, and a picture of each
    task's confusion matrix, if its file has one.

    A card that was there and differs, which may have been edited, is kept as README.md.1.

    `repo_id` is the hub id that the card's example loads (default: the folder's name). `base_model` is the hub id of
    the backbone, if the tasks record it under another name, such as that of a folder.
    """
    from huggingface_hub import ModelCard

    folder = Path(folder)
    save_tasks(tasks, folder / FILE)
    pictures = {}
    for number, task in enumerate(tasks):
        picture = "confusion.png" if len(tasks) == 1 else f"confusion-{number}.png"
        if (matrix := _read_confusion(task)) is not None and find_spec("matplotlib") is not None:
            draw_confusion(folder / picture, task.name, matrix, task.labels)
            pictures[task.name] = picture
    own = tasks[0].spec.backbone.name
    base_model = base_model or (own if is_hub_id(own) else None)
    head = f"---\n{_front_matter(tasks, license, base_model)}\n---"
    introduction = _introduce(tasks, base_model, repo_id or folder.resolve().name)
    sections = [part for task in tasks for part in _describe(task, pictures.get(task.name))]
    text = "\n\n".join([head, *introduction, *sections]) + "\n"
    ModelCard(text)  # what the hub's own parser refuses is not written
    readme, content = folder / "README.md", text.encode(errors="backslashreplace")
    if readme.exists() and readme.read_bytes() != content:
        keep_copy(readme)
    write_whole(readme, content)
    return folder


def _front_matter(tasks: Sequence[Task], license: str | None, base_model: str | None) -> str:
    """The YAML that the hub reads: what filters, links and leaderboards are made of."""
    from huggingface_hub import EvalResult, ModelCardData

    kinds = list(dict.fromkeys(task.kind for task in tasks))
    results = [
        EvalResult(
            task_type="image-regression" if task.head_kind.has_numbers else "image-classification",
            dataset_type=_plain(task.spec.training.get("data") or task.name),
            dataset_name=_plain(task.spec.training.get("data") or task.name),
            dataset_split=_plain(task.spec.metrics.get("split") or "test"),
            metric_type=name,
            metric_name=f"{_plain(task.name)}: {name.replace('_', ' ')}" if len(tasks) > 1 else name.replace("_", " "),
            metric_value=value,
        )
        for task in tasks
        for name, value in _figures(task)
    ]
    # The hub has no name for regression on images.
    data = ModelCardData(
        library_name="memoro",
        pipeline_tag=None if all(task.head_kind.has_numbers for task in tasks) else "image-classification",
        base_model=base_model,
        tags=["memoro", "vision-transformer", "learnable-memory", *kinds],
        license=license,
        model_name=_plain(tasks[0].name if len(tasks) == 1 else ", ".join(task.name for task in tasks)),
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _introduce(tasks: Sequence[Task], base_model: str | None, source: str) -> Iterator[str]:
    """What the tasks are, and how the task file, `source`, is loaded."""
    made = tasks[0].spec.backbone
    name = f"[{_text(base_model)}](https://huggingface.co/{base_model})" if base_model else _text(made.name)
    what = "A memoro task" if len(tasks) == 1 else f"{len(tasks)} memoro tasks"
    yield f"# {', '.join(_text(task.name) for task in tasks)}"
    yield (
        f"{what} for the frozen backbone {name} ({_text(made.family)}, fingerprint {_text(made.fingerprint.short)}). "
        "Attach other tasks for the same backbone beside it: one pass of the backbone answers all of them, and the "
        "backbone's own output stays the same to the last bit. The file contains no code."
    )
    load = f"[memoro.load_task({source!r})]" if len(tasks) == 1 else f"memoro.load_tasks({source!r})"
    yield (
        "## Use\n\n```python\nimport memoro\n"
        f"backbone = memoro.load_backbone({printable(base_model or made.name)!r})\n"
        f"model = memoro.compose(backbone, {load})\n"
        'print(model.predict("photo.jpg"))\n```'
    )


def _describe(task: Task, picture: str | None) -> Iterator[str]:
    spec = task.spec
    labels = ", ".join(_text(label) for label in spec.labels[:MAX_LABELS])
    more = f", … ({len(spec.labels)} in all)" if len(spec.labels) > MAX_LABELS else ""
    yield f"## {_text(task.name)}"
    parts = []
    if spec.readout is None or spec.readout.share < 1:
        stream = f"{format_count(spec.cells, 'memory cell')} per layer, rank {spec.rank}, from layer {spec.from_layer}"
        parts.append(stream + ("" if spec.members == 1 else f", an ensemble of {spec.members} members"))
    if spec.readout is not None:
        parts.append(f"a read-out of the tokens after layer {spec.readout.from_layer} and later ones")
    stream = " and ".join(parts)
    yield f"Head: {spec.kind}, {stream}. Labels: {labels}{more}."
    if task.parents:
        names = ", ".join(_text(parent.name) for parent in task.parents)
        yield f"It extends {names}: attach that too, in the version that it was trained with."
    if figures := list(_figures(task)):
        images, split = spec.metrics.get("images"), _text(spec.metrics.get("split") or "test")
        count = f", {images:,} images" if isinstance(images, int) and finite_number(images) is not None else ""
        rows = "\n".join(f"| {_text(name.replace('_', ' '))} | {value:.4g} |" for name, value in figures)
        yield f"| metric ({split} split{count}) | value |\n|---|---|\n{rows}"
    if picture is not None:
        yield f"![confusion matrix: true by predicted classes]({picture})"
    if facts := list(short_facts(spec.training).items()):
        rows = "\n".join(f"| {_text(name.replace('_', ' '))} | {_text(value)} |" for name, value in facts[:MAX_ROWS])
        yield f"| training | |\n|---|---|\n{rows}"


def _figures(task: Task) -> Iterator[tuple[str, float]]:
    """The metrics of a record that are finite numbers under a plain name."""
    known = ((name, finite_number(value)) for name, value in task.spec.metrics.items())
    found = [
        (name, value)
        for name, value in known
        if value is not None and re.fullmatch(r"\w{1,40}", name, re.ASCII) and name != "images"
    ]
    yield from found[:MAX_ROWS]


def _read_confusion(task: Task) -> Tensor | None:
    """The confusion matrix of a record, None if there is none or it does not fit the labels."""
    matrix, count = task.spec.metrics.get("confusion"), len(task.labels)
    if not isinstance(matrix, list) or len(matrix) != count or count > MAX_CONFUSION:
        return None
    for row in matrix:
        if not isinstance(row, list) or len(row) != count or not all(type(n) is int and 0 <= n < 1 << 40 for n in row):
            return None
    return torch.tensor(matrix, device="cpu")


def _plain(value: object) -> str:
    """One short line."""
    text = printable(describe_fact(value, MAX_TEXT))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"  # escapes are longer than what they stand for


def _text(value: object) -> str:
    """The same for Markdown, in which no character of it has a meaning."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~&$-])", r"\\\1", _plain(value))
