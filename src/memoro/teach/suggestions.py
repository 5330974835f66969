"""Which images to look at next, and why."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from memoro.errors import TeachError
from memoro.heads import HeadKind

WAYS = {
    "auto": "what helps most",
    "uncertainty": "the guess is unsure",
    "unlike": "unlike anything labelled",
    "groups": "one of each group of images that look alike",
    "border": "near the border of two classes",
}
"""Ways to choose, by name."""
COLD = 2
"""Labels of each class until which groups say more than guesses do."""
SURE = 0.95
"""Probability from which a guess may be accepted without a closer look."""
MOST_GROUPED = 4000
"""Images that groups are found among; with more, a sample of them."""
ROUNDS = 10
BLOCK = 4096


class Suggestion(NamedTuple):
    """An image to look at."""

    image: int
    reason: str


class Scene(NamedTuple):
    """What is known when images are suggested."""

    kind: HeadKind
    labels: tuple[str, ...]
    tokens: Tensor
    """(n, dim) of length 1, of all images that could be read so far."""
    labelled: Tensor
    """(l) which of them have been decided."""
    candidates: Tensor
    """(c) which of them may be suggested."""
    answers: Tensor | None
    """(c, labels) the probabilities, or numbers, of the candidates, if there are guesses yet."""


def suggest(scene: Scene, count: int, by: str = "auto", seed: int = 0) -> list[Suggestion]:
    """Images to look at next, the most useful one first. Positions are those in the scene."""
    if by not in WAYS:
        raise TeachError(f"there is no way {by!r} to choose images: use one of {', '.join(WAYS)}.")
    count = min(count, len(scene.candidates))
    if count <= 0:
        return []
    margin = _margin(scene)
    if by == "groups" or (by == "auto" and (margin is None or len(scene.labelled) < COLD * max(2, len(scene.labels)))):
        return _one_of_each_group(scene, count, seed)
    if by == "unlike":
        chosen = _spread(scene, torch.ones(len(scene.candidates)), count)
        return [Suggestion(int(scene.candidates[at]), "unlike anything labelled") for at in chosen]
    if margin is None:
        raise TeachError(f"there are no guesses to choose by {by!r} yet: label images of two classes first.")
    if by == "auto":
        order = _spread(scene, (1 - margin).clamp(min=1e-3).square(), count)
    else:
        order = margin.argsort(stable=True).tolist()
        if by == "border":
            order = _in_turn(scene, order)
    return [Suggestion(int(scene.candidates[at]), _reason(scene, at, by)) for at in order[:count]]


def _margin(scene: Scene) -> Tensor | None:
    """(c) how far a guess is ahead of the next one, from 0 to 1; None without guesses, and for numbers."""
    if scene.answers is None or scene.kind == "regression":
        return None
    if scene.kind == "multilabel":
        return (scene.answers - 0.5).abs().min(dim=1).values * 2
    best = scene.answers.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def _spread(scene: Scene, weight: Tensor, count: int) -> list[int]:
    """Candidates one after the other, each with the largest product of weight and squared distance to what is labelled
    or was chosen before."""
    tokens = scene.tokens[scene.candidates]
    distance = _distance(tokens, scene.tokens[scene.labelled])
    chosen: list[int] = []
    for _ in range(count):
        chosen.append(int((distance * weight).argmax()))
        distance = torch.minimum(distance, _distance(tokens, tokens[chosen[-1:]]))
        distance[chosen[-1]] = -1.0
    return chosen


def _distance(tokens: Tensor, others: Tensor) -> Tensor:
    """(n) squared distances to the nearest of some tokens; 4, the largest one there can be, without any."""
    if not len(others):
        return tokens.new_full((len(tokens),), 4.0)
    return (2 - 2 * _nearest(tokens, others)[1]).clamp(min=0)


def _one_of_each_group(scene: Scene, count: int, seed: int) -> list[Suggestion]:
    """The most typical image of each group, large groups first and those with decided images last."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.cat([scene.labelled, scene.candidates])
    sample = known[torch.randperm(len(known), generator=generator)[:MOST_GROUPED]]
    centers = _centers(scene.tokens[sample], len(scene.labelled) + count, generator)
    group, near = _nearest(scene.tokens[known], centers)
    sizes, labelled = group.bincount(minlength=len(centers)).tolist(), len(scene.labelled)
    decided = group[:labelled].bincount(minlength=len(centers)).tolist()
    members: list[list[int]] = [[] for _ in sizes]
    for at in near[labelled:].argsort(descending=True, stable=True).tolist():
        members[int(group[labelled + at])].append(at)
    order = sorted(range(len(sizes)), key=lambda one: (decided[one], -sizes[one]))
    rounds = [(turn, one) for turn in range(max(sizes)) for one in order if turn < len(members[one])]
    return [
        Suggestion(
            int(scene.candidates[members[one][turn]]),
            f"typical of {sizes[one]} that look alike" if sizes[one] > 1 else "like no other",
        )
        for turn, one in rounds[:count]
    ]


def _centers(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(k, dim) the centres of groups, by k-means."""
    chosen = torch.randint(len(tokens), (1,), generator=generator)
    distance = _distance(tokens, tokens[chosen])
    while len(chosen) < min(count, len(tokens)) and float(distance.sum()) > 0:
        chosen = torch.cat([chosen, torch.multinomial(distance, 1, generator=generator)])
        distance = torch.minimum(distance, _distance(tokens, tokens[chosen[-1:]]))
    centers = tokens[chosen]
    for _ in range(ROUNDS):
        group, _ = _nearest(tokens, centers)
        sums = torch.zeros_like(centers).index_add_(0, group, tokens)
        empty = group.bincount(minlength=len(centers)) == 0
        centers = torch.where(empty[:, None], centers, torch.nn.functional.normalize(sums, dim=1))
    return centers


def _nearest(tokens: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """(n) the number of the most similar centre of each token, and how similar it is."""
    parts = [(block @ centers.T).max(dim=1) for block in torch.split(tokens, BLOCK)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def _in_turn(scene: Scene, order: list[int]) -> list[int]:
    """Images in this order, but of different pairs of classes in turn."""
    assert scene.answers is not None
    if scene.kind == "multilabel":
        return order
    pairs = [tuple(sorted(pair)) for pair in scene.answers.topk(2, dim=1).indices.tolist()]
    seen: Counter[tuple[int, ...]] = Counter()
    turns = {}
    for at in order:
        turns[at] = seen[pairs[at]]
        seen[pairs[at]] += 1
    return sorted(order, key=turns.__getitem__)


def _reason(scene: Scene, at: int, by: str) -> str:
    assert scene.answers is not None
    if scene.kind == "multilabel":
        return f"unsure about {scene.labels[int((scene.answers[at] - 0.5).abs().argmin())]}"
    best = scene.answers[at].topk(2)
    first, second = (scene.labels[label] for label in best.indices.tolist())
    if by == "border":
        return f"between {first} and {second}"
    if float(best.values[0]) >= SURE:  # what is left when all others are decided
        return "unlike what is labelled" if by == "auto" else "no other guess is less sure"
    return f"unsure: {first} or {second}"
