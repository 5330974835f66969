"""The shapes of requests and answers, for the API's documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from memoro.answer import Answer
from memoro.engine.answers import Unfamiliar
from memoro.tasks.familiarity import FALSE_ALARMS

BINARY = {"type": "string", "format": "binary"}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _body(**content: dict[str, Any]) -> dict[str, Any]:
    """What FastAPI takes as `openapi_extra` for a body of one of these types."""
    types = {kind.replace("__", "/").replace("_", "-"): {"schema": schema} for kind, schema in content.items()}
    return {"requestBody": {"required": True, "content": types}}


FILE = _body(application__octet_stream=BINARY)
IMAGES = _body(
    multipart__form_data=_object("images", images=_list(BINARY, minItems=1)),
    application__json=_object("images", images=_list({"type": "string", "format": "byte"}, minItems=1)),
    application__octet_stream=BINARY,
    **{"image/*": BINARY},
)
INFER = _body(
    application__json=_object(
        "inputs",
        id={"type": "string"},
        inputs=_list(
            _object(
                *("name", "shape", "datatype", "data"),
                name={"enum": ["pixel_values", "image"]},
                shape=_list({"type": "integer", "minimum": 1}),
                datatype={"enum": ["FP32", "BYTES"]},
                data={"type": "array"},
            ),
            minItems=1,
            maxItems=1,
        ),
        outputs=_list({"type": "object", "required": ["name"]}),
    ),
    application__octet_stream=BINARY,
)


class PredictQuery(BaseModel):
    """The query parameters of /v1/predict and /v1/explain. Others are refused: a misspelled one would be ignored."""

    model_config = ConfigDict(extra="forbid")
    tasks: list[str] | None = Field(
        None, description="The tasks to ask: repeat it, or separate names by commas. All without it."
    )
    top_k: int = Field(
        5, ge=1, le=100_000, description="Number of labels to answer with their probabilities, best first."
    )
    base: bool = Field(False, description="Also give the backbone's own answer.")
    unfamiliar: Unfamiliar = Field(
        "mark", description="Answers about images unlike a task's own: mark, drop or keep them."
    )
    false_alarms: float = Field(
        FALSE_ALARMS, ge=0, le=1, description="Share of a task's own images that may be called unfamiliar."
    )


class Error(BaseModel):
    error: str


class Health(BaseModel):
    status: str
    tasks: int


class ImageAnswers(BaseModel):
    """`answers` by task, or `error` for an image that cannot be read."""

    name: str
    answers: dict[str, Answer] | None = None
    base: list[float] | None = None
    error: str | None = None


class Version(BaseModel):
    version: str


class Predictions(BaseModel):
    images: list[ImageAnswers]
    tasks: dict[str, Version]
    passes: int
    """Passes of the backbone: one for each preprocessing, and more if the images do not fit into one batch."""
    seconds: dict[str, float]


class TaskInfo(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    kind: str
    labels: list[str]
    parents: list[str]
    content: str
    bytes: int
    """The size of its file."""
    training: dict[str, Any]
    metrics: dict[str, Any]


class Skipped(BaseModel):
    file: str
    reason: str


class TaskList(BaseModel):
    backbone: dict[str, Any]
    teaching: bool
    """Whether this is `memoro teach`, whose page labels images."""
    writable: bool
    reason: str | None
    """Why attaching is off."""
    token_needed: bool
    max_body: int
    """Bytes of the largest file that can be attached."""
    tasks: list[TaskInfo]
    skipped: list[Skipped]
    """Files of the server's folder that are not served, and why."""


class Attached(Version):
    changed: bool


class Attaching(BaseModel):
    tasks: dict[str, Attached]
