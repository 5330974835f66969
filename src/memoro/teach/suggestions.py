"""Which images to look at next, and why."""

from __future__ import annotations

from collections.abc import Sequence
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
    if by == "auto":
        cold = len(scene.labelled) < COLD * max(LEAST_CLASSES, len(scene.labels))
        by = "groups" if cold or margin is None else "spread"
    if by == "groups":
        return _one_of_each_group(scene, count, seed)
    if by == "unlike":
        chosen = _spread(scene, torch.ones(len(scene.candidates)), count)
        return [Suggestion(at, "unlike anything labelled") for at in chosen]
    if margin is None:
        raise TeachError(f"there are no guesses to choose by {by!r} yet: label images of two classes first.")
    if by == "spread":
        order = _positions(scene, _spread(scene, (1 - margin).clamp(min=1e-3).square(), count))
    elif by == "border":
        order = _border(scene, margin, count)
    else:
        order = margin.argsort(stable=True)[:count]
    reason = _border_reason if by == "border" else _unsure_reason
    return [Suggestion(int(scene.candidates[at]), reason(scene, at)) for at in order.tolist()]


LEAST_CLASSES = 2


def _margin(scene: Scene) -> Tensor | None:
    """(c) how far a guess is ahead of the next one, from 0 to 1; None where there are none, or they are numbers."""
    if scene.answers is None or scene.kind == "regression":
        return None
    if scene.kind == "multilabel":
        return (scene.answers - 0.5).abs().min(dim=1).values * 2
    best = scene.answers.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def _spread(scene: Scene, weight: Tensor, count: int) -> list[int]:
    """Images one after the other, each with the largest product of weight and squared distance to what is labelled or
    was chosen before."""
    tokens = scene.tokens[scene.candidates]
    distance = _distance(tokens, scene.tokens[scene.labelled])
    chosen = []
    for _ in range(count):
        at = int((distance * weight).argmax())
        chosen.append(int(scene.candidates[at]))
        distance = torch.minimum(distance, _distance(tokens, tokens[at : at + 1]))
        distance[at] = -1.0
    return chosen


def _distance(tokens: Tensor, others: Tensor) -> Tensor:
    """(n) squared distances to the nearest of some tokens; 4, the largest one there can be, without any."""
    if not len(others):
        return tokens.new_full((len(tokens),), 4.0)
    parts = [2 - 2 * (block @ others.T).max(dim=1).values for block in torch.split(tokens, BLOCK)]
    return torch.cat(parts).clamp(min=0)


def _one_of_each_group(scene: Scene, count: int, seed: int) -> list[Suggestion]:
    """The most typical image of each group, large groups first and those with decided images last."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.cat([scene.labelled, scene.candidates])
    sample = known[torch.randperm(len(known), generator=generator)[:MOST_GROUPED]]
    centers = _centers(scene.tokens[sample], len(scene.labelled) + count, generator)
    group, near = _nearest(scene.tokens[known], centers)
    sizes = group.bincount(minlength=len(centers))
    group_of, near_of = group[len(scene.labelled) :], near[len(scene.labelled) :]
    decided = group[: len(scene.labelled)].bincount(minlength=len(centers))
    order = sorted(range(len(centers)), key=lambda one: (int(decided[one]), -int(sizes[one])))
    chosen: list[Suggestion] = []
    rest = near_of.clone()
    while len(chosen) < count:
        before = len(chosen)
        for one in order:
            members = ((group_of == one) & (rest > -2)).nonzero().flatten()
            if len(members) and len(chosen) < count:
                at = members[rest[members].argmax()]
                rest[at] = -3.0
                reason = f"typical of {int(sizes[one])} that look alike" if sizes[one] > 1 else "like no other"
                chosen.append(Suggestion(int(scene.candidates[at]), reason))
        if len(chosen) == before:
            break
    return chosen


def _centers(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(k, dim) the centres of groups, by k-means."""
    count = min(count, len(tokens))
    first = int(torch.randint(len(tokens), (1,), generator=generator))
    centers = [tokens[first]]
    distance = _distance(tokens, tokens[first : first + 1])
    for _ in range(count - 1):
        total = float(distance.sum())
        draw = torch.multinomial(distance, 1, generator=generator) if total > 0 else torch.tensor([0])
        centers.append(tokens[int(draw)])
        distance = torch.minimum(distance, _distance(tokens, tokens[draw]))
    found = torch.stack(centers)
    for _ in range(ROUNDS):
        group, _ = _nearest(tokens, found)
        sums = torch.zeros_like(found).index_add_(0, group, tokens)
        empty = group.bincount(minlength=len(found)) == 0
        found = torch.where(empty[:, None], found, torch.nn.functional.normalize(sums, dim=1))
    return found


def _nearest(tokens: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """(n) the number of the most similar centre of each token, and how similar it is."""
    parts = [(block @ centers.T).max(dim=1) for block in torch.split(tokens, BLOCK)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def _border(scene: Scene, margin: Tensor, count: int) -> Tensor:
    """Images between two classes, of different pairs in turn."""
    assert scene.answers is not None
    if scene.kind == "multilabel":
        return margin.argsort(stable=True)[:count]
    pairs = scene.answers.topk(2, dim=1).indices.sort(dim=1).values
    number = pairs[:, 0] * len(scene.labels) + pairs[:, 1]
    turn: dict[int, int] = {}
    ranked = []
    for at in margin.argsort(stable=True).tolist():
        pair = int(number[at])
        turn[pair] = turn.get(pair, -1) + 1
        ranked.append((turn[pair], float(margin[at]), at))
    return torch.tensor([at for _, _, at in sorted(ranked)[:count]])


def _positions(scene: Scene, chosen: Sequence[int]) -> Tensor:
    place = {image: at for at, image in enumerate(scene.candidates.tolist())}
    return torch.tensor([place[image] for image in chosen])


def _unsure_reason(scene: Scene, at: int) -> str:
    assert scene.answers is not None
    if scene.kind == "multilabel":
        return f"unsure about {scene.labels[int((scene.answers[at] - 0.5).abs().argmin())]}"
    first, second = (scene.labels[label] for label in scene.answers[at].topk(2).indices.tolist())
    return f"unsure: {first} or {second}"


def _border_reason(scene: Scene, at: int) -> str:
    assert scene.answers is not None
    if scene.kind == "multilabel":
        return _unsure_reason(scene, at)
    first, second = (scene.labels[label] for label in scene.answers[at].topk(2).indices.tolist())
    return f"between {first} and {second}"
