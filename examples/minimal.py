"""Learnable memory from scratch, in one file: a tiny ViT, memory, the mask, two tasks, concatenation, extension.

    pip install torch scikit-learn
    python examples/minimal.py

Follows "Fine-tuning Image Transformers using Learnable Memory" (Sandler et al., CVPR 2022). Everything is one dense
sequence here, as in the paper, to be read; memoro computes the same with one thin stream per task. About a minute.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

DIM, DEPTH, HEADS, CELLS, PATCH = 32, 3, 4, 5, 2
PATCHES = (8 // PATCH) ** 2


class Block(nn.Module):
    """One layer. Memory joins the keys and values, before the norm; it has no queries, and is dropped afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """tokens (b, n, DIM), memory (m, DIM), mask (n, n + m): True where a row may look at a column."""
        seen = self.norm1(torch.cat([tokens, memory.expand(len(tokens), -1, -1)], dim=1))

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        queries = split(self.q(seen[:, : tokens.shape[1]]))
        mixed = F.scaled_dot_product_attention(queries, split(self.k(seen)), split(self.v(seen)), attn_mask=mask)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.norm2(tokens))


class Task(nn.Module):
    """A class token, memory cells for every layer, a head; and the tasks that it extends."""

    def __init__(self, base: ViT, classes: int, extends: tuple[Task, ...] = ()) -> None:
        super().__init__()
        self.token = nn.Parameter(base.token.detach().clone())
        self.memory = nn.Parameter(0.02 * torch.randn(DEPTH, CELLS, DIM))
        self.head = nn.Linear(DIM, classes)
        self.extends = tuple(extends)

    def family(self) -> list[Task]:
        """The task and all its ancestors."""
        found: list[Task] = [self]
        for parent in self.extends:
            found += [one for one in parent.family() if one not in found]
        return found


class ViT(nn.Module):
    """The backbone: patches of 2 x 2 pixels, a class token, a classifier of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, DIM)
        self.token = nn.Parameter(0.02 * torch.randn(DIM))
        self.position = nn.Parameter(0.02 * torch.randn(1 + PATCHES, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, classes)

    def forward(self, images: Tensor, tasks: tuple[Task, ...] = (), masked: bool = True) -> list[Tensor]:
        """Logits of the backbone's own classifier, then of each task. All share one pass."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        tokens = self.patch(patches) + self.position[1:]
        # Every class token, old or new, has the position embedding of index 0.
        first = torch.stack([self.token, *(task.token for task in tasks)]) + self.position[0]
        first = first.expand(len(images), -1, -1)
        tokens = torch.cat([first[:, :1], tokens, first[:, 1:]], dim=1)
        mask = build_mask(tasks).to(images.device) if masked and tasks else None
        for layer, block in enumerate(self.blocks):
            cells = [task.memory[layer] for task in tasks]
            tokens = block(tokens, torch.cat(cells) if cells else tokens.new_zeros(0, DIM), mask)
        tokens = self.norm(tokens)
        return [self.head(tokens[:, 0]), *(task.head(tokens[:, 1 + PATCHES + i]) for i, task in enumerate(tasks))]


def build_mask(tasks: tuple[Task, ...]) -> Tensor:
    """Who sees whom. Rows: class token, patches, C_1 … C_k. Columns: the same, then M_1 … M_k.

    The backbone's tokens see each other only. A task sees them, itself and its ancestors, never the other tasks.
    """
    base, count = 1 + PATCHES, len(tasks)
    mask = torch.zeros(base + count, base + count + count * CELLS, dtype=torch.bool)
    mask[:, :base] = True
    for row, task in enumerate(tasks):
        for column, other in enumerate(tasks):
            if any(other is one for one in task.family()):
                mask[base + row, base + column] = True
                start = base + count + column * CELLS
                mask[base + row, start : start + CELLS] = True
    return mask


Data = tuple[Tensor, Tensor]


def train(parameters: list[nn.Parameter], answer, data: Data, steps: int, lr: float = 3e-3) -> None:
    images, targets = data
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(images), (32,))
        F.cross_entropy(answer(images[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def train_task(base: ViT, task: Task, data: Data, steps: int) -> None:
    """Trains the task's own parameters. Its ancestors take part in the pass, and stay as they are."""
    together = tuple(task.family())
    train(list(task.parameters()), lambda images: base(images, together)[1], data, steps)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    return (logits.argmax(-1) == targets).float().mean().item()


def load() -> dict[str, tuple[Data, Data]]:
    """(train, test) of each task: the backbone knows 0 to 4 only."""
    found = load_digits()
    images, digits = torch.tensor(found.images, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, digits = images[order], digits[order]

    def split(chosen: Tensor, targets: Tensor) -> tuple[Data, Data]:
        own, cut = (images[chosen], targets[chosen]), int(chosen.sum()) * 3 // 4
        return (own[0][:cut], own[1][:cut]), (own[0][cut:], own[1][cut:])

    everything = torch.ones(len(digits), dtype=torch.bool)
    return {
        "base: 0 to 4": split(digits < 5, digits),
        "high: 5 to 9": split(digits >= 5, digits - 5),
        "parity": split(everything, digits % 2),
    }


def main(steps: int = 800) -> dict[str, float]:
    torch.manual_seed(0)
    (old, old_test), (high_data, high_test), (parity_data, parity_test) = load().values()
    base = ViT(classes=5)
    train(list(base.parameters()), lambda images: base(images)[0], old, steps)
    base.requires_grad_(False)

    # Two tasks, trained apart, and one that extends the first: it may look at what `high` has learned.
    high, parity = Task(base, 5), Task(base, 2)
    train_task(base, high, high_data, steps)
    train_task(base, parity, parity_data, steps)
    child = Task(base, 2, extends=(high,))
    before = [parameter.clone() for parameter in high.parameters()]
    train_task(base, child, parity_data, steps)
    assert all(torch.equal(a, b) for a, b in zip(before, high.parameters(), strict=True)), "a parent never changes"

    with torch.no_grad():
        results = {
            "backbone, 0 to 4": accuracy(base(old_test[0])[0], old_test[1]),
            "high, 5 to 9": accuracy(base(high_test[0], (high,))[1], high_test[1]),
            "parity": accuracy(base(parity_test[0], (parity,))[1], parity_test[1]),
            "parity, extends high": accuracy(base(parity_test[0], (child, high))[1], parity_test[1]),
            "high, with parity, no mask": accuracy(base(high_test[0], (high, parity), masked=False)[1], high_test[1]),
        }
        # Concatenation: all in one pass. In float64, since a longer sequence rounds differently.
        for module in (base, high, parity, child):
            module.double()
        images = parity_test[0].double()
        together = base(images, (high, parity, child))
        alone = [base(images)[0], base(images, (high,))[1], base(images, (parity,))[1], base(images, (child, high))[1]]
        for name, one, other in zip(("backbone", "high", "parity", "child"), together, alone, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-10), f"{name} changes when tasks are put together"
        without = base(images, (high, parity, child), masked=False)
        assert all(not torch.allclose(one, other, atol=1e-3) for one, other in zip(without, alone, strict=True))
        orphan = base(images, (high, Task(base, 2).double()))[1]
        assert torch.allclose(orphan, alone[1], rtol=0, atol=1e-10), "a stranger's task does not matter"
    return results


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:28} {value:.3f}")
    print("The backbone and all tasks answer the same alone and together; without the mask they do not.")
