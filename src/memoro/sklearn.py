"""Estimators for scikit-learn: images in, predictions out, by a read-out solved in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from memoro.backbones.load import TINY
from memoro.errors import TaskError
from memoro.heads import HEADS, HeadKind
from memoro.images import PICTURE_TYPES
from memoro.similar import embed, open_backbone
from memoro.tasks.readout import SolvedReadOut, solve_readout
from memoro.tasks.ridge import BLOCK, RidgeSystem
from memoro.tasks.spec import ReadOut
from memoro.tasks.task import Task, new_task

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:
    raise ImportError("scikit-learn is not installed: pip install 'memoro[sklearn]'.") from None

Rows = npt.NDArray[Any]


class _Images(BaseEstimator):  # type: ignore[misc]
    """What the estimators have in common: the backbone, and what counts as images."""

    def __init__(
        self, backbone: Any = TINY, *, image_size: int | None = None, device: str | None = None, cache: Any = None
    ) -> None:
        self.backbone, self.image_size, self.device, self.cache = backbone, image_size, device, cache

    def _embed(self, images: Any, **options: Any) -> Rows:
        common: dict[str, Any] = {"image_size": self.image_size, "device": self.device, "cache": self.cache}
        return embed(images, self.backbone, **common, **options)


class ImageEmbedder(TransformerMixin, _Images):  # type: ignore[misc]
    """`memoro.embed` as a transformer: images to a matrix of statistics. Nothing is learned from the images."""

    def __init__(
        self,
        backbone: Any = TINY,
        *,
        layers: int | None = None,
        image_size: int | None = None,
        device: str | None = None,
        cache: Any = None,
    ) -> None:
        super().__init__(backbone, image_size=image_size, device=device, cache=cache)
        self.layers = layers

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        return self

    def transform(self, X: Any) -> Rows:  # noqa: N803
        """(n, features) float32, see `memoro.embed`."""
        images = find_images(X)
        if images is None:
            raise ValueError("ImageEmbedder takes images: paths, PIL images or arrays of (height, width, channels).")
        return self._embed(images, layers=self.layers)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.requires_fit = False, False
        return tags


class _ReadOutEstimator(_Images):
    """A read-out on the statistics of images, or on any matrix (n, features), such as what `embed` returned.

    It keeps the statistics that it learned from, 18 kB an image for a ViT-S: `partial_fit` adds to them and solves
    again, which gives exactly what `fit` on all of them gives.
    """

    _kind: HeadKind
    statistics_: Rows
    targets_: Rows

    def _learn(self, X: Any, y: Any, *, reset: bool) -> tuple[Rows, Any]:  # noqa: N803
        """The statistics of new images, and their targets, checked."""
        images = find_images(X)
        rows = X if images is None else self._embed(images)
        multi = self._kind == "regression"
        checked: tuple[Rows, Any] = validate_data(
            self, rows, y, reset=reset, dtype=[np.float32, np.float64], multi_output=multi, y_numeric=multi,
            ensure_min_samples=2 if reset else 1,
        )  # fmt: skip
        return smallest(checked[0]), checked[1]

    def _add(self, rows: Rows, targets: Rows, outputs: int, *, reset: bool, balance: bool = False) -> None:
        """Solves the read-out of these statistics, and of the earlier ones unless they are to be forgotten."""
        if not reset:
            rows = np.concatenate([self.statistics_, rows])
            targets = np.concatenate([self.targets_, targets])
        self.statistics_, self.targets_ = rows, targets
        features = torch.from_numpy(rows)
        if len(features) < 2:
            raise ValueError(f"n_samples = {len(features)}: a read-out needs at least 2.")

        def factorise(weights: Tensor | None) -> RidgeSystem:
            return RidgeSystem(len(features), lambda index: features[index], weights)

        wanted = torch.from_numpy(targets if self._kind == "softmax" else targets.reshape(len(targets), -1))
        reads = ReadOut(0, 1)  # of no backbone: that is known when it becomes a task
        solved = solve_readout(self._kind, reads, factorise, wanted, outputs, balance=balance)
        self.coef_, self.intercept_ = solved.weight.numpy(), solved.bias.numpy()
        self.penalty_, self._held_out = solved.penalty, solved.held_out

    def _answer(self, X: Any) -> Tensor:  # noqa: N803
        """(n, outputs) probabilities or numbers."""
        check_is_fitted(self)
        images = find_images(X)
        rows = validate_data(
            self, X if images is None else self._embed(images), reset=False, dtype=[np.float32, np.float64]
        )
        weight, bias = torch.from_numpy(self.coef_), torch.from_numpy(self.intercept_)
        blocks = torch.split(torch.from_numpy(np.require(rows, requirements="W")), BLOCK)
        return HEADS[self._kind].probabilities(torch.cat([block.float() @ weight.T + bias for block in blocks]))

    def to_task(self, name: str) -> Task:
        """A task that answers as the estimator does, to compose, save, serve and export."""
        check_is_fitted(self)
        backbone = open_backbone(self.backbone, self.device)
        reads = ReadOut.of(backbone.anatomy)
        if self.n_features_in_ != reads.features(backbone.dim, backbone.depth):
            raise TaskError(
                f"the estimator was fitted on {self.n_features_in_} features, {backbone.name} has "
                f"{reads.features(backbone.dim, backbone.depth)}: fit it on images, or on embed(images, backbone)."
            )
        task = new_task(backbone, name, self._labels(), cells=0, from_layer=backbone.depth, head=self._kind, seed=0)
        weight, bias = torch.from_numpy(self.coef_), torch.from_numpy(self.intercept_)
        every = torch.arange(len(self._held_out), device="cpu")
        SolvedReadOut(reads, weight, bias, self._held_out, every, self.penalty_).attach(task, 1.0)
        size = self.image_size
        task.update_spec(preprocessing=backbone.preprocessing if size is None else backbone.preprocessing.at(size))
        return task

    def _labels(self) -> list[str]:
        raise NotImplementedError


class ImageClassifier(ClassifierMixin, _ReadOutEstimator):  # type: ignore[misc]
    """Classes of images, with calibrated probabilities.

    `backbone` is anything that `load_backbone` takes; a name is best where estimators are copied, as in a grid search.
    `image_size` is the input size in pixels. `balance` weights classes inversely to their frequency. After `fit`,
    `held_out_proba_` has the probabilities for each training image by a solution without it.
    """

    _kind: HeadKind = "softmax"

    def __init__(
        self,
        backbone: Any = TINY,
        *,
        image_size: int | None = None,
        balance: bool = False,
        device: str | None = None,
        cache: Any = None,
    ) -> None:
        super().__init__(backbone, image_size=image_size, device=device, cache=cache)
        self.balance = balance

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        rows, y = self._learn(X, y, reset=True)
        check_classification_targets(y)
        self.classes_, targets = np.unique(column_or_1d(y), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"there is one class only, {self.classes_[0]!r}: give images of at least two classes.")
        return self._finish(rows, targets, reset=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:  # noqa: N803
        """Learns from more images. The first call needs all `classes`, as elsewhere in scikit-learn."""
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        rows, y = self._learn(X, y, reset=first)
        check_classification_targets(y)
        known = unique_labels(classes) if first else self.classes_
        if not first and classes is not None and not np.array_equal(known, unique_labels(classes)):
            raise ValueError("classes are not the same as on the first call to partial_fit.")
        if unknown := sorted(set(np.unique(y)) - set(known)):
            raise ValueError(f"y has classes that were not given on the first call: {', '.join(map(str, unknown))}.")
        self.classes_ = known
        return self._finish(rows, np.searchsorted(known, column_or_1d(y)), reset=first)

    def _finish(self, rows: Rows, targets: Rows, *, reset: bool) -> Self:
        self._add(rows, targets, len(self.classes_), reset=reset, balance=self.balance)
        self.held_out_proba_ = HEADS[self._kind].probabilities(self._held_out).numpy()
        return self

    def predict_proba(self, X: Any) -> Rows:  # noqa: N803
        return self._answer(X).numpy()

    def predict(self, X: Any) -> Rows:  # noqa: N803
        best = self._answer(X).argmax(dim=1).numpy()
        return self.classes_[best]  # type: ignore[no-any-return]

    def _labels(self) -> list[str]:
        return [str(name) for name in self.classes_]


class ImageRegressor(RegressorMixin, _ReadOutEstimator):  # type: ignore[misc]
    """One or several numbers for each image. After `fit`, `held_out_` has the answers to each training image by a
    solution without it."""

    _kind: HeadKind = "regression"

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        return self._finish(X, y, reset=True)

    def partial_fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Learns from more images."""
        return self._finish(X, y, reset=not hasattr(self, "statistics_"))

    def _finish(self, X: Any, y: Any, *, reset: bool) -> Self:  # noqa: N803
        rows, targets = self._learn(X, y, reset=reset)
        targets = np.asarray(targets, dtype=np.float64)
        self._add(rows, targets, 1 if targets.ndim == 1 else targets.shape[1], reset=reset)
        self.held_out_ = self._shaped(self._held_out)
        return self

    def predict(self, X: Any) -> Rows:  # noqa: N803
        return self._shaped(self._answer(X))

    def _shaped(self, answers: Tensor) -> Rows:
        return answers.double().numpy().reshape(-1, *self.targets_.shape[1:])

    def _labels(self) -> list[str]:
        count = 1 if self.targets_.ndim == 1 else self.targets_.shape[1]
        return ["value"] if count == 1 else [f"value {number}" for number in range(count)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def find_images(given: Any) -> Any:
    """The images among what estimators are given; None for a matrix, and for what is neither.

    A column of a table (n, 1), such as a DataFrame of paths, is a list of images.
    """
    if isinstance(given, (str, Path, bytes, Image.Image)):
        return given
    if isinstance(given, (np.ndarray, Tensor)) and given.ndim > 2:
        return list(given)
    if not isinstance(given, (list, tuple)):
        table = np.asarray(given) if hasattr(given, "__array__") and not hasattr(given, "toarray") else None
        if table is None or table.dtype.kind not in "OUT" or table.shape not in {(table.size,), (table.size, 1)}:
            return None
        given = table.ravel().tolist()
    first = given[0] if len(given) else None
    return list(given) if isinstance(first, PICTURE_TYPES) and getattr(first, "ndim", 2) > 1 else None


def smallest(rows: Rows) -> Rows:
    """A copy of the rows, in float16 if that changes nothing, as for statistics that were kept on disk."""
    with np.errstate(over="ignore"):
        half = rows.astype(np.float16)
    return half if np.array_equal(half, rows) else rows.copy()
