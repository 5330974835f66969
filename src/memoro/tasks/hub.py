"""Tasks on the Hugging Face hub. A repository, like a local copy of it, is a folder with a task file and a card."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from memoro.backbones.load import is_hub_id, is_hub_reachable
from memoro.errors import TaskFileError, first_line

if TYPE_CHECKING:
    from memoro.tasks.task import Task

FILE = "task.safetensors"
"""The task file, or bundle, of a folder or repository."""
MAX_FILE = 2 << 30


def is_task_id(source: str) -> bool:
    """Whether it could be a task of the hub: owner/name, with a branch, tag or commit behind an @."""
    return is_hub_id(source, r"@[\w./-]+") and not source.endswith(".safetensors")


def find_task_file(source: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """The task file that is meant by a path, by a folder with a card, or by a hub id such as `owner/name@revision`.

    A local path wins over a hub id of the same spelling, and a Path is always local. From the hub only the task file
    is downloaded, into the hub's own cache, and only if it has at most `MAX_FILE` bytes. Reading the file checks it.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / FILE).is_file():
            if (first := find_task_files(str(path))[0]) != str(path):
                raise TaskFileError(f"{path} is a folder: give a task file in it, such as {first}.")
            raise TaskFileError(f"{path} contains no task files (.safetensors).")
        return path / FILE
    if isinstance(source, Path) or path.exists() or not is_task_id(source):
        return path
    if (meant := Path(f"{path}.safetensors")).is_file():
        raise TaskFileError(f"{path}: no such file. Did you mean {meant}?")
    name, _, own = source.partition("@")
    return _download(name, revision or own or None, token)


def find_task_files(source: str) -> list[str]:
    """The task files that are meant on a command line: a folder of them or a glob stands for all of its files."""
    path = Path(source)
    if path.is_dir():
        inside = sorted(str(file) for file in path.glob("*.safetensors") if not file.name.startswith("."))
        return inside or [source]
    return sorted(glob.glob(source)) or [source] if not path.exists() and glob.has_magic(source) else [source]


def expand_task_arguments(places: Iterable[str | Path]) -> Iterator[tuple[str, Path, str]]:
    """The task files of what `-t` takes: files, folders, globs and hub ids, also as `NAME=FILE`. For each, the file as
    it was given, its path, and the name that its task is to have (empty: its own)."""
    for place in places:
        if isinstance(place, Path):  # always local
            yield str(place), find_task_file(place), ""
            continue
        name, _, named = place.partition("=")
        if not named or Path(place).exists():
            name, named = "", place
        yield from ((file, find_task_file(file), name) for file in find_task_files(named))


def _download(name: str, revision: str | None, token: str | None) -> Path:
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
    task: Task, name: str, *, token: str | None, private: bool | None, revision: str | None, **card: Any
) -> str:
    """Uploads what `save_pretrained` writes; returns the address of the commit."""
    from huggingface_hub import HfApi

    if not is_task_id(name) or "@" in name:
        raise TaskFileError(f"{name!r} is not a name of a repository on the hub: those look like owner/name.")
    with TemporaryDirectory() as folder:
        task.save_pretrained(folder, repo_id=name, **card)
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
