"""What a task answers for one image: the fields of predictions, tables, files, overlays and the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, TypedDict, cast


@dataclass(frozen=True)
class Attention:
    """Where a task looked in one image. Shares are by layer, averaged over heads; together they sum to one."""

    layers: list[int]
    source: str
    """Whose map it is: the task's own token, the read-out, or, for a linear head, the base's token that it reads."""
    note: str | None
    """What a reader has to know about the map, if anything."""
    heatmap: list[list[float]]
    """Rows and columns of patches."""
    patches: list[float]
    prefix: list[float]
    itself: list[float]
    memory: list[float]
    parents: dict[str, list[float]]


class AnswerDict(TypedDict, total=False):
    """An answer as a dictionary: of the fields of `Answer` those that it has."""

    label: str
    probability: float
    labels: list[str]
    probabilities: dict[str, float]
    thresholds: dict[str, float]
    values: dict[str, float]
    intervals: dict[str, list[float]]
    score: float
    familiarity: float
    coarse: bool
    unfamiliar: bool
    attention: Any


@dataclass(frozen=True)
class Answer:
    """`label` and `probability` of one class, or several `labels`, or `values`.

    Fields that an answer does not have are None. It can be read like a dictionary of the others.
    """

    label: str | None = None
    probability: float | None = None
    labels: list[str] | None = None
    probabilities: dict[str, float] | None = None
    """Best first: those of all labels, or of as many as were asked for."""
    thresholds: dict[str, float] | None = None
    """For a calibrated multi-label task: a label is predicted if its probability is at least this."""
    values: dict[str, float] | None = None
    intervals: dict[str, list[float]] | None = None
    """For a calibrated regression: from and to, for 90 % of new images."""
    score: float | None = None
    """Comparable between tasks: the image most likely belongs to the task with the highest score."""
    familiarity: float | None = None
    """The share of the task's own images that look at least as strange."""
    coarse: bool | None = None
    """True if the task has too few or too diverse images to tell what is unfamiliar."""
    unfamiliar: bool | None = None
    attention: Attention | None = None

    def keys(self) -> list[str]:
        return [name for name in NAMES if getattr(self, name) is not None]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self).get(name, default)

    def to_json(self) -> AnswerDict:
        """The fields that it has, as JSON values."""
        attention = {} if self.attention is None else {"attention": vars(self.attention)}
        return cast(AnswerDict, {**self, **attention})

    def rows(self, top: int | None = None) -> Iterator[dict[str, Any]]:
        """Its rows in a table, see `COLUMNS`: one for each number or label.

        Of several classes the best or the `top` ones, of several labels all or the `top` ones.
        """
        known = {"score": self.score, "familiarity": self.familiarity, "unfamiliar": self.unfamiliar}
        for name, value in (self.values or {}).items():
            low, high = (self.intervals or {}).get(name, (None, None))
            yield {"label": name, "value": value, "low": low, "high": high, **known}
        predicted, most = (self.labels or [], top) if self.label is None else ([self.label], top or 1)
        for label, probability in islice((self.probabilities or {}).items(), most):
            yield {"label": label, "probability": probability, "predicted": label in predicted, **known}

    def lines(self, top: int | None = None) -> list[str]:
        """A few words for the eye, in lines of a table's cell."""
        mark = ["unfamiliar"] if self.unfamiliar else []
        if self.values is not None:
            ends = {name: f" ({low:.4g} to {high:.4g})" for name, (low, high) in (self.intervals or {}).items()}
            return [*mark, *(f"{name} {value:.4g}{ends.get(name, '')}" for name, value in self.values.items())]
        ranked = {label: f"{label} {share:.2f}" for label, share in (self.probabilities or {}).items()}
        if top is not None:
            return [*mark, *ranked.values()]
        best = next(iter(ranked.values()))
        if self.labels is not None:
            limits = {label: f" (at least {limit:.2f})" for label, limit in (self.thresholds or {}).items()}
            chosen = [ranked[label] + limits.get(label, "") for label in self.labels]
            if chosen:
                return [*mark, *chosen]
            best = f"none, best {best}"
        return [f"unfamiliar ({best})" if mark else best]

    def __str__(self) -> str:
        """The answer in one line, without intervals and thresholds."""
        if self.values is not None:
            text = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        else:
            shares = self.probabilities or {}
            chosen = [self.label] if self.label is not None else self.labels or []
            text = ", ".join(f"{label} {shares[label]:.2f}" for label in chosen) or "no label"
        return f"unfamiliar ({text})" if self.unfamiliar else text


NAMES = tuple(field.name for field in fields(Answer))

COLUMNS: Mapping[str, type] = {
    "image": str, "task": str, "label": str, "probability": float, "value": float, "low": float, "high": float,
    "predicted": bool, "score": float, "familiarity": float, "unfamiliar": bool, "error": str,
}  # fmt: skip
"""The columns of CSV and Parquet, and their types."""
