"""The Open Inference Protocol v2 under /v2: a model is a task, or `all`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path, Request, Response
from torch import Tensor

from memoro import __version__
from memoro.engine.answers import Outputs
from memoro.errors import ServeError
from memoro.serve.batching import Question
from memoro.serve.bodies import (
    InferRequest,
    Output,
    compress,
    decompress,
    read_files,
    read_pixels,
    read_request,
    write_outputs,
)
from memoro.serve.guard import unless_gone
from memoro.serve.options import MAX_INPUT_SIDE, ServeOptions
from memoro.serve.schemas import INFER
from memoro.serve.service import Service, Upload, json_response, write_json
from memoro.serve.store import ALL, Attached

LENGTH = "inference-header-content-length"
ModelName = Annotated[str, Path(description="A task, or `all` for all tasks.")]


def add_open_inference(app: FastAPI, service: Service) -> None:
    """Adds the routes; those of a model with and without a version in the path."""

    def find(model: str, version: str | None) -> Attached:
        attached = service.store.current
        if model != ALL and model not in attached.info:
            raise ServeError(f"there is no model {model!r}; GET /v1/tasks lists the tasks.", 404)
        if version is not None and version != attached.version(model):
            raise ServeError(f"model {model!r} has version {attached.version(model)!r}, not {version!r}.", 404)
        return attached

    @app.get("/v2", summary="Server metadata")
    async def server() -> Response:
        extensions = ["binary_tensor_data", "classification", "model_configuration", "model_repository"]
        return json_response({"name": "memoro", "version": __version__, "extensions": extensions})

    @app.get("/v2/health/live", summary="Whether the server runs")
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/v2/health/ready", summary="Whether the server answers")
    async def ready() -> Response:
        return json_response({"ready": True})

    @app.post("/v2/repository/index", summary="All models")
    async def index() -> Response:
        attached = service.store.current
        names = [ALL, *attached.info]
        return json_response([{"name": name, "version": attached.version(name), "state": "READY"} for name in names])

    @app.get("/v2/models/{model}/ready", summary="Whether a model is there")
    @app.get("/v2/models/{model}/versions/{version}/ready", summary="Whether a version of a model is there")
    async def ready_model(model: ModelName, version: str | None = None) -> Response:
        find(model, version)
        return json_response({"name": model, "ready": True})

    @app.get("/v2/models/{model}", summary="Inputs and outputs of a model")
    @app.get("/v2/models/{model}/versions/{version}", summary="Inputs and outputs of a version")
    async def metadata(model: ModelName, version: str | None = None) -> Response:
        return json_response(describe_model(find(model, version), model))

    @app.get("/v2/models/{model}/config", summary="Configuration of a model")
    @app.get("/v2/models/{model}/versions/{version}/config", summary="Configuration of a version")
    async def config(model: ModelName, version: str | None = None) -> Response:
        return json_response(configure_model(find(model, version), model, service.options.max_images))

    @app.post("/v2/models/{model}/infer", summary="Ask a model", openapi_extra=INFER)
    @app.post("/v2/models/{model}/versions/{version}/infer", summary="Ask a version of a model", openapi_extra=INFER)
    async def infer(request: Request, model: ModelName, version: str | None = None) -> Response:
        """Inputs: `pixel_values` (FP32, preprocessed by the client) or `image` (BYTES, encoded files; base64 in JSON).
        Outputs: logits under the task's name, `NAME.probabilities`, `NAME.label`; `base` on request."""
        service.batcher.check_room()
        return await infer_model(service, find(model, version), request, model)


def list_outputs(attached: Attached, model: str) -> dict[str, tuple[str, str]]:
    """By the name of an output: the task, and what it is of it (logits, probabilities, label)."""
    tasks = list(attached.info) if model == ALL else [model]
    outputs = {name: (name, "logits") for name in tasks}
    for name in tasks:
        if not attached.model.tasks[name].head_kind.has_numbers:
            outputs.setdefault(f"{name}.probabilities", (name, "probabilities"))
            outputs.setdefault(f"{name}.label", (name, "label"))
    return outputs


def describe_model(attached: Attached, model: str) -> dict[str, Any]:
    """A model's metadata. Sizes that depend on the request are -1."""
    composition = attached.model
    sizes = {steps.size for steps in composition.passes(None if model == ALL else [model])} or {None}
    height, width = next(iter(sizes)) or (-1, -1) if len(sizes) == 1 else (-1, -1)
    outputs = [
        {"name": name, "datatype": "BYTES", "shape": [-1]}
        if what == "label"
        else {"name": name, "datatype": "FP32", "shape": [-1, len(composition.tasks[task].labels)]}
        for name, (task, what) in list_outputs(attached, model).items()
    ]
    return {
        "name": model,
        "versions": [attached.version(model)],
        "platform": "memoro",
        "inputs": [
            {"name": "pixel_values", "datatype": "FP32", "shape": [-1, composition.backbone.channels, height, width]},
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": outputs,
    }


def configure_model(attached: Attached, model: str, max_images: int) -> dict[str, Any]:
    """The same as the configuration that Triton's clients read. Of the two inputs, a request gives one."""
    described, types = describe_model(attached, model), {"FP32": "TYPE_FP32", "BYTES": "TYPE_STRING"}

    def entries(kind: str, **more: Any) -> list[dict[str, Any]]:
        return [
            {"name": one["name"], "data_type": types[one["datatype"]], "dims": one["shape"][1:] or [1], **more}
            for one in described[kind]
        ]

    return {
        "name": model,
        "platform": "memoro",
        "backend": "memoro",
        "max_batch_size": max_images,
        "input": entries("inputs", optional=True),
        "output": entries("outputs"),
    }


async def infer_model(service: Service, attached: Attached, request: Request, model: str) -> Response:
    """Reads a request, runs it and writes the outputs as the client wants them."""
    known = list_outputs(attached, model)
    asked, images = await service.read(
        _read, await request.body(), request.headers, attached.model.backbone.channels, service.options
    )
    wanted = _read_outputs(asked, known, model)
    used = {known[name][0] for name in wanted if name in known}
    tasks = [name for name in attached.model.names if name in used]
    question = Question(attached, tasks, base="base" in wanted)
    logits = await unless_gone(request, service.logits(question, images))

    def write() -> tuple[bytes, dict[str, str]]:
        head = {"model_name": model, "model_version": attached.version(model)}
        head |= {} if asked.id is None else {"id": asked.id}
        outputs = [
            (name, _output(attached, logits, known.get(name, ("base", "logits")), classes), binary)
            for name, (binary, classes) in wanted.items()
        ]
        document, tail = write_outputs(head, outputs)
        text = write_json(document)
        body, used = compress(b"".join([text, *tail]), request.headers.get("accept-encoding", ""))
        headers = {"content-type": "application/octet-stream", LENGTH: str(len(text))} if tail else {}
        return body, {**headers, **({"content-encoding": used} if used else {})}

    content, headers = await service.in_pool(write)
    return Response(content, headers={"content-type": "application/json", **headers})


def _read(
    body: bytes, headers: Mapping[str, str], channels: int, options: ServeOptions
) -> tuple[InferRequest, Tensor | list[Upload]]:
    """What a body asks, and its images; nothing else of it is kept."""
    encoding = headers.get("content-encoding", "").strip().lower()
    asked = read_request(decompress(body, encoding, options.max_body), headers.get(LENGTH))
    entry = asked.inputs.pop()
    if entry.name == "pixel_values":
        return asked, read_pixels(entry, channels, options.max_images, MAX_INPUT_SIDE)
    files = read_files(entry, options.max_images)
    return asked, [(f"image {number}", data) for number, data in enumerate(files, start=1)]


def _read_outputs(asked: InferRequest, known: Collection[str], model: str) -> dict[str, tuple[bool, int]]:
    """For each output that is asked for whether it is to be binary, and how many classes of it."""
    default, wanted = asked.parameters.binary_data_output, dict[str, tuple[bool, int]]()
    for output in asked.outputs:
        name, binary = output.name, output.parameters.binary_data
        if name not in known and name != "base":
            raise ServeError(f"model {model!r} has no output {name[:200]!r}.", 400)
        if name in wanted:
            raise ServeError(f"output {name!r} is asked for twice.", 400)
        wanted[name] = (default if binary is None else binary, output.parameters.classification)
    return wanted or dict.fromkeys(known, (default, 0))


def _output(attached: Attached, logits: dict[str, Tensor], source: tuple[str, str], classes: int) -> Output:
    name, what = source
    values = logits[name]
    if not values.isfinite().all():
        raise ServeError(f"the answer of {name!r} is not a finite number.", 422)
    if name == "base":
        return values
    task = attached.model.tasks[name]
    if what == "label":
        answers = Outputs(logits, {}).answers(task, top=1)
        # Several labels are a JSON list: a label may contain any separator.
        return [json.dumps(answer.labels) if answer.label is None else answer.label for answer in answers]
    if what == "probabilities":
        values = task.probabilities(values)
    if classes == 0:
        return values
    best, order = values.topk(min(classes, len(task.labels)), dim=-1)
    return [
        [f"{value:f}:{i}:{task.labels[i]}" for value, i in zip(row, places, strict=True)]
        for row, places in zip(best.tolist(), order.tolist(), strict=True)
    ]
