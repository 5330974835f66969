"""Counters and histograms for Prometheus."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All that `/metrics` shows, in a registry of this server's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry}
        self.requests = Counter("memoro_requests", "Requests answered.", ["endpoint", "status"], **own)
        self.errors = Counter("memoro_errors", "Requests answered with a status of 400 or more.", ["status"], **own)
        self.request_seconds = Histogram(
            "memoro_request_seconds", "Time from first byte to answer.", ["endpoint"], buckets=SECONDS, **own
        )
        self.queue = Gauge("memoro_queue_images", "Images that are being decoded or waiting.", **own)
        self.batch_size = Histogram("memoro_batch_size", "Images in a pass.", buckets=IMAGES, **own)
        self.passes = Counter("memoro_backbone_passes", "Passes of the backbone.", **own)
        self.stage_seconds = Histogram(
            "memoro_stage_seconds",
            "Time by stage: decode and queue (of an image), backbone and tasks (of a pass).",
            ["stage"],
            buckets=SECONDS,
            **own,
        )
        self.task_answers = Counter("memoro_task_answers", "Images that a task answered.", ["task"], **own)
        self.tasks = Gauge("memoro_tasks", "Tasks attached.", **own)

    def render(self, attached: Collection[str]) -> bytes:
        """The text format of Prometheus, with counts of the attached tasks only."""
        self.tasks.set(len(attached))
        # A pass that was running during a detach may count for the task afterwards.
        for name in {row.labels["task"] for found in self.task_answers.collect() for row in found.samples}:
            if name not in attached:
                self.task_answers.remove(name)
        return generate_latest(self.registry)
