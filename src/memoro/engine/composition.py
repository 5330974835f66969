"""A backbone and a set of tasks: one pass answers them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from memoro.backbones import Backbone
from memoro.engine.answers import read_answers
from memoro.engine.explain import Explanation, explain_task
from memoro.engine.streams import Bank, Plan, build_bank, build_plan, run_streams
from memoro.engine.verify import Receipt, make_receipt
from memoro.errors import CompositionError
from memoro.images import Preprocessing, open_image
from memoro.tasks.lineage import trace_lineage
from memoro.tasks.task import BackboneRecord, Parent, Task

Picture = str | Path | Image.Image


def compose(backbone: Backbone, tasks: Iterable[Task] = (), *, live: bool = False) -> Composition:
    """The tasks on the backbone, checked: right backbone, unique names, all parents present, no circle.

    The composition keeps a snapshot of the tasks, so that nothing done to them later shows in it. With `live=True` it
    reads the tasks' own parameters at every call and gradients flow to them: that is what training uses.
    """
    return Composition(backbone, tuple(tasks), live=live)


class Composition:
    """Immutable: attach and detach give a new one, so threads can share it."""

    def __init__(self, backbone: Backbone, tasks: Sequence[Task], *, live: bool = False) -> None:
        for task in tasks:
            if not isinstance(task, Task):
                # A model of a baseline regime says itself why it stands apart.
                raise CompositionError(
                    getattr(task, "apart", f"{task!r} is no task: load_task() or new_task() gives one.")
                )
            check_backbone(task, backbone)
        self.backbone = backbone
        self.live = live
        self._lineage = trace_lineage(
            [task.name for task in tasks],
            [[parent.name for parent in task.extends] for task in tasks],
            [task.from_layer for task in tasks],
        )
        _check_parents(tasks)
        self.tasks: dict[str, Task] = {task.name: task if live else _snapshot(task) for task in tasks}
        self._list = tuple(self.tasks.values())
        self._index = {name: position for position, name in enumerate(self.tasks)}
        # Memory does not depend on the image: its keys and values are computed here, once.
        self._bank: Bank | None = None
        if not live:
            with torch.no_grad():
                self._bank = build_bank(backbone.anatomy, self._list)
        self._plans: dict[tuple[int, ...], Plan] = {}

    @property
    def names(self) -> list[str]:
        return list(self.tasks)

    def attach(self, task: Task) -> Composition:
        """A new composition with one more task."""
        return Composition(self.backbone, (*self._list, task), live=self.live)

    def detach(self, name: str) -> Composition:
        """A new composition without a task. One that others extend cannot go before them."""
        self._pick([name])
        heirs = [task.name for task in self._list if any(parent.name == name for parent in task.extends)]
        if heirs:
            raise CompositionError(f"{', '.join(map(repr, heirs))} extends {name!r}: detach that first.")
        return Composition(self.backbone, [task for task in self._list if task.name != name], live=self.live)

    def __call__(
        self, pixel_values: Tensor, tasks: Sequence[str] | None = None, *, any_size: bool = False
    ) -> dict[str, Tensor]:
        """`{"base": the backbone's own answer, "pets": logits, …}` for a batch of normalised images.

        `tasks` names the ones to answer; only those and what they extend are computed. Tasks that were trained at
        another input size are refused, unless `any_size`.
        """
        pixels = self.backbone.check_pixels(pixel_values)
        wanted = self._pick(tasks)
        if not any_size:
            self._check_size(wanted, (pixels.shape[-2], pixels.shape[-1]))
        plan = self._plan(wanted)
        bank = build_bank(self.backbone.anatomy, self._list) if self._bank is None else self._bank
        base, stream = run_streams(self.backbone.anatomy, pixels, plan, bank)
        answers = {"base": base}
        row = {task: position for position, task in enumerate(plan.order)}
        for task in wanted:
            assert stream is not None
            head = self._list[task].head
            answers[self._list[task].name] = head(stream[:, row[task]].to(head.weight.dtype))
        return answers

    def predict(
        self, images: Picture | Iterable[Picture], tasks: Sequence[str] | None = None, *, batch_size: int = 32
    ) -> list[dict[str, dict[str, Any]]]:
        """What each task says of each image (PIL images or paths): one dictionary an image, by task name.

        Tasks with the same preprocessing share a pass; `passes` tells which do.
        """
        if isinstance(images, (str, Path, Image.Image)):
            images = [images]
        passes = self.passes(tasks)
        results: list[dict[str, dict[str, Any]]] = []
        batch: list[Image.Image] = []

        def flush() -> None:
            answers: list[dict[str, dict[str, Any]]] = [{} for _ in batch]
            for preprocessing, names in passes.items():
                pixels = torch.stack([preprocessing.to_tensor(image) for image in batch])
                with torch.no_grad():
                    out = self(pixels.to(self.backbone.dtype), names)
                for name in names:
                    task = self.tasks[name]
                    for answer, said in zip(answers, read_answers(task.kind, task.labels, out[name]), strict=True):
                        answer[name] = said
            order = [self._list[i].name for i in self._pick(tasks)]
            results.extend({name: answer[name] for name in order} for answer in answers)
            batch.clear()

        # Big JPEGs are decoded at a fraction of their size, as in training, where every pass allows it.
        edges = [preprocessing.draft for preprocessing in passes]
        draft = max((edge for edge in edges if edge is not None), default=None) if None not in edges else None
        for image in images:
            batch.append(open_image(image, draft=draft))
            if len(batch) == batch_size:
                flush()
        if batch:
            flush()
        return results

    def passes(self, tasks: Sequence[str] | None = None) -> dict[Preprocessing, list[str]]:
        """The tasks by preprocessing: each entry is one pass of the backbone."""
        groups: dict[Preprocessing, list[str]] = {}
        for i in self._pick(tasks):
            task = self._list[i]
            groups.setdefault(task.spec.preprocessing or self.backbone.preprocessing, []).append(task.name)
        return groups

    def explain(self, pixel_values: Tensor, task: str) -> Explanation:
        """Where a task looked at each layer: at patches, at memory, at the tasks that it extends."""
        pixels = self.backbone.check_pixels(pixel_values)
        (index,) = self._pick([task])
        with torch.no_grad():
            bank = build_bank(self.backbone.anatomy, self._list) if self._bank is None else self._bank
            return explain_task(self.backbone.anatomy, pixels, self._plan((index,)), bank, self._list, index)

    def verify(self, pixel_values: Tensor) -> Receipt:
        """Runs the original model and each task alone beside the composition; the receipt says what differs."""
        return make_receipt(self, pixel_values)

    def alone(self, name: str) -> Composition:
        """A composition of one task and what it extends."""
        (index,) = self._pick([name])
        return Composition(self.backbone, [self._list[i] for i in self._lineage.closure([index])], live=self.live)

    def _pick(self, names: Sequence[str] | None) -> tuple[int, ...]:
        if names is None:
            return tuple(range(len(self._list)))
        if isinstance(names, str):
            raise CompositionError(f"tasks takes a list of names: [{names!r}].")
        unknown = [name for name in names if name not in self._index]
        if unknown:
            raise CompositionError(f"no task {unknown[0]!r} here. There are: {', '.join(self.names) or 'none'}.")
        return tuple(dict.fromkeys(self._index[name] for name in names))

    def _plan(self, wanted: tuple[int, ...]) -> Plan:
        plan = self._plans.get(wanted)
        if plan is None:
            plan = build_plan(self._lineage, self._list, wanted, self.backbone.depth, self.backbone.device)
            if len(self._plans) < 256:  # threads may build the same plan twice; either one is right
                self._plans[wanted] = plan
        return plan

    def _check_size(self, wanted: tuple[int, ...], size: tuple[int, int]) -> None:
        for i in wanted:
            preprocessing = self._list[i].spec.preprocessing
            trained = None if preprocessing is None else preprocessing.size
            if trained is not None and trained != size:
                raise CompositionError(
                    f"{self._list[i].name!r} was trained on images of {trained[0]}x{trained[1]}, this tensor is "
                    f"{size[0]}x{size[1]}. Use predict(), which gives each task its own size, or pass any_size=True."
                )

    def __repr__(self) -> str:
        return f"Composition({self.backbone.name}, tasks=[{', '.join(self.names)}])"


def check_backbone(task: Any, backbone: Backbone) -> None:
    """Raises if the task, or baseline, was made for another backbone."""
    check_made_for(task.name, task.spec.backbone, backbone)


def check_made_for(name: str, made: BackboneRecord, backbone: Backbone) -> None:
    """Raises if what has this name and record was made for another backbone."""
    here = backbone.fingerprint
    if (made.dim, made.depth) != (backbone.dim, backbone.depth):
        why = f"{made.depth} layers of {made.dim}; this one has {backbone.depth} of {backbone.dim}"
    elif made.fingerprint.match(here) == "different":
        why = f"fingerprint {made.fingerprint.short}; this one's is {here.short}: other weights"
    else:
        return
    raise CompositionError(
        f"{name!r} was made for {made.name} ({made.family}, {why}). Load that backbone, or train the task anew: "
        f"memoro train DATA --backbone {backbone.name} --task {name}"
    )


def check_together(tasks: Sequence[Task]) -> None:
    """Raises if tasks cannot stand in one file: doubled names, missing or other parents, circles, two backbones."""
    trace_lineage(
        [task.name for task in tasks],
        [[parent.name for parent in task.extends] for task in tasks],
        [task.from_layer for task in tasks],
    )
    _check_parents(tasks)
    for task in tasks[1:]:
        first, other = tasks[0].spec.backbone, task.spec.backbone
        if first.fingerprint.match(other.fingerprint) == "different":
            raise CompositionError(
                f"{task.name!r} was made for {other.name} ({other.fingerprint.short}), {tasks[0].name!r} for "
                f"{first.name} ({first.fingerprint.short}): one pass has one backbone. Retrain one of them."
            )


def _check_parents(tasks: Sequence[Task]) -> None:
    """Raises if a parent is not the one that its child was made over."""
    by_name = {task.name: task for task in tasks}
    hashes: dict[str, str] = {}
    for task in tasks:
        for parent in task.extends:
            here = by_name[parent.name]
            if here is parent:
                continue
            wanted = parent.content if isinstance(parent, Parent) else parent.content_hash()
            if hashes.setdefault(here.name, here.content_hash()) != wanted:
                raise CompositionError(
                    f"{task.name!r} extends another {parent.name!r} (content {wanted[:12]}) than the one here "
                    f"({hashes[here.name][:12]}). Attach the one it was trained over, or train {task.name!r} anew."
                )


def _snapshot(task: Task) -> Task:
    head = torch.nn.Linear(task.head.in_features, task.head.out_features, device="meta")
    for name, parameter in task.head.named_parameters():
        setattr(head, name, torch.nn.Parameter(parameter.detach().clone()))
    copy = Task(task.spec, task.class_token.detach().clone(), task.memory.detach().clone(), head, task.parents)
    return copy.requires_grad_(False)
