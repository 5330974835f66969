"""What is suggested, what is doubted, and how honest the figures are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from sessions import COLOURS, backbone, draw, kept_elsewhere

import memoro
from memoro.backbones import Backbone
from memoro.errors import TeachError
from memoro.tasks.spec import ReadOut
from memoro.teach.learning import LabelledImages, Learned, advise, solve
from memoro.teach.suggestions import WAYS, Scene, suggest
from memoro.teach.suspects import Suspect, find_suspects, overlaps, suspects_csv

__all__ = ["backbone", "kept_elsewhere"]  # fixtures

GROUPS, EACH, DIM = 5, 20, 12


def scene(labelled: list[int], answers: torch.Tensor | None = None) -> Scene:
    """Five tight groups of twenty images."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.nn.functional.normalize(torch.randn(GROUPS, DIM, generator=generator), dim=1)
    tokens = centers.repeat_interleave(EACH, 0) + 0.02 * torch.randn(GROUPS * EACH, DIM, generator=generator)
    rest = torch.tensor([at for at in range(GROUPS * EACH) if at not in labelled])
    tokens = torch.nn.functional.normalize(tokens, dim=1)
    known = None if answers is None else answers[rest]
    return Scene("softmax", ("a", "b"), tokens, torch.tensor(labelled, dtype=torch.long), rest, known)


@pytest.mark.parametrize("by", ["auto", "groups", "unlike"])
def test_without_guesses_each_group_is_seen_once(by: str) -> None:
    chosen = suggest(scene([]), GROUPS, by)
    assert sorted(one.image // EACH for one in chosen) == list(range(GROUPS))
    assert all(one.reason for one in chosen)


@pytest.mark.parametrize("by", ["groups", "unlike"])
def test_groups_that_have_labels_come_last(by: str) -> None:
    chosen = suggest(scene([0, 21, 45]), 2, by)
    assert sorted(one.image // EACH for one in chosen) == [3, 4]


def test_unsure_images_come_first_and_border_names_its_classes() -> None:
    sure = torch.tensor([0.98, 0.02]).repeat(GROUPS * EACH, 1)
    sure[17], sure[63] = torch.tensor([0.51, 0.49]), torch.tensor([0.45, 0.55])
    now = scene([0, 21, 45, 80], sure)
    for by in ("uncertainty", "border", "auto"):
        assert {one.image for one in suggest(now, 2, by)} == {17, 63}, by
    assert suggest(now, 1, "uncertainty")[0].reason == "unsure: a or b"
    assert suggest(now, 1, "border")[0].reason == "between a and b"
    assert [one.reason for one in suggest(now, 3, "uncertainty")][2] == "no other guess is less sure"
    assert [one.reason for one in suggest(now, 3)][1:] == ["unsure: a or b", "unlike what is labelled"]


def test_images_are_never_suggested_twice_nor_again() -> None:
    for by in WAYS:
        labelled = list(range(0, 100, 3))
        answers = torch.rand(100, 2, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
        chosen = [one.image for one in suggest(scene(labelled, answers), 1000, by)]
        assert len(chosen) == len(set(chosen)) == 100 - len(labelled)
        assert not set(chosen) & set(labelled)
    assert suggest(scene(list(range(100))), 5) == []


def test_ways_that_do_not_work() -> None:
    with pytest.raises(TeachError, match="use one of auto"):
        suggest(scene([]), 1, "magic")
    with pytest.raises(TeachError, match="no guesses"):
        suggest(scene([]), 1, "border")


def labelled(count: int = 120, classes: int = 3, wrong: tuple[int, ...] = ()) -> tuple[LabelledImages, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % classes
    rows = torch.nn.functional.one_hot(targets, classes).float() @ torch.randn(classes, 40, generator=generator)
    rows += 0.5 * torch.randn(count, 40, generator=generator)
    given = targets.clone()
    given[list(wrong)] = (given[list(wrong)] + 1) % classes
    names = tuple("abcdef"[:classes])
    return LabelledImages(torch.arange(count), names, given, "softmax", torch.ones(count, dtype=torch.bool)), rows


def doubts(learned: Learned) -> dict[int, str]:
    """The suspected images and why, in order."""
    names = list(map(str, range(len(learned.groups))))
    return {int(one.path): one.reason for one in find_suspects(learned, names, names)}


def test_wrong_labels_are_doubted_and_only_these() -> None:
    wrong = (3, 40, 77, 100)
    given, rows = labelled(wrong=wrong)
    found = doubts(solve(given, lambda at: rows[at], ReadOut(0, 1)))
    assert sorted(found) == list(wrong)
    right, rows = labelled()
    assert doubts(solve(right, lambda at: rows[at], ReadOut(0, 1))) == {}


def test_near_duplicates_with_different_labels_are_doubted() -> None:
    given, rows = labelled()
    rows[1] = rows[0]
    groups = torch.arange(120)
    groups[1] = 0
    found = doubts(solve(given, lambda at: rows[at], ReadOut(0, 1), groups))
    assert 1 in found
    assert any("near-duplicate" in reason for reason in found.values())


def test_classes_that_overlap() -> None:
    given, rows = labelled()
    same = given.targets == 2
    rows[same] = rows[(given.targets == 1).nonzero().flatten()] + 0.01
    pairs = overlaps(solve(given, lambda at: rows[at], ReadOut(0, 1)))
    assert pairs[0][:2] == ("b", "c")
    assert overlaps(solve(labelled()[0], lambda at: labelled()[1][at], ReadOut(0, 1))) == []


def test_the_interval_has_the_truth_and_shrinks() -> None:
    few, rows = labelled(12)
    many, more = labelled(240)
    small = solve(few, lambda at: rows[at], ReadOut(0, 1)).figure()
    large = solve(many, lambda at: more[at], ReadOut(0, 1)).figure()
    assert small is not None
    assert large is not None
    assert small["high"] - small["low"] > large["high"] - large["low"] > 0
    assert 0 <= small["low"] <= small["value"] <= small["high"] <= 1


def test_advice() -> None:
    rows = [{"label": label, "images": 20, "judged": 18, "right": right} for label, right in (("a", 18), ("b", 9))]
    assert advise(rows) == {"label": "b", "more": 10, "why": "9 of its 18 are answered wrongly"}
    few = {"label": "c", "images": 1, "judged": 0, "right": 0}
    assert advise([*rows, few]) == {"label": "c", "more": 4, "why": "it has 1 so far"}
    assert advise(rows[:1]) is None
    assert advise([]) is None


def test_suspects_of_a_data_set(backbone: Backbone, tmp_path: Path) -> None:
    for at in range(10):
        for colour in COLOURS:
            place = "blue" if (at, colour) == (4, "red") else colour
            (tmp_path / "set" / place).mkdir(parents=True, exist_ok=True)
            draw(colour, 10 * at + len(colour)).save(tmp_path / "set" / place / f"{colour}{at}.png")
    found = memoro.suspects(tmp_path / "set", backbone=backbone)
    assert (Path(found[0].path).name, found[0].label, found[0].answer) == ("red4.png", "blue", "red")
    assert found[0].probability is not None
    assert found[0].probability < 0.5
    rows = list(csv.DictReader(suspects_csv([*found, Suspect("=1.png", "+a", "b", 0.1, "c")]).splitlines()))
    assert rows[0]["label"] == "blue"
    assert (rows[-1]["path"], rows[-1]["label"]) == ("'=1.png", "'+a")
