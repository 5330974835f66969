"""The shapes of answers, for the API's documentation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Error(BaseModel):
    error: str


class Health(BaseModel):
    status: str
    tasks: int


class Attention(BaseModel):
    """Where a task looked. Shares are by layer, averaged over heads; together they sum to one."""

    layers: list[int]
    heatmap: list[list[float]] | None
    """Rows and columns of patches; None for a task that is a head on the backbone's final token."""
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
    values: dict[str, float] | None = None
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
    seconds: dict[str, float]


class TaskInfo(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    kind: str
    labels: list[str]
    parents: list[str]
    content: str
    training: dict[str, Any]
    metrics: dict[str, Any]


class TaskList(BaseModel):
    backbone: dict[str, str]
    writable: bool
    token_needed: bool
    tasks: list[TaskInfo]


class Attached(Version):
    changed: bool


class Attaching(BaseModel):
    tasks: dict[str, Attached]
