"""Stratified splits and folds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memoro.data.splits import strata, stratified_folds, stratified_split
from memoro.errors import DataError

GROUPS = np.repeat(np.arange(4), [100, 40, 7, 1])


def test_each_class_gives_its_share() -> None:
    kept, held = stratified_split(GROUPS, 0.2, seed=3)
    assert np.bincount(GROUPS[held], minlength=4).tolist() == [20, 8, 2, 0]
    assert sorted([*kept, *held]) == list(range(len(GROUPS)))


def test_same_seed_same_split_other_seed_another() -> None:
    first, again, other = (stratified_split(GROUPS, 0.2, seed)[1] for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_split_is_pinned() -> None:
    """A change here changes which images every user holds out."""
    assert stratified_split(np.repeat([0, 1], 10), 0.2, seed=0)[1].tolist() == [4, 5, 16, 18]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.floats(0, 0.95), st.integers(0, 99))
def test_no_class_loses_its_last_image(groups: list[int], fraction: float, seed: int) -> None:
    numbers = np.array(groups)
    kept, held = stratified_split(numbers, fraction, seed)
    assert set(numbers[kept]) == set(groups)
    assert not set(kept) & set(held)
    assert len(kept) + len(held) == len(groups)
    if fraction == 0:
        assert len(held) == 0


def test_small_classes_share_what_rounding_leaves() -> None:
    groups = np.repeat(np.arange(20), 3)
    _, held = stratified_split(groups, 0.15, seed=0)
    assert len(held) == 9  # 15 % of 60, though 15 % of each class is less than half an image
    assert np.bincount(groups[held]).max() == 1


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_senseless_fraction(fraction: float) -> None:
    with pytest.raises(DataError, match="fraction"):
        stratified_split(GROUPS, fraction, seed=0)


def test_folds_are_even_and_leave_single_images_alone() -> None:
    folds = stratified_folds(GROUPS, 5, seed=1)
    assert folds[GROUPS == 3].tolist() == [-1]
    assert np.bincount(folds[GROUPS == 0]).tolist() == [20] * 5
    sizes = np.bincount(folds[folds >= 0])
    assert sizes.max() - sizes.min() <= 1
    assert not np.array_equal(folds, stratified_folds(GROUPS, 5, seed=2))


def test_too_many_folds() -> None:
    with pytest.raises(DataError, match="choose a number from 2 to 3"):
        stratified_folds(np.zeros(3, dtype=np.int64), 4, seed=0)


def test_strata_of_labels_and_numbers() -> None:
    labels = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    assert strata(labels).tolist() == [1, 0, 0, -1]
    numbers = torch.arange(20.0).flip(0)[:, None] + 0.5
    assert strata(numbers).tolist() == [at // 4 for at in reversed(range(20))]
    assert strata(torch.tensor([2, 0])).tolist() == [2, 0]


@pytest.mark.parametrize("images", [2, 8, 11, 13, 40, 1000])
def test_few_numbers_are_held_out_too(images: int) -> None:
    """A group of numbers with a single image could not lose it."""
    groups = strata(torch.linspace(0.1, 7.3, images).unsqueeze(1))
    assert len(set(groups.tolist())) == max(1, min(10, images // 4))
    held_out = stratified_split(groups, 0.15, seed=0)[1]
    assert 1 <= len(held_out) <= round(0.15 * images) + 1
