"""The estimators in scikit-learn's own tools, and that they answer as tasks do."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

import memoro
from memoro.sklearn import ImageClassifier, ImageEmbedder, ImageRegressor

SIZE = 32
COUNT = 24


def draw(number: int) -> Image.Image:
    """Stripes, upright for even numbers and lying for odd ones, with noise of its own."""
    rng = np.random.default_rng(number)
    waves = rng.uniform(60, 190) + 60 * np.sin(np.arange(SIZE) * rng.uniform(0.8, 1.2) + rng.uniform(0, 6))
    plane = np.broadcast_to(waves, (SIZE, SIZE)) if number % 2 == 0 else np.broadcast_to(waves[:, None], (SIZE, SIZE))
    noisy = np.stack([plane + rng.normal(0, 8, (SIZE, SIZE)) for _ in range(3)], axis=2)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


IMAGES = [draw(number) for number in range(COUNT)]
LABELS = np.array(["upright", "lying"])[np.arange(COUNT) % 2]
HEIGHTS = np.array([np.asarray(image).mean() for image in IMAGES])


CHECKS = [pair for kind in (ImageClassifier, ImageRegressor) for pair in estimator_checks_generator(kind())]


def test_there_are_checks() -> None:
    assert len(CHECKS) > 80


def name_of(part: Any) -> str:
    """The same in every process of a test run."""
    return str(part.func.__name__) if isinstance(part, partial) else type(part).__name__


@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name_of)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    """They take matrices of features. ImageEmbedder takes images only, to which none of them applies."""
    check(estimator)


def test_paths_arrays_tensors_and_images_are_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}.png" for number in range(6)]
    for path, image in zip(paths, IMAGES, strict=False):
        image.save(path)
    arrays = [np.asarray(image) for image in IMAGES[:6]]
    expected = memoro.embed(IMAGES[:6])
    assert expected.dtype == np.float32
    assert len(expected) == 6
    assert not np.array_equal(expected[0], expected[1])
    tensors = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    frame = pd.DataFrame({"path": [str(path) for path in paths]})
    given: list[Any] = [paths, arrays, np.stack(arrays), tensors, frame, frame["path"], str(tmp_path)]
    for images in given:
        assert np.array_equal(ImageEmbedder().fit_transform(images), expected), type(images)


def test_embed_reads_the_last_layers(backbone: memoro.Backbone) -> None:
    """The statistics are those of the backbone's own tokens, kept on disk or not."""
    size = backbone.preprocessing.at(20)
    whole = memoro.embed(IMAGES[:3], backbone, image_size=20)
    last = memoro.embed(IMAGES[:3], backbone, image_size=20, layers=1)
    assert last.shape == (3, backbone.anatomy.statistics * backbone.dim)
    assert whole.shape[1] % last.shape[1] == 0
    assert np.array_equal(whole[:, -last.shape[1] :], last)
    pixels = torch.stack([size.to_tensor(image) for image in IMAGES[:3]])
    tokens, context = backbone.anatomy.embed(pixels)
    for layer, block in enumerate(backbone.anatomy.blocks):
        tokens, _, _ = block.run(tokens, context, layer)
    computed = backbone.anatomy.pool(tokens).flatten(1)
    assert np.array_equal(last, computed.half().float().detach().numpy())  # as they are kept
    assert np.array_equal(memoro.embed(IMAGES[:3], backbone, image_size=20, layers=1, cache=False), last)
    with pytest.raises(memoro.DataError, match="layers=9"):
        memoro.embed(IMAGES[:3], backbone, layers=9)
    with pytest.raises(memoro.DataError, match="no images"):
        memoro.embed([], backbone)


def test_classifier() -> None:
    train, test = slice(0, 16), slice(16, None)
    model = ImageClassifier().fit(IMAGES[train], LABELS[train])
    assert list(model.classes_) == ["lying", "upright"]
    assert (model.predict(IMAGES[test]) == LABELS[test]).all()
    proba = model.predict_proba(IMAGES[test])
    assert np.allclose(proba.sum(axis=1), 1)
    assert (model.classes_[proba.argmax(axis=1)] == LABELS[test]).all()
    assert model.score(IMAGES[test], LABELS[test]) == 1
    swapped = ImageClassifier().fit(IMAGES[train], LABELS[train][::-1])
    assert swapped.score(IMAGES[test], LABELS[test]) == 0


def test_images_and_their_statistics_are_one() -> None:
    on_images, rows = ImageClassifier().fit(IMAGES, LABELS), memoro.embed(IMAGES)
    on_rows = ImageClassifier().fit(rows, LABELS)
    assert np.array_equal(on_images.coef_, on_rows.coef_)
    assert np.array_equal(on_images.predict_proba(IMAGES[:3]), on_images.predict_proba(rows[:3]))


@pytest.mark.parametrize("kind", [ImageClassifier, ImageRegressor])
def test_partial_fit_is_exact(kind: Any) -> None:
    targets = LABELS if kind is ImageClassifier else np.stack([HEIGHTS, -HEIGHTS], axis=1)
    classes = {"classes": ["lying", "upright"]} if kind is ImageClassifier else {}
    model = kind().partial_fit(IMAGES[:7], targets[:7], **classes)
    early = model.coef_.copy()
    for part in (slice(7, 8), slice(8, COUNT)):
        model.partial_fit(IMAGES[part], targets[part])
    whole = kind().fit(IMAGES, targets)
    for name in ("coef_", "intercept_", "penalty_", "statistics_", "targets_"):
        assert np.array_equal(getattr(model, name), getattr(whole, name)), name
    assert not np.array_equal(early, whole.coef_)


def test_partial_fit_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="classes must be passed"):
        ImageClassifier().partial_fit(IMAGES[:4], LABELS[:4])
    model = ImageClassifier().partial_fit(IMAGES[:4], LABELS[:4], classes=["lying", "upright", "other"])
    assert model.predict_proba(IMAGES[:2]).shape == (2, 3)
    with pytest.raises(ValueError, match="not given on the first call: round\\."):
        model.partial_fit(IMAGES[:2], ["round", "lying"])
    with pytest.raises(ValueError, match="one class only"):
        ImageClassifier().fit(IMAGES[::2], LABELS[::2])


def test_held_out_answers_are_of_models_without_the_image() -> None:
    """The penalty is chosen with all images, so that the others' own penalty may differ: compare at the same one."""
    model = ImageRegressor().fit(IMAGES, HEIGHTS)
    again = ImageRegressor().fit(IMAGES[1:], HEIGHTS[1:])
    left_out, fitted = float(model.held_out_[0]), float(model.predict(IMAGES[:1])[0])
    assert abs(float(again.predict(IMAGES[:1])[0]) - left_out) < abs(fitted - left_out) / 2
    assert ImageClassifier().fit(IMAGES, LABELS).held_out_proba_.shape == (COUNT, 2)


def test_balance_favours_rare_classes() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 8)) + (np.arange(200) < 20)[:, None]
    rare = np.arange(200) < 20
    plain, balanced = (ImageClassifier(balance=balance).fit(rows, rare) for balance in (False, True))
    assert balanced.predict_proba(rows)[:, 1].mean() > 1.5 * plain.predict_proba(rows)[:, 1].mean()


def test_in_cross_validation_and_grids() -> None:
    scores = cross_val_score(ImageClassifier(), IMAGES, LABELS, cv=3)
    assert scores.mean() == 1
    grid = GridSearchCV(
        ImageClassifier(), {"image_size": [16, 32], "balance": [False, True]}, cv=2, scoring="neg_log_loss"
    )
    grid.fit(IMAGES, LABELS)
    assert set(grid.best_params_) == {"image_size", "balance"}
    assert len({str(score) for score in grid.cv_results_["mean_test_score"]}) > 1  # the size makes a difference
    answers = cross_val_predict(ImageRegressor(), IMAGES, HEIGHTS, cv=4)
    assert np.corrcoef(answers, HEIGHTS)[0, 1] > 0.9


def test_in_pipelines() -> None:
    chain = make_pipeline(ImageEmbedder(layers=1), PCA(8), LogisticRegression())
    assert cross_val_score(chain, IMAGES, LABELS, cv=3).mean() == 1
    chain = make_pipeline(ImageEmbedder(), ImageClassifier()).fit(IMAGES, LABELS)
    assert np.array_equal(chain.predict_proba(IMAGES), ImageClassifier().fit(IMAGES, LABELS).predict_proba(IMAGES))
    with pytest.raises(ValueError, match="takes images"):
        ImageEmbedder().transform(np.zeros((2, 3)))


def test_a_second_fit_runs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folds of a search read statistics that are kept."""
    from memoro.training import cached

    ran, keep = [], cached.keep_features
    monkeypatch.setattr(cached, "keep_features", lambda *given: ran.append(len(given[1])) or keep(*given))
    ImageClassifier().fit(IMAGES, LABELS)
    assert sum(ran) == COUNT
    cross_val_score(ImageClassifier(), IMAGES, LABELS, cv=3)
    assert sum(ran) == COUNT
    ImageClassifier(image_size=16).fit(IMAGES, LABELS)
    assert sum(ran) == 2 * COUNT


def test_clones_and_pickles(backbone: memoro.Backbone) -> None:
    model = ImageClassifier(backbone, image_size=20, balance=True)
    assert model.get_params() == {
        "backbone": backbone, "image_size": 20, "balance": True, "device": None, "cache": None,
    }  # fmt: skip
    fitted = clone(model).fit(IMAGES, LABELS)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(IMAGES[:4]), fitted.predict_proba(IMAGES[:4]))
    assert not hasattr(model, "coef_")


@pytest.mark.parametrize("kind", [ImageClassifier, ImageRegressor])
def test_becomes_a_task(kind: Any, tmp_path: Path) -> None:
    model = kind(image_size=32).fit(IMAGES, LABELS if kind is ImageClassifier else HEIGHTS)
    memoro.save_task(model.to_task("stripes"), tmp_path / "stripes.safetensors")
    task = memoro.load_task(tmp_path / "stripes.safetensors")
    rows = memoro.compose(memoro.load_backbone(), [task]).predict(IMAGES[:5])
    if kind is ImageClassifier:
        found = [[row["stripes"]["probabilities"][name] for name in model.classes_] for row in rows]
        expected = model.predict_proba(IMAGES[:5])
    else:
        found = [row["stripes"]["values"]["value"] for row in rows]
        expected = model.predict(IMAGES[:5])
    # Weights are rounded as a file holds them; statistics as they are kept.
    assert np.allclose(found, expected, atol=2e-3 * np.abs(expected).max())
    with pytest.raises(memoro.TaskError, match="fit it on images"):
        kind().fit(np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 2).to_task("numbers")
