"""Distil a small plain ViT from a large pre-trained one, on a CPU, in an hour or two.

    python scripts/distill.py --teacher HUB_ID_OR_FOLDER --data a.zip b.zip photos/ --out memoro-tiny/

Four ideas make that possible with a few ten thousand images:

1. The teacher sees every view (a crop of an image) once. Its tokens are kept on disk, so an epoch of the
   student costs no teacher time. Both cut an image into the same grid, so patch tokens can be compared too.
2. The student does not start from noise but as a narrow copy of the teacher, fitted layer by layer with least
   squares (`shrink`): gradient descent only has to repair what the narrowing lost.
3. Small sources get more views per image than large ones, so no source drowns the others.
4. In the end, the class token gets coordinates that a linear head learns quickly (`whiten_output`).

Sources are zip files or folders of images. Where a source has a `train/` folder, only that is read: `test/`
and `val/` stay unseen. Cache and checkpoint are kept in `--work`; with `--resume` the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from distillation.classifier import add_classifier
from distillation.export import export
from distillation.linear import least_squares, set_linear
from distillation.narrowing import shrink
from distillation.sources import Source
from distillation.tokencache import Teacher, TokenCache
from distillation.views import View, is_mixed, plan_views, to_tensor
from distillation.whitening import whiten_output

STUDENT: dict[str, Any] = {
    "image_size": 112,
    "patch_size": 14,
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_hidden_layers": 12,
    "intermediate_size": 768,
    "layer_norm_eps": 1e-6,
}
REPORT_EVERY, SAVE_EVERY = 50, 200  # steps


class Labels:
    """The classes of all sources that have any, one after the other, and the class of each row of the plan."""

    def __init__(self, sources: list[Source], plan: list[View], seed: int) -> None:
        pairs = [(view.source, sources[view.source].class_of(view.name)) for view in plan]
        classes = {pair: at for at, pair in enumerate(sorted({pair for pair in pairs if pair[1] is not None}))}
        self.source_of_class = torch.tensor([source for source, _ in classes], dtype=torch.long)
        self.source_of_row = torch.tensor([view.source for view in plan])
        self.of_row = torch.tensor(
            [
                -1 if pair[1] is None or is_mixed(view, row, seed) else classes[pair]
                for row, (pair, view) in enumerate(zip(pairs, plan, strict=True))
            ]
        )

    def loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Cross-entropy over the classes of each row's own source; rows without a label do not count."""
        others = self.source_of_class[None] != self.source_of_row[rows][:, None]
        labels = self.of_row[rows]
        labelled = labels >= 0
        if not labelled.any():
            return logits.sum() * 0
        return F.cross_entropy(logits.masked_fill(others, -1e9)[labelled], labels[labelled])


def spread_evenly(tokens: Tensor, even: float) -> Tensor:
    """The matrix (dim, dim) that scales centred tokens (n, dim) to a mean variance of 1.

    With `even` 0, each channel has the same variance; with 1, each principal direction; in between, a direction of
    little variance counts more than by its variance. Classes that look alike are told apart by such directions.
    """
    tokens = tokens.double()
    channels = 1 / (tokens.std(0) + 1e-3)
    scaled = tokens * channels
    variances, directions = torch.linalg.eigh(scaled.T @ scaled / len(scaled))
    variances = variances.clamp(min=1e-3 * float(variances.mean()))
    matrix = channels[:, None] * (directions * variances ** (-even / 2))
    return (matrix / (tokens @ matrix).square().mean().sqrt()).float()


class Matcher(nn.Module):
    """The student with linear maps from its width to the teacher's and to the labels, which are dropped at the end."""

    class_mean: Tensor
    class_scale: Tensor
    patch_mean: Tensor
    patch_std: Tensor

    def __init__(self, student: Any, tokens: Tensor, classes: int, even: float) -> None:
        super().__init__()
        self.vit, width, dim = student.vit, student.config.hidden_size, tokens.shape[-1]
        self.class_map, self.patch_map = nn.Linear(width, dim), nn.Linear(width, dim)
        self.label_map = nn.Linear(width, max(classes, 1))
        # tokens are compared in units of their own spread, so that no loud channel drowns the quiet ones
        first, rest = tokens[:, 0], tokens[:, 1:].flatten(0, 1)
        self.register_buffer("class_mean", first.mean(0))
        self.register_buffer("class_scale", spread_evenly(first - first.mean(0), even))
        self.register_buffer("patch_mean", rest.mean(0))
        self.register_buffer("patch_std", rest.std(0) + 1e-3)

    def standard(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        first, rest = tokens[:, 0], tokens[:, 1:]
        return (first - self.class_mean) @ self.class_scale, (rest - self.patch_mean) / self.patch_std

    @torch.no_grad()
    def solve_maps(self, pixels: Tensor, tokens: Tensor) -> None:
        """Begin with the best maps for the student as it is, or it would be bent to fit random ones."""
        states = torch.cat([self.vit(batch).last_hidden_state for batch in pixels.split(64)])
        first, rest = self.standard(tokens)
        set_linear(self.class_map, *least_squares(states[:, 0], first, torch.ones(len(first))))
        set_linear(self.patch_map, *least_squares(states[:, 1:], rest, torch.ones(rest.shape[:2])))

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What part of the teacher's variance the student misses, of class tokens and of patch tokens; label logits."""
        states = self.vit(pixels).last_hidden_state
        first, rest = self.standard(tokens)
        missed = F.mse_loss(self.class_map(states[:, 0]), first), F.mse_loss(self.patch_map(states[:, 1:]), rest)
        return *missed, self.label_map(states[:, 0])


def new_optimizer(matcher: Matcher) -> torch.optim.Optimizer:
    """AdamW with steps relative to the size of a layer's weights: after `shrink` they differ a hundredfold.

    One rate for all is too much for small ones (the copy breaks) or too little for large ones. Norms stay as
    they are: the layers that follow them can do whatever they could.
    """
    parameters, groups = dict(matcher.named_parameters()), []
    for name, parameter in parameters.items():
        if "layernorm" in name:
            parameter.requires_grad_(False)
            continue
        weight = parameters[name.removesuffix("bias") + "weight"] if name.endswith("bias") else parameter
        scale = float(weight.detach().square().mean().sqrt())
        decay = 0.01 if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "scale": scale, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def train(matcher: Matcher, cache: TokenCache, labels: Labels, args: argparse.Namespace) -> None:
    """AdamW, warm-up, cosine decay. Checkpoints hold all state: a stopped run goes on as if it had not.

    The rate depends on the step and on `--steps` alone: resumed with another number, it ends sooner or later.
    """
    optimizer = new_optimizer(matcher)
    generator = torch.Generator().manual_seed(args.seed)
    path, first = args.work / "checkpoint.pt", 0
    if args.resume and path.exists():
        state = torch.load(path, weights_only=True)
        matcher.load_state_dict(state["matcher"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        first = state["step"]
        print(f"resumed at step {first}", flush=True)
    run = torch.compile(matcher) if args.compile else matcher
    begun, missed = time.monotonic(), torch.zeros(3)
    weights = torch.tensor([args.class_weight, 1.0, args.label_weight])
    matcher.train()
    for done in range(first + 1, args.steps + 1):
        rate = args.lr * min(1.0, done / 100) * (0.5 + 0.5 * math.cos(math.pi * (done - 1) / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        rows, pixels, tokens = cache.draw(args.batch, generator)
        *distances, logits = run(pixels, tokens)
        losses = torch.stack([*distances, labels.loss(logits, rows)])
        (losses * weights).sum().backward()
        nn.utils.clip_grad_norm_(matcher.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        missed += losses.detach() / REPORT_EVERY
        if done % REPORT_EVERY == 0:
            speed = (done - first) * args.batch / (time.monotonic() - begun)
            left = (args.steps - done) * args.batch / speed / 60
            text = (
                f"missed of class tokens {missed[0]:.3f}, of patch tokens {missed[1]:.3f}, label loss {missed[2]:.3f}"
            )
            print(f"step {done}/{args.steps}: {text}; {speed:.0f} views/s, {left:.0f} min left", flush=True)
            missed.zero_()
        if done % SAVE_EVERY == 0 or done == args.steps:
            state = {"matcher": matcher.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save({**state, "generator": generator.get_state()}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    matcher.eval()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil a small ViT from a large one.")
    add = parser.add_argument
    add("--teacher", required=True, help="hub id or folder of a ViT with a class token")
    add(
        "--data",
        required=True,
        nargs="+",
        help="zip files or folders of images; PATH:20 takes 20 views of each image (4)",
    )
    add("--out", required=True, type=Path, help="folder for the finished model")
    add("--work", type=Path, default=Path("distill-work"), help="folder for cache and checkpoint")
    add("--classes", type=Path, help="source whose folders the classifier learns (default: first of --data)")
    add("--resume", action="store_true", help="go on from the checkpoint in --work")
    add("--start", default="shrink", help="shrink: narrow copy of the teacher; random; or a finished model's folder")
    add("--shrink-images", type=int, default=1024, help="images that the narrow copy is fitted on")
    add(
        "--even", type=float, default=0.5, help="how evenly the class token's directions count in the loss, from 0 to 1"
    )
    add("--class-weight", type=float, default=2.0, help="weight of class tokens; patch tokens have 1")
    add("--label-weight", type=float, default=0.1, help="weight of the labels of sources with class folders")
    add("--limit-views", type=int, help="let the teacher see only the first so many views of the plan")
    add("--teacher-only", action="store_true", help="fill the cache and stop: a second process can train meanwhile")
    add("--steps", type=int, default=8000)
    add("--batch", type=int, default=32)
    add("--lr", type=float, default=2e-3, help="largest step, relative to the size of the weights")
    add("--compile", action="store_true", help="compile models: a quarter faster, needs a C++ compiler")
    add("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    sources = [Source.parse(text) for text in args.data]
    plan = plan_views(sources, args.seed)
    side = STUDENT["image_size"]
    grid = side // STUDENT["patch_size"]
    teacher = Teacher(args.teacher, grid, args.compile)
    if teacher.side != side:
        raise SystemExit(
            f"the student's {grid} x {grid} patches are {teacher.side} px to the teacher: make its image_size that"
        )
    # another plan gets another cache
    key = json.dumps([[astuple(view) for view in plan], args.teacher, side, grid, args.seed])
    folder = args.work / f"cache-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    cache = TokenCache.open(folder, len(plan), side, grid**2 + 1, teacher.dim)
    cache.fill(sources, plan, teacher, args.seed, args.limit_views or len(plan))
    if args.teacher_only:
        return

    if args.start in {"shrink", "random"}:
        student = ViTForImageClassification(ViTConfig(**STUDENT)).eval()
    else:
        student = ViTForImageClassification.from_pretrained(args.start, dtype=torch.float32).eval()
    sample = np.sort(np.random.default_rng(args.seed).permutation(cache.done)[:4096])
    pixels, tokens = to_tensor(cache.pixels[sample]), torch.from_numpy(cache.tokens[sample]).float()
    labels = Labels(sources, plan, args.seed)
    matcher = Matcher(student, tokens, len(labels.source_of_class), args.even)
    if not (args.resume and (args.work / "checkpoint.pt").exists()):
        if args.start == "shrink":
            shrink(teacher, student, cache.pixels[: min(args.shrink_images, cache.done)])
        matcher.solve_maps(pixels, tokens)
    del teacher
    train(matcher, cache, labels, args)
    whiten_output(student, pixels)
    add_classifier(student, Source(args.classes) if args.classes else sources[0], args.seed)
    export(student, args.out)
    print(f"written: {args.out}", flush=True)


if __name__ == "__main__":
    main()
