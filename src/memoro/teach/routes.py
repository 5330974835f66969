"""The routes of /v1/teach: pictures, decisions, guesses and training; and the server that has them."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from memoro.console import finite, printable
from memoro.errors import ServeError, TeachError
from memoro.evaluation.predictions import no_formula
from memoro.serve.options import ServeOptions
from memoro.serve.server import run_server
from memoro.serve.service import json_response
from memoro.serve.store import open_store
from memoro.teach.finishing import Finishing, shell_commands
from memoro.teach.labels import COLUMN, State, label_text, read_label
from memoro.teach.learning import LabelledImages, advise
from memoro.teach.session import Change, Session
from memoro.teach.suggestions import WAYS
from memoro.teach.suspects import CONTRADICTED, Suspect, overlaps

MOST_SHOWN = 100
"""Images of a page of the grid."""
MOST_CHANGES = 1000
"""Decisions of one request."""
RUNS = "runs"
"""Folder of run folders, inside that of the tasks."""
ATTACHED = {"content-disposition": "attachment"}
"""Never shown by a browser as a page of this server."""
View = Literal["next", "all", "unlabelled", "labelled", "sure", "suspects", "unreadable"]


class Entry(BaseModel):
    """A decision about an image, by its key."""

    model_config = ConfigDict(extra="forbid")
    key: str
    state: State
    label: str | float | list[str] | None = None
    row: int | None = None
    """The row that it replaces. If another one was written meanwhile, nothing changes."""


Entries = Annotated[list[Entry], Body(embed=True, min_length=1, max_length=MOST_CHANGES)]


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
    try:
        run_server(store, options, started, lambda app: add_teaching(app, session, finishing, commands))
    finally:
        finishing.close()


def add_teaching(app: FastAPI, session: Session, finishing: Finishing, commands: Sequence[str]) -> None:
    """Adds the routes. Those that wait for the disk or compute run in threads."""
    router = APIRouter(prefix="/v1/teach", include_in_schema=False)

    @router.get("")
    def state() -> Response:
        return json_response(finite({**describe(session), "training": finishing.to_json(), "commands": commands}))

    @router.get("/images")
    def images(
        view: View = "all",
        by: str = "auto",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 60,
        keys: Annotated[list[str] | None, Query(max_length=MOST_SHOWN)] = None,
    ) -> Response:
        session.raise_failure()
        reasons = {_find(session, key): "" for key in keys} if keys else _choose(session, view, by, limit)
        chosen = list(reasons)
        page = chosen[offset : offset + limit]
        session.gallery.want(page)
        rows = [describe_image(session, at, reasons[at]) for at in page]
        found = {"total": len(chosen), "offset": offset, "version": session.version, "images": rows}
        return json_response(finite(found))

    @router.get("/images/{key}")
    def picture(key: str, large: bool = False) -> Response:
        at = _find(session, key)
        data = session.gallery.large(at) if large else session.gallery.small(at)
        return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    @router.post("/labels")
    def decide(entries: Entries) -> Response:
        wanted = [Change(_find(session, one.key), one.state, one.label, one.row) for one in entries]
        done = session.decide(wanted)
        names = session.photos.keys
        rows = [{"key": names[at], "before": old._asdict(), "now": new._asdict()} for at, old, new in done]
        return json_response({"changed": rows, "refused": len(wanted) - len(done), "version": session.version})

    @router.post("/images")
    async def add_image(request: Request, label: str) -> Response:
        data = await request.body()
        at = await run_in_threadpool(session.add, data, read_label(label, session.kind))
        return json_response({"key": session.photos.keys[at], "path": printable(session.photos.paths[at])})

    @router.post("/train")
    def train() -> Response:
        learned = session.training()
        if LabelledImages.of(learned.items(), session.kind, session.classes) is None:
            raise TeachError("label images of at least two classes first.")
        finishing.start(len(learned), session.accuracy())
        return json_response(finite(finishing.to_json()), 202)

    @router.delete("/train")
    def stop() -> Response:
        finishing.stop()
        return json_response(finite(finishing.to_json()))

    @router.get("/table")
    def table() -> Response:
        return Response(write_table(session), media_type="text/csv", headers=ATTACHED)

    @router.get("/report")
    def report() -> Response:
        file = finishing.report
        if file is None:
            raise ServeError("there is no report: train the task first.", 404)
        return Response(file.read_bytes(), media_type="text/html", headers=ATTACHED)

    app.include_router(router)


def describe(session: Session) -> dict[str, Any]:
    """What the page shows beside the images and the training."""
    now, decisions = session.learner.now, list(session.decided().values())
    labels = [one.label for one in decisions if one.learned]
    images = Counter(name for label in labels for name in (label if isinstance(label, tuple) else [label]))
    known = {} if now.learned is None else now.learned.by_class()
    none = {"judged": 0, "right": 0, "confused": None}
    rows = [{"label": name, "images": images[name], **known.get(name, none)} for name in session.classes]
    return {
        "name": session.name,
        "kind": session.kind,
        "table": str(session.table.path),
        "version": session.version,
        "solved": now.version,
        "classes": rows,
        "images": len(session.photos),
        "ready": int(session.gallery.ready.sum()),
        "unreadable": len(session.gallery.unreadable),
        "labelled": len(labels),
        "none": sum(one.state == "none" for one in decisions),
        "skip": sum(one.state == "skip" for one in decisions),
        "sure": len(session.sure()),
        "suspects": len(session.suspects()),
        "figure": session.accuracy(),
        "curve": sorted((count, point) for count, point in dict(session.learner.curve).items() if point),
        "advice": None if session.kind == "regression" else advise(rows),
        "overlaps": [] if now.learned is None else overlaps(now.learned)[:5],
        "ways": WAYS,
        "can_add": session.photos.can_add,
        "failure": session.failure,
    }


def describe_image(session: Session, at: int, reason: str = "") -> dict[str, Any]:
    """What the page shows of an image."""
    guess, share = session.learner.now.guess(at, session.kind) or (None, None)
    return {
        "key": session.photos.keys[at],
        "path": printable(session.photos.paths[at]),
        **session.decision(at)._asdict(),
        "reason": reason,
        "error": session.gallery.unreadable.get(at),
        "guess": guess,
        "share": share,
    }


def write_table(session: Session) -> str:
    """The labels so far as a table with a row for each image, as `memoro train` reads it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", COLUMN[session.kind]])
    for at, decision in session.training().items():
        writer.writerow(map(no_formula, (session.photos.paths[at], label_text(decision.label))))
    return text.getvalue()


def _choose(session: Session, view: View, by: str, limit: int) -> dict[int, str]:
    """The images of a view, and reasons to look at some of them."""
    if view == "next":
        reasons = {one.image: one.reason for one in session.suggest(limit, by)}
        # Pictures come at once, statistics follow.
        return reasons | dict.fromkeys(session.unread(limit - len(reasons)), "")
    if view == "suspects":
        return {session.photos.by_path[one.path]: _doubt(one) for one in session.suspects()}
    views: dict[View, Callable[[], Iterable[int]]] = {
        "all": lambda: range(len(session.photos)),
        "unlabelled": lambda: (at for at in range(len(session.photos)) if session.decision(at).state == "clear"),
        "labelled": lambda: reversed(session.decided()),  # the last ones first
        "sure": session.sure,
        "unreadable": lambda: sorted(session.gallery.unreadable),
    }
    return dict.fromkeys(views[view](), "")


def _doubt(suspect: Suspect) -> str:
    short = suspect.reason == CONTRADICTED and suspect.probability is not None
    return f"answered {suspect.answer}: {f'its label has {suspect.probability:.0%}' if short else suspect.reason}"


def _find(session: Session, key: str) -> int:
    at = session.photos.by_key.get(key)
    if at is None:
        raise ServeError("there is no such image.", 404)
    return at
