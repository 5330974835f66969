"""What the paper says, and what each table is about. Figures are the paper's."""

from __future__ import annotations

PAPER_TABLE2 = (
    ("SUN-397", 76.9, 75.9, 76.4, 77.0, 76.8, 76.9, 76.9),
    ("i-Naturalist", 54.0, 46.3, 48.7, 49.4, 50.1, 50.0, 50.0),
    ("CIFAR-100", 91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9),
    ("Places-365", 55.9, 50.9, 52.4, 53.3, 53.8, 53.9, 54.1),
)
"""Validation accuracy in %: full, head, head and class token, memory with 1, 5, 10 and 20 cells."""

PAPER_TABLE5 = {
    "full": (
        "80M, ≈1 GFLOP",
        "All of the encoder is 87.5M; its twelve layers alone are 85.1M. A model of its own needs a pass of its"
        " own: 8.8 GFLOP, 4.4 G multiply-adds. ≈1 G is neither; the nearest is a pass at 112 px (0.9 G "
        "multiply-adds). The paper does not say how it counted.",
    ),
    "head": (
        "768·k, 0",
        "As in the paper, plus k biases.",
    ),
    "class-full": (
        "768, 0",
        "As in the paper: the token takes the place of the pre-trained one.",
    ),
    "memory-full 5": (
        "768·12·5, ≈25 MFLOP",
        "Parameters as in the paper, plus the class token. Keys and values of the cells take 142 MFLOP, but do "
        "not depend on the image; attention to them takes 9. At 384 px (145 tokens), attention to them alone "
        "would take 26.7.",
    ),
}
"""By method: the paper's parameters and FLOPs, and why the count differs."""

INTRO = {
    "table2": (
        "The paper's Table 2 compares full fine-tuning, a head, head and class token, and memory with 1 to 20 "
        "cells. Here `class-full` and `memory-full N` are its regimes: every token sees memory. `class` and "
        "`memory N` have the paper's mask, which lets tasks be put together; `side 8` (low-rank weights of the "
        "task's token) and `lora 8` are not in the paper. Compare methods within a row: rows differ in the length of "
        "the training."
    ),
    "table4": (
        "The paper's Table 4 (i-Naturalist, parameters without the head): memory with 5 cells 50.1 %, 46K · "
        "adapters with a bottleneck of 5 49.9 %, 737K · both 50.3 %, 783K. Two adapters per layer of width 5 "
        "have 184,320 weights on ViT-B, a quarter of that; `adapter 20` has the paper's number. The paper also "
        "says that memory which is propagated from layer to layer generally hurts: `propagated 5`, and with a "
        "learned update `propagated-additive 5`."
    ),
    "table5": (
        "What a method adds to ViT-B/32 at 224 px for one image, counted by running it "
        "(`torch.utils.flop_counter`, random weights; two FLOPs for a multiplication and an addition). Head "
        "excluded: k classes have 768·k weights, k biases and 1,536·k FLOPs with every method. Masked methods "
        "are counted as memoro runs them: one token of its own for each task, keys and values of memory "
        "computed when the task is attached."
    ),
    "naive-concat": (
        "Models trained apart, each on its own set, put into one pass one after the other. Without masks "
        "(`NaiveConcatenation` of `memory-full` models), every token sees every memory. With masks (`compose` "
        "of `memory` tasks), nothing changes. The paper, i-Naturalist: 50.0 alone, 28.1 with Places, 27.8 with "
        "CIFAR, 17.3 with SUN."
    ),
    "masking": (
        "Full attention against the mask, with memory and without: `class-full` and `memory-full N` let every "
        "token see the new class token and memory, `class` and `memory N` only the task's own. Both are trained with "
        "the same optimiser, steps and seeds, at the better of two learning rates each. The paper finds that the mask "
        "costs little once there is memory."
    ),
    "fork": (
        "Accuracy over the layer at which a task leaves the backbone (its fork), as a fraction of the depth: 0 "
        "is the paper, 1 a linear head. A task's cost, file and cached features shrink to 1 − fork of those of a "
        "task from layer 0. Not in the paper."
    ),
    "extension": (
        "A task that extends another (it attends to the other's class token and memory) against the same task "
        "alone, over the number of its training images. Child `classes`: every second class of a set; its "
        "parent knows the classes between them (`sibling classes`), or another set. Child `groups`: whether the"
        " number of an image's class is odd; its parent was trained to tell the classes, on other images. The "
        "paper shows that tasks can be extended, not when it helps."
    ),
    "models": ("Backbones compared. The paper has ViT-B/32, B/16 and L/32; here are those that were given."),
    "lr-stability": (
        "Accuracy on held-out training images over four decades of learning rate, relative to the middle of "
        "each method's range (0.1 with SGD, 0.01 for `full`; 0.001 for `side 8`, which is trained with AdamW). The "
        "paper: full fine-tuning is sensitive to the learning rate, memory stays stable at large ones. 0: diverged. "
        "`full` and `memory-full 5` need passes of their own and have one seed, so no spread."
    ),
}
"""What each table measures, and the paper's claim."""
