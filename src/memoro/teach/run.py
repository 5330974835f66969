"""Starting `memoro teach`: the server with its page, and the session, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memoro.errors import ServeError
from memoro.serve.options import ServeOptions
from memoro.serve.server import open_store, run_server
from memoro.teach.finishing import Finishing, shell_commands
from memoro.teach.routes import add_teaching
from memoro.teach.session import Session

RUNS = "runs"
"""Folder of run folders, inside that of the tasks."""


def run_teaching(
    session: Session,
    tasks: Path,
    command: Sequence[str],
    options: ServeOptions,
    started: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves the page until SIGINT or SIGTERM. Tasks that are trained, and those of the folder `tasks`, answer there.

    `command` is what trains the task from the shell: `teach PHOTOS --finish` and its options.
    """
    if not options.may_write:
        raise ServeError(
            "labelling over a network needs a `token`: whoever has the token may see and label the images."
        )
    store = open_store([f"{tasks}/"], lambda record: session.backbone)
    file = tasks / f"{session.name}.safetensors"
    work = tasks / RUNS / session.name
    finishing = Finishing(command, work / file.name, work, lambda data: store.attach(data, session.name), file)
    commands = shell_commands(command, file, tasks, session.photos.place)

    def extend(app: Any) -> None:
        add_teaching(app, session, finishing, commands)

    try:
        run_server(store, options, started, extend)
    finally:
        finishing.close()
