"""The shapes of answers, for the API's documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from memoro.engine.answers import Unfamiliar
from memoro.tasks.familiarity import FALSE_ALARMS


class PredictQuery(BaseModel):
    """The query parameters of /v1/predict and /v1/explain. Others are refused: a misspelled one would be ignored."""

    model_config = ConfigDict(extra="forbid")
    tasks: list[str] | None = Field(
        None, description="The tasks to ask: repeat it, or separate names by commas. All without it."
    )
    top_k: int = Field(5, ge=1, le=100_000, description="Probabilities of how many labels, best first.")
    base: bool = Field(False, description="Also what the backbone itself answers.")
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


class Attention(BaseModel):
    """Where a task looked. Shares are by layer, averaged over heads; together they sum to one."""

    layers: list[int]
    source: str
    """Whose map it is: the task's own token, the read-out, or, for a linear head, the base's token that it reads."""
    note: str | None = None
    """What a reader has to know about the map, if anything."""
    heatmap: list[list[float]]
    """Rows and columns of patches."""
    patches: list[float]
    prefix: list[float]
    itself: list[float]
    memory: list[float]
    parents: dict[str, list[float]]


class Answer(BaseModel):
    """`label` and `probability` of one label, or `labels` of several, or `values`."""

    model_config = ConfigDict(extra="allow")
    label: str | None = None
    probability: float | None = None
    labels: list[str] | None = None
    probabilities: dict[str, float] | None = None
    thresholds: dict[str, float] | None = None
    """Of a calibrated multi-label task: a label is predicted if its probability is at least this."""
    values: dict[str, float] | None = None
    intervals: dict[str, list[float]] | None = None
    """Of a calibrated regression: from and to, for 90 % of new images."""
    score: float | None = None
    """Comparable between tasks: the highest is that of the task that the image most likely belongs to."""
    familiarity: float | None = None
    """The share of the task's own images that look at least as strange."""
    unfamiliar: bool | None = None
    coarse: bool | None = None
    """True if the task has too few or too diverse images to tell what is unfamiliar."""
    attention: Attention | None = None


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
    """Of the backbone: one for each preprocessing, and more where images do not fit one batch."""
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
