"""The routes: memoro's own API under /v1, the page at /, health, metrics, documentation."""

from __future__ import annotations

import errno
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from PIL import Image, ImageFont
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from memoro import __version__
from memoro.engine.answers import Routing
from memoro.errors import MemoroError, ServeError
from memoro.pages.drawing import draw_apple, draw_digit, draw_landscape, draw_letter
from memoro.pages.elements import page_policy, read_style, render_page, table, tag
from memoro.serve import schemas
from memoro.serve.batching import Question
from memoro.serve.bodies import first_problem, read_images
from memoro.serve.guard import BODIES, INTERNAL, Guard, Metrics, Sending, error_response, unless_gone
from memoro.serve.open_inference import add_open_inference
from memoro.serve.options import BUSY, NO_TOKEN, ServeOptions
from memoro.serve.service import Service, choose_tasks, json_response
from memoro.serve.store import OFF, Attached, TaskStore
from memoro.tasks.taskfile import task_bytes

DESCRIPTION = """Answers of many tasks to images, from one pass of one backbone. Errors are `{"error": "what happened"}`
on every route. The header `x-request-timeout-ms` sets a deadline for a request."""
Asked = Annotated[schemas.PredictQuery, Query()]
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Error, "description": meaning}
    for status, meaning in {
        400: "The body cannot be read.", 401: "The token is missing or wrong.", 403: "Not allowed here.",
        404: "There is no such task.", 409: "Other tasks extend it.", 413: "Too large.", 422: "Cannot be used.",
        503: "Busy; see Retry-After.", 504: "The deadline has passed.", 507: "The disk is full.",
    }.items()
}  # fmt: skip


def create_app(store: TaskStore, options: ServeOptions, extend: Callable[[FastAPI], None] | None = None) -> ASGIApp:
    """The server as an ASGI app; `extend` adds the routes of `memoro teach`."""
    metrics = Metrics()
    service = Service(store, options, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await service.close()

    app = FastAPI(
        title="memoro",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_predictions(app, service)
    _add_tasks(app, service, teaching=extend is not None)
    add_open_inference(app, service)
    _add_page(app)
    if extend is not None:
        extend(app)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=schemas.Health, summary="Whether the server runs")
    async def healthz() -> Response:
        return json_response({"status": "ok", "tasks": len(store.current.info)})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def show_metrics() -> Response:
        return Response(metrics.render(store.current.info), media_type=CONTENT_TYPE_LATEST)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = {"content-security-policy": f"{page_policy()}; frame-ancestors 'none'"}
        return Response(docs_page(app.openapi()), media_type="text/html", headers=headers)

    return Guard(Sending(app, BODIES * options.max_body), options, metrics)


def _add_predictions(app: FastAPI, service: Service) -> None:
    async def predict(request: Request, asked: schemas.PredictQuery, explain: bool) -> Response:
        service.batcher.check_room()
        attached, routing = service.store.current, Routing(asked.unfamiliar, asked.false_alarms)
        tasks = choose_tasks(attached, asked.tasks)
        question = Question(attached, tasks, asked.top_k, asked.base, explain, routing)
        uploads = await read_images(request, service)
        if explain and len(uploads) * len(question.tasks) > service.options.max_images:
            raise ServeError(
                f"{len(question.tasks)} tasks on {len(uploads)} images are too many maps for one request (at most "
                f"{service.options.max_images}): name some with tasks=.",
                413,
            )
        body = await unless_gone(request, service.predict(question, uploads))
        return Response(body, media_type="application/json")

    @app.post(
        "/v1/predict", response_model=schemas.Predictions, openapi_extra=schemas.IMAGES, summary="What tasks answer"
    )
    async def predict_images(request: Request, asked: Asked) -> Response:
        """Send an image as the body, several as multipart/form-data, or JSON with base64."""
        return await predict(request, asked, explain=False)

    @app.post(
        "/v1/explain", response_model=schemas.Predictions, openapi_extra=schemas.IMAGES, summary="Where tasks looked"
    )
    async def explain_images(request: Request, asked: Asked) -> Response:
        """The same as /v1/predict, and `attention` with each answer: a map over the patches and shares by layer."""
        return await predict(request, asked, explain=True)


def _add_tasks(app: FastAPI, service: Service, teaching: bool) -> None:
    store, options = service.store, service.options

    def find(name: str) -> Attached:
        attached = store.current
        if name not in attached.info:
            raise ServeError(f"there is no task {name!r}.", 404)
        return attached

    async def attach(request: Request, name: str | None) -> Response:
        tasks = await service.change(store.attach, await request.body(), name)
        return json_response({"tasks": tasks}, 201 if any(one["changed"] for one in tasks.values()) else 200)

    @app.get("/v1/tasks", response_model=schemas.TaskList, summary="All tasks")
    async def list_tasks() -> Response:
        attached, backbone = store.current, store.current.model.backbone
        reason = OFF if not store.writable else None if options.may_write else NO_TOKEN
        return json_response(
            {
                "backbone": {
                    "name": backbone.name,
                    "fingerprint": backbone.fingerprint.digest,
                    "preprocessing": backbone.preprocessing.to_json(),
                },
                "teaching": teaching,
                "writable": reason is None,
                "reason": reason,
                "token_needed": reason is None and options.write_token is not None,
                "max_body": options.max_body,
                "tasks": list(attached.info.values()),
                "skipped": [{"file": name, "reason": why} for name, why in store.skipped.items()],
            }
        )

    @app.put(
        "/v1/tasks", response_model=schemas.Attaching, openapi_extra=schemas.FILE, summary="Attach the tasks of a file"
    )
    async def attach_tasks(request: Request) -> Response:
        """The body is a task file or a bundle, which is taken apart into its tasks."""
        return await attach(request, None)

    @app.get("/v1/tasks/{name}", response_model=schemas.TaskInfo, summary="One task")
    async def show_task(name: str) -> Response:
        return json_response(find(name).info[name])

    @app.put(
        "/v1/tasks/{name}", response_model=schemas.Attaching, openapi_extra=schemas.FILE, summary="Attach one task"
    )
    async def attach_task(request: Request, name: str) -> Response:
        """The body is the file of a task of this name. A task of the same name is replaced."""
        return await attach(request, name)

    @app.delete("/v1/tasks/{name}", status_code=204, summary="Detach a task")
    async def detach_task(name: str) -> Response:
        await service.change(store.detach, name)
        return Response(status_code=204)

    @app.get("/v1/tasks/{name}/file", summary="A task as a file", response_class=Response)
    async def download_task(name: str) -> Response:
        task = find(name).model.tasks[name]
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}.safetensors"}
        async with service.making_file:
            data = await service.in_pool(task_bytes, task)
        return Response(data, media_type="application/octet-stream", headers=headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(MemoroError)
    async def ours(_: Request, error: MemoroError) -> Response:
        return error_response((error.status if isinstance(error, ServeError) else None) or 422, str(error))

    @app.exception_handler(OSError)
    async def system(_: Request, error: OSError) -> Response:
        if error.errno in {errno.EMFILE, errno.ENFILE}:  # a large form needs files
            return error_response(503, BUSY)
        raise error

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(422, first_problem(error.errors(), 1))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        no_route = error.status_code in {404, 405}
        more = f": there is no {request.method} {request.url.path}. /docs lists all routes." if no_route else ""
        return error_response(error.status_code, f"{error.detail}{more}", error.headers)

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        return error_response(500, INTERNAL)


TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def _letter(text: str, seed: int) -> Image.Image:
    return draw_letter(text, ImageFont.load_default, np.random.default_rng(seed))


SAMPLES: dict[str, Callable[[], Image.Image]] = {
    **{f"letter-{text}": partial(_letter, text, seed) for text, seed in (("a", 1), ("e", 6), ("D", 4), ("M", 5))},
    **{f"digit-{text}": partial(draw_digit, text) for text in "238"},
    "landscape": draw_landscape,
    "apple": draw_apple,
}
"""Images to try without having any: some that the demo's tasks know, some that they do not."""


@cache
def read_files() -> dict[str, bytes]:
    """The files of the page by name; the first of its two stylesheets is the one that reports have inside."""
    page_files = {file.name: file.read_bytes() for file in files("memoro.serve").joinpath("static").iterdir()}
    return {**page_files, "style.css": read_style().encode()}


@cache
def draw_sample(name: str) -> bytes:
    """A sample as PNG."""
    buffer = io.BytesIO()
    SAMPLES[name]().save(buffer, "PNG")
    return buffer.getvalue()


def _add_page(app: FastAPI) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in read_files():
            raise ServeError(f"the page has no file {name!r}.", 404)
        kind = TYPES[name.rpartition(".")[2]]
        return Response(read_files()[name], media_type=kind, headers=HEADERS)

    @app.get("/page/samples/{name}.png", include_in_schema=False)
    async def sample(name: str) -> Response:
        if name not in SAMPLES:
            raise ServeError(f"there is no sample {name!r}.", 404)
        return Response(draw_sample(name), media_type="image/png")


def docs_page(schema: dict[str, Any]) -> str:
    """The page for an OpenAPI schema."""
    info = schema["info"]
    parts = [tag("h1", f"{info['title']} {info['version']}"), tag("p", info["description"])]
    parts.append(tag("p", "For programs: ", tag("a", "openapi.json", href="openapi.json")))
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += [tag("h2", f"{method.upper()} {path}"), tag("p", operation.get("summary", ""))]
            if operation.get("description"):
                parts.append(tag("p", operation["description"]))
            rows = [(one["name"], one["in"], one.get("description", "")) for one in operation.get("parameters", [])]
            rows += [("body", kind, "") for kind in operation.get("requestBody", {}).get("content", {})]
            rows += [(status, "answer", one["description"]) for status, one in operation["responses"].items()]
            parts.append(table([], rows, left=3))
    return render_page("memoro: API", *parts)
