"""The routes of /v1/teach: pictures, decisions, guesses and training."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from memoro.console import printable, to_json
from memoro.errors import ServeError, TeachError
from memoro.evaluation.predictions import no_formula
from memoro.teach.finishing import Finishing
from memoro.teach.labels import COLUMN, NOTHING, Decision, State, label_text, read_label
from memoro.teach.learning import Lesson, advise
from memoro.teach.session import Change, Session
from memoro.teach.suggestions import SURE, WAYS
from memoro.teach.suspects import CONTRADICTED, Suspect, overlaps

MOST_SHOWN = 100
"""Images of a page of the grid."""
MOST_CHANGES = 1000
"""Decisions of one request."""
ATTACHED = {"content-disposition": "attachment"}
"""Never shown by a browser as a page of this server."""
View = Literal["next", "all", "unlabelled", "labelled", "sure", "suspects", "unreadable"]
Asked = Annotated[list[str] | None, Query(alias="keys")]
Label = str | float | list[str] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Entry(_Strict):
    """A decision about an image, by its key."""

    key: str
    state: State
    label: Label = None
    row: int | None = None
    """The row that it replaces: where another one was written meanwhile, nothing changes."""


class Entries(_Strict):
    entries: list[Entry] = Field(min_length=1, max_length=MOST_CHANGES)


def add_teaching(app: FastAPI, session: Session, finishing: Finishing, commands: Sequence[str]) -> None:
    """Adds the routes. Those that wait for the disk or compute run in threads."""
    router = APIRouter(prefix="/v1/teach", include_in_schema=False)

    @router.get("")
    def state() -> Response:
        return _json(describe(session, finishing, commands))

    @router.get("/images")
    def images(
        view: View = "all",
        by: str = "auto",
        label: str | None = None,
        offset: int = 0,
        limit: int = 60,
        asked: Asked = None,
    ) -> Response:
        session.raise_failure()
        limit, offset = min(max(limit, 1), MOST_SHOWN), max(offset, 0)
        reasons: dict[int, str] = {}
        if asked:
            chosen = [_find(session, key) for key in asked[:MOST_SHOWN]]
        elif view == "next":
            reasons = {one.image: one.reason for one in session.suggest(limit, by)}
            chosen = [*reasons, *session.unread(limit - len(reasons))]  # pictures come at once, statistics follow
        else:
            chosen, reasons = _choose(session, view, label)
        page = chosen[offset : offset + limit]
        session.gallery.want(page)
        rows = [describe_image(session, at, reasons.get(at, "")) for at in page]
        return _json({"total": len(chosen), "offset": offset, "version": session.version, "images": rows})

    @router.get("/images/{key}")
    def picture(key: str, large: bool = False) -> Response:
        at = _find(session, key)
        data = session.gallery.large(at) if large else session.gallery.small(at)
        return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    @router.post("/labels")
    def decide(changes: Entries) -> Response:
        wanted = [Change(_find(session, one.key), one.state, one.label, one.row) for one in changes.entries]
        done = session.decide(wanted)
        rows = [
            {"key": session.photos.keys[at], "before": _decided(old), "now": _decided(new)} for at, old, new in done
        ]
        return _json({"changed": rows, "refused": len(wanted) - len(done), "version": session.version})

    @router.post("/images")
    async def add_image(request: Request, label: str) -> Response:
        data = await request.body()
        at = await app.state.service.in_pool(partial(session.add, data, read_label(label, session.kind)))
        return _json(
            {"key": session.photos.keys[at], "path": printable(session.photos.paths[at]), "version": session.version}
        )

    @router.post("/train")
    def train() -> Response:
        learned = session.training()
        if Lesson.of(learned, session.kind, session.classes) is None:
            raise TeachError("label images of at least two classes first.")
        finishing.start(len(learned), session.accuracy())
        return _json(finishing.to_json(), 202)

    @router.delete("/train")
    def stop() -> Response:
        finishing.stop()
        return _json(finishing.to_json())

    @router.get("/table")
    def table() -> Response:
        return Response(write_table(session), media_type="text/csv", headers=ATTACHED)

    @router.get("/report")
    def report() -> Response:
        if not finishing.to_json()["report"]:
            raise ServeError("there is no report: train the task first.", 404)
        return Response(finishing.report.read_bytes(), media_type="text/html", headers=ATTACHED)

    app.include_router(router)


def describe(session: Session, finishing: Finishing, commands: Sequence[str]) -> dict[str, Any]:
    """All that the page shows beside the images."""
    now, decisions = session.learner.now, list(session.decided().values())
    counts = {name: sum(one.state == name for one in decisions) for name in ("none", "skip", "accept")}
    labels = [one.label for one in decisions if one.learned]
    images = Counter(name for label in labels for name in (label if isinstance(label, tuple) else [label]))
    known = {} if now.learned is None else {row["label"]: row for row in now.learned.by_class()}
    none = {"judged": 0, "right": 0, "confused": None}
    rows = [{**none, **known.get(name, {}), "label": name, "images": images[name]} for name in session.classes]
    return {
        "name": session.name,
        "photos": session.photos.name,
        "kind": session.kind,
        "table": str(session.table.path),
        "version": session.version,
        "solved": now.version,
        "classes": rows,
        "images": len(session.photos),
        "ready": int(session.gallery.ready.sum()),
        "unreadable": len(session.gallery.unreadable),
        "labelled": len(labels),
        **counts,
        "missing": session.missing,
        "sure": len(session.sure()),
        "suspects": len(session.suspects()),
        "threshold": SURE,
        "figure": session.accuracy(),
        "curve": sorted((count, point) for count, point in dict(session.learner.curve).items() if point),
        "advice": None if session.kind == "regression" else advise(rows),
        "overlaps": [] if now.learned is None else overlaps(now.learned)[:5],
        "ways": WAYS,
        "backbone": session.backbone.name,
        "can_add": session.photos.folder is not None,
        "training": finishing.to_json(),
        "commands": commands,
        "failure": session.failure,
    }


def describe_image(session: Session, at: int, reason: str = "") -> dict[str, Any]:
    """What the page shows of an image."""
    found: dict[str, Any] = {
        "key": session.photos.keys[at],
        "path": printable(session.photos.paths[at]),
        **_decided(session.decisions.get(at, NOTHING)),
        "reason": reason,
        "error": session.gallery.unreadable.get(at),
    }
    guess = session.learner.now.guess(at, session.kind)
    return {**found, "guess": None if guess is None else guess[0], "share": None if guess is None else guess[1]}


def write_table(session: Session) -> str:
    """The labels so far as a table with a row for each image, as `memoro train` reads it."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", COLUMN[session.kind]])
    for at, decision in session.training().items():
        assert decision.label is not None
        writer.writerow(map(no_formula, (session.photos.paths[at], label_text(decision.label))))
    return text.getvalue()


def _choose(session: Session, view: View, label: str | None) -> tuple[list[int], dict[int, str]]:
    """The images of a view, and reasons to look at some of them."""
    if view == "sure":
        return session.sure(), {}
    if view == "suspects":
        suspects = session.suspects()
        places = [session.photos.by_path[one.path] for one in suspects]
        return places, {at: _doubt(one) for at, one in zip(places, suspects, strict=True)}
    if view == "unreadable":
        return sorted(session.gallery.unreadable), {}
    decisions = dict(session.decisions)
    tests: dict[str, Callable[[Decision], bool]] = {
        "all": lambda one: label is None or one.label == label,
        "unlabelled": lambda one: one.state == "clear",
        "labelled": lambda one: one.state != "clear" and (label is None or one.label == label),
    }
    if view == "labelled":  # the last ones first
        return [at for at in reversed(decisions) if tests[view](decisions[at])], {}
    return [at for at in range(len(session.photos)) if tests[view](decisions.get(at, NOTHING))], {}


def _doubt(suspect: Suspect) -> str:
    short = suspect.reason == CONTRADICTED and suspect.probability is not None
    return f"answered {suspect.answer}: {f'its label has {suspect.probability:.0%}' if short else suspect.reason}"


def _decided(decision: Decision) -> dict[str, Any]:
    return decision._asdict()


def _find(session: Session, key: str) -> int:
    at = session.photos.by_key.get(key)
    if at is None:
        raise ServeError("there is no such image.", 404)
    return at


def _json(document: Any, status: int = 200) -> Response:
    return Response(to_json(document), status, media_type="application/json")
