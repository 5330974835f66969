"""A backbone and a set of tasks: one pass answers them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor, nn

from memoro.answer import AnswerDict
from memoro.backbones import Backbone, require_backbone
from memoro.engine.answers import (
    AnswerOptions,
    Outputs,
    Pass,
    Pictures,
    Prediction,
    Recognition,
    Routing,
    Unfamiliar,
    answer_pictures,
    list_pictures,
    read_predictions,
)
from memoro.engine.explain import Explanation, explain_tasks, read_views
from memoro.engine.forward import Forward
from memoro.engine.plan import check_parents
from memoro.engine.streams import Ends, run_streams
from memoro.engine.verify import Verification, verify_composition
from memoro.errors import CompositionError
from memoro.images import Preprocessing
from memoro.options import several
from memoro.tasks.familiarity import FALSE_ALARMS, FamiliarityBank
from memoro.tasks.task import Task


def compose(backbone: Backbone, tasks: Task | Iterable[Task] = (), *, live: bool = False) -> Composition:
    """The task or tasks on the backbone, checked: right backbone, unique names, all parents present, no cycle.

        pets = memoro.load_task("pets.safetensors")
        model = memoro.compose(memoro.load_backbone(pets.spec.backbone), pets)
        answers = model.predict("photo.jpg")

    The composition keeps a snapshot of the tasks, on the backbone's device: later changes to them do not show in it.
    With `live=True` it reads the tasks' own parameters at every call and gradients flow to them: that is for training.
    """
    return Composition(backbone, several(tasks), live=live)


class Composition(nn.Module):
    """A backbone with tasks, all of which one pass answers: what `compose` returns.

    `attach` and `detach` give a new one, so threads can share it; `to` moves it in place, like any module. It is always
    in eval mode.

    As a module it has the backbone's frozen weights as `base` and the tasks by their numbers, since a task's name may
    contain dots.
    """

    base: nn.Module

    def __init__(self, backbone: Backbone, tasks: Sequence[Task], *, live: bool = False) -> None:
        require_backbone(backbone)
        for task in tasks:
            if not isinstance(task, Task):
                raise CompositionError(
                    getattr(task, "not_composable", f"{task!r} is not a task; use load_task() or new_task().")
                )
            task.spec.check_backbone(backbone)
            if live and task.members > 1 and not any(task.name == one.name for other in tasks for one in other.extends):
                raise CompositionError(f"{task.name!r} is an ensemble, which cannot be trained: leave out live.")
        super().__init__()
        super().train(False)
        self.backbone = backbone
        self.live = live
        self._lineage, hashes = check_parents(tasks)
        self._lineage.check_size([task.members for task in tasks], [task.cells for task in tasks])
        # Ensembles that others extend are not trained with them.
        self._list = tuple(
            task if live and task.members == 1 else _snapshot(task, hashes, backbone.device) for task in tasks
        )
        self._index = {task.name: position for position, task in enumerate(self._list)}
        self.base = backbone.module
        for number, task in enumerate(self._list):
            self.add_module(str(number), task)
        self._forward = Forward(backbone, self._list, self._lineage, live=live)
        self._compiled: dict[str, Any] | None = None

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name, to read."""
        return MappingProxyType({task.name: task for task in self._list})

    @property
    def names(self) -> list[str]:
        return list(self._index)

    def attach(self, task: Task) -> Composition:
        """A new composition with one more task."""
        return Composition(self.backbone, (*self._list, task), live=self.live)

    def detach(self, name: str) -> Composition:
        """A new composition without a task. One that others extend cannot be detached before them."""
        self.check_childless(name, "detach")
        return Composition(self.backbone, [task for task in self._list if task.name != name], live=self.live)

    def check_childless(self, name: str, action: str) -> None:
        """Raises if other tasks extend this one: nothing can be done to it that would change what they see."""
        self._pick([name])
        children = [task.name for task in self._list if any(parent.name == name for parent in task.extends)]
        if children:
            why = ", ".join(map(repr, children))
            why += " extends it: detach that" if len(children) == 1 else " extend it: detach those"
            raise CompositionError(f"cannot {action} {name!r}, because {why} first.")

    def alone(self, name: str) -> Composition:
        """A composition of one task and what it extends."""
        members = self._lineage.closure(self._pick([name]))
        return Composition(self.backbone, [self._list[i] for i in members], live=self.live)

    def forward(
        self, pixel_values: Tensor, tasks: Sequence[str] | None = None, *, any_size: bool = False
    ) -> dict[str, Tensor]:
        """`{"base": the backbone's own answer, "pets": logits, …}` for a batch of normalised images.

        `tasks` names the ones to answer; only those and what they extend are computed. Tasks that were trained at
        another input size are refused, unless `any_size`.
        """
        return self._run(pixel_values, tasks, any_size)[0]

    def _run(
        self,
        pixel_values: Tensor,
        tasks: Sequence[str] | None,
        any_size: bool,
        *,
        pool: int = 0,
        seconds: list[float] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Ends]:
        """What `forward` gives, the final-normed tokens (b, members * dim) that each task's head reads, and what else
        is read of the base, with statistics of the last `pool` layers at least."""
        pixels, wanted = self.backbone.check_pixels(pixel_values), self._pick(tasks)
        if not any_size:
            self.check_size(tasks, (pixels.shape[-2], pixels.shape[-1]))
        forward = self._forward
        pool_from = min(forward.pool_from(wanted), self.backbone.depth - pool)
        anatomy, streams = self.backbone.anatomy, [forward.stream(wanted)]
        [ends] = run_streams(anatomy, [pixels], streams, pool_from=pool_from, with_base=True, seconds=seconds)
        assert ends.base is not None
        answers, tokens = {"base": ends.base}, {}
        for number, (token, logits) in zip(wanted, forward.read(wanted, ends), strict=True):
            name = self._list[number].name
            tokens[name], answers[name] = token, logits
        return answers, tokens, ends

    if TYPE_CHECKING:
        __call__ = forward

    def run(
        self,
        pixel_values: Tensor,
        tasks: Sequence[str] | None = None,
        *,
        any_size: bool = False,
        seconds: list[float] | None = None,
    ) -> Outputs:
        """`forward` with the final tokens and, for each task that knows it, how familiar the images are. Logits and
        tokens include those of `base`. `seconds` receives the time of each backbone layer."""
        wanted = self._pick(tasks)
        known, bank = self._known
        pool = 0 if bank is None else min(bank.layers(self.backbone.anatomy.statistics), self.backbone.depth)
        answers, tokens, ends = self._run(pixel_values, tasks, any_size, pool=pool, seconds=seconds)
        tokens["base"] = self.backbone.anatomy.finish_token(ends.last)
        if bank is None or ends.pooled is None:
            return Outputs(answers, {}, tokens)
        scores, shares = bank.judge(ends.pooled)
        rows = [(self._list[i].name, known.index(i)) for i in wanted if i in known]
        recognition = {name: Recognition(scores[:, row], shares[:, row]) for name, row in rows}
        return Outputs(answers, recognition, tokens)

    @cached_property
    def _known(self) -> tuple[list[int], FamiliarityBank | None]:
        """The tasks that know what is familiar to them, and their descriptions."""
        described = {
            i: familiarity for i, task in enumerate(self._list) if (familiarity := task.spec.familiarity) is not None
        }
        return list(described), FamiliarityBank(list(described.values()), self.backbone.device) if described else None

    def predict(
        self,
        images: Pictures,
        tasks: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        top: int | None = None,
        unfamiliar: Unfamiliar = "mark",
        false_alarms: float = FALSE_ALARMS,
    ) -> list[dict[str, AnswerDict]]:
        """What each task answers for each image: one dictionary per image, by task name, of the fields of `Answer`.

        An image is a path, encoded bytes, an open file, a PIL image, an array (height, width, channels) or a tensor
        (channels, height, width), of bytes or of floats from 0 to 1. A folder stands for the images in it, by name, and
        an array with one more axis for a batch. `top` limits `probabilities` to that many labels. Tasks with the same
        preprocessing share a pass; `passes` shows which do.

        `unfamiliar` says what happens if an image looks unlike those that a task was trained on: `mark` adds
        `unfamiliar` to each answer, `drop` leaves out the answer, `keep` does neither. `false_alarms` is the share of a
        task's own images that may be called unfamiliar. An image that cannot be read is an error: for rows with
        errors, and for more images than fit into memory, use `predict_stream`.
        """
        routed = partial(self.predict_stream, unfamiliar=unfamiliar, false_alarms=false_alarms)
        return read_predictions(routed(images, tasks, batch_size=batch_size, top=top))

    def predict_stream(
        self,
        images: Pictures,
        tasks: Sequence[str] | None = None,
        *,
        batch_size: int = 32,
        top: int | None = None,
        unfamiliar: Unfamiliar = "mark",
        false_alarms: float = FALSE_ALARMS,
    ) -> Iterator[Prediction]:
        """The same as it goes: yields for each image its `image` (path), its `answers` by task, and its `error`, which
        is None if it could be read."""
        names = [self._list[i].name for i in self._pick(tasks)]
        options = AnswerOptions(batch_size, top, Routing(unfamiliar, false_alarms))
        return answer_pictures(list_pictures(images), self.prediction_passes(names), names, options)

    def prediction_passes(self, tasks: Sequence[str] | None = None) -> list[Pass]:
        """What `predict` runs: the tasks by preprocessing."""

        def run(names: list[str]) -> Callable[[Tensor], Outputs]:
            return lambda pixels: self.run(pixels.to(self.backbone.dtype), names)

        return [
            Pass(preprocessing, [self.tasks[name] for name in names], run(names), self.backbone.device)
            for preprocessing, names in self.passes(tasks).items()
        ]

    def passes(self, tasks: Sequence[str] | None = None) -> dict[Preprocessing, list[str]]:
        """The tasks by preprocessing: each entry is one pass of the backbone."""
        groups: dict[Preprocessing, list[str]] = {}
        for i in self._pick(tasks):
            task = self._list[i]
            groups.setdefault(task.spec.preprocessing or self.backbone.preprocessing, []).append(task.name)
        return groups

    @overload
    def explain(self, images: Pictures, task: str, *, normalised: bool = False) -> Explanation: ...

    @overload
    def explain(
        self, images: Pictures, task: list[str] | None = None, *, normalised: bool = False
    ) -> dict[str, Explanation]: ...

    def explain(
        self, images: Pictures, task: str | list[str] | None = None, *, normalised: bool = False
    ) -> Explanation | dict[str, Explanation]:
        """What a task's token attends to at each layer: patches, memory, the tasks that it extends; and for a read-out,
        what each patch adds to the answer. For several tasks, or all of them without `task`: a dictionary by name.

        Takes images as `predict` does, and `overlay()` draws on them. With `normalised`, `images` is a batch of pixels
        as `model(pixel_values)` takes it. Tasks with the same preprocessing share a pass.
        """
        names = [task] if isinstance(task, str) else task
        explanations: dict[str, Explanation] = {}
        pictures = [] if normalised else list(list_pictures(images))
        for preprocessing, together in self.passes(names).items():
            if normalised:
                explanations |= self._explain(images, together)
                continue
            pixels, views = read_views(pictures, preprocessing)
            explained = self._explain(pixels.to(self.backbone.dtype), together)
            explanations |= {name: replace(explanation, images=tuple(views)) for name, explanation in explained.items()}
        return (
            explanations[task] if isinstance(task, str) else {name: explanations[name] for name in names or self.names}
        )

    def _explain(self, pixel_values: Any, names: Sequence[str]) -> dict[str, Explanation]:
        pixels, wanted = self.backbone.check_pixels(pixel_values), self._pick(names)
        self.check_size(names, (pixels.shape[-2], pixels.shape[-1]))
        with torch.no_grad():
            return explain_tasks(self._forward, wanted, pixels)

    def verify(self, pixel_values: Tensor) -> Verification:
        """Runs the original model and each task alone beside the composition, and says what differs."""
        return verify_composition(self, pixel_values)

    def export(self, path: str | Path, *, images: bool = False) -> Path:
        """Writes an ONNX file with one input and a free batch dimension; returns its path.

        Its outputs are `base` and for each task `NAME` (logits), `NAME.probabilities`, and `NAME.familiarity` where
        the task has it. The input is `pixel_values`, or with `images` the bytes of resized images (batch, height,
        width, 3), which are normalised in the graph.
        Labels with their thresholds, the spread of numbers, preprocessing and fingerprint are in the file's metadata,
        as JSON under the key `memoro`.
        """
        from memoro.engine.export import export_onnx

        return export_onnx(Composition(self.backbone.to("cpu"), self._list), path, images=images)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Composition:
        # What to(), cuda(), half() and the like call. The user's backbone and tasks stay where they are, and tasks keep
        # their dtype: they are computed in the backbone's.
        moved, options = Composition(self.backbone.convert(fn), self._list, live=self.live), self._compiled
        vars(self).clear()
        vars(self).update(vars(moved))
        if options is not None:
            self.compile(**options)
        return self

    def compile(self, **options: Any) -> None:
        """Compiles in place, with the options of `torch.compile`, what `model(pixels)`, `run` and `predict` share.

        `torch.compile(model)` gives another module instead, whose `predict` is the one of this model.
        """
        self._compiled = options
        vars(self)["_run"] = torch.compile(partial(Composition._run, self), **options)  # in place of the method

    def train(self, mode: bool = True) -> Composition:
        """Nothing changes: dropout would change the backbone's own answer."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Composition:
        return self._refuse() if requires_grad else self

    def load_state_dict(self, *args: Any, **options: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CompositionError("a composition cannot be changed: train tasks with fit(), then compose them again.")

    def _pick(self, names: Sequence[str] | None) -> tuple[int, ...]:
        if names is None:
            return tuple(range(len(self._list)))
        if isinstance(names, str):
            raise CompositionError(f"tasks takes a list of names: [{names!r}].")
        unknown = [name for name in names if name not in self._index]
        if unknown:
            raise CompositionError(f"no task {unknown[0]!r}; the tasks are: {', '.join(self.names) or 'none'}.")
        return tuple(dict.fromkeys(self._index[name] for name in names))

    def check_size(self, tasks: Sequence[str] | None, size: tuple[int, int]) -> None:
        """Raises if one of the tasks was trained on images of another (height, width)."""
        for i in self._pick(tasks):
            preprocessing = self._list[i].spec.preprocessing
            trained = None if preprocessing is None else preprocessing.size
            if trained is not None and trained != size:
                raise CompositionError(
                    f"{self._list[i].name!r} was trained on images of {trained[0]}x{trained[1]}, this tensor is "
                    f"{size[0]}x{size[1]}. Use predict(), which gives each task its own size, or pass any_size=True."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Composition, live=self.live), (self.backbone, self._list)

    def __repr__(self) -> str:
        return f"Composition({self.backbone.name}, tasks=[{', '.join(self.names)}])"


def _snapshot(task: Task, hashes: Mapping[int, str], device: torch.device) -> Task:
    tensors = {name: tensor.detach().to(device, copy=True) for name, tensor in task.state_dict().items()}
    return Task.from_tensors(task.spec, tensors, task.parents_among(hashes)).requires_grad_(False).eval()
