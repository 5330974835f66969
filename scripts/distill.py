"""Distil a small plain ViT from a large pre-trained one, on a CPU, in an hour or two.

    python scripts/distill.py --teacher HUB_ID_OR_FOLDER --data a.zip b.zip photos/ --out memoro-tiny/

Three ideas make that possible with a few ten thousand images:

1. The teacher sees every view (a crop of an image) once. Its tokens are kept on disk, so an epoch of the
   student costs no teacher time. Both cut an image into the same grid, so patch tokens can be compared too.
2. The student does not start from noise but as a narrow copy of the teacher, fitted layer by layer with least
   squares (`shrink`): gradient descent only has to repair what the narrowing lost.
3. Small sources get more views per image than large ones, so no source drowns the others.

Sources are zip files or folders of images. Where a source has a `train/` folder, only that is read: `test/`
and `val/` stay unseen. Cache and checkpoint are kept in `--work`; with `--resume` the same command goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import os
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, ViTConfig, ViTForImageClassification

IMAGE_TYPES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SPLITS = {"train", "test", "val", "valid", "validation"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the student's: ImageNet's
STUDENT: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 8,
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_hidden_layers": 12,
    "intermediate_size": 768,
    "layer_norm_eps": 1e-6,
}
View = tuple[int, str, int]  # number of the source, name of the image, number of the view: 0 is the whole image


class Source:
    """The training images of one zip file or folder. Zip members are decoded in memory, never unpacked."""

    def __init__(self, path: Path) -> None:
        self.path, self.archive = path, None if path.is_dir() else zipfile.ZipFile(path)
        found = self.archive.namelist() if self.archive else [str(p.relative_to(path)) for p in path.rglob("*")]
        images = sorted(name for name in found if Path(name).suffix.lower() in IMAGE_TYPES)
        splits = {name: split_of(name) for name in images}
        self.names = [n for n in images if splits[n] == "train"] or [n for n in images if splits[n] is None]
        if not self.names:
            raise SystemExit(f"{path}: no training images found")

    def read(self, name: str) -> Image.Image | None:
        """The image in RGB, or None where it cannot be decoded: one broken file must not end a long run."""
        try:
            data = self.archive.read(name) if self.archive else (self.path / name).read_bytes()
            return Image.open(io.BytesIO(data)).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, zipfile.BadZipFile):
            print(f"skipped, not readable: {self.path}/{name}", flush=True)
            return None


def split_of(name: str) -> str | None:
    """The outermost folder that names a split: further in, "train" may be a class (as in CIFAR-100)."""
    return next((part for part in Path(name).parts[:-1] if part in SPLITS), None)


def plan_views(sources: list[Source], target: int, low: int, high: int, seed: int) -> list[View]:
    """Everything the teacher is to see.

    A source of n images gets about `target` views, but at least `low` and at most `high` per image; its whole
    images come first. Sources are interleaved in proportion: any beginning of the plan is a fair sample.
    """
    rng, keyed = np.random.default_rng(seed), []
    for index, source in enumerate(sources):
        views = min(high, max(low, round(target / len(source.names))))
        order = [(name, view) for view in range(views) for name in rng.permutation(source.names).tolist()]
        keyed += [((rank + 0.5) / len(order), (index, name, view)) for rank, (name, view) in enumerate(order)]
    return [item for _, item in sorted(keyed)]


def random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The box of a random crop: 30 to 100 % of the area, sides between 3:4 and 4:3."""
    width, height = size
    for _ in range(10):
        area, ratio = width * height * rng.uniform(0.3, 1.0), (4 / 3) ** rng.uniform(-1, 1)
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return x, y, x + w, y + h
    return 0, 0, width, height


def cut_views(
    sources: list[Source], plan: list[View], rows: range, sides: tuple[int, ...], seed: int
) -> tuple[np.ndarray, ...]:
    """Which rows of the plan are readable, then their bytes, once per side length.

    A crop depends on seed and row alone, so that a resumed run cuts what the first one would have cut.
    """
    views = [np.zeros((len(rows), side, side, 3), np.uint8) for side in sides]
    readable = np.zeros(len(rows), bool)
    for at, row in enumerate(rows):
        index, name, view = plan[row]
        if (image := sources[index].read(name)) is None:
            continue
        readable[at] = True
        box = random_box(image.size, np.random.default_rng((seed, row))) if view else None
        for side, pixels in zip(sides, views, strict=True):
            pixels[at] = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box))
    return readable, *views


def to_tensor(pixels: np.ndarray | Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Bytes (n, h, w, 3) as a normalised float tensor (n, 3, h, w)."""
    scaled = torch.as_tensor(pixels).float() / 255
    return ((scaled - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()


def write_json(path: Path, content: Any) -> None:
    """Write to a temporary file, then rename: a reader never sees half a file."""
    path.with_suffix(".tmp").write_text(json.dumps(content, indent=2) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


class Teacher:
    """The frozen large model, at the image size that gives it the student's grid."""

    def __init__(self, name: str, grid: int, compiled: bool) -> None:
        self.model: Any = AutoModel.from_pretrained(name, dtype=torch.float32).eval().requires_grad_(False)
        self.dim: int = self.model.config.hidden_size
        self.grid, self.side = grid, grid * int(self.model.config.patch_size)
        processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil")
        self.mean, self.std = tuple(processor.image_mean), tuple(processor.image_std)
        self.run = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def tokens(self, pixels: np.ndarray) -> Tensor:
        """Class token and patch tokens (n, 1 + grid², dim) after the final norm, without register tokens."""
        states = self.run(pixel_values=to_tensor(pixels, self.mean, self.std)).last_hidden_state
        return torch.cat([states[:, :1], states[:, -(self.grid**2) :]], dim=1)


@dataclass
class Cache:
    """The first `done` views of a plan (bytes) and the teacher's tokens for them (float16), memory-mapped."""

    folder: Path
    pixels: np.memmap
    tokens: np.memmap
    done: int

    @classmethod
    def open(cls, folder: Path, views: int, side: int, tokens: int, dim: int) -> Cache:
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / "done.json"
        done = json.loads(progress.read_text())["done"] if progress.exists() else 0
        mode: Any = "r+" if progress.exists() else "w+"
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", mode, np.uint8, (views, side, side, 3))
        states = np.lib.format.open_memmap(folder / "tokens.npy", mode, np.float16, (views, tokens, dim))
        return cls(folder, pixels, states, done)

    def fill(self, sources: list[Source], plan: list[View], teacher: Teacher, seed: int, end: int) -> None:
        """Let the teacher see what it has not seen yet, up to the view `end`."""
        begun, first, sides = time.monotonic(), self.done, (self.pixels.shape[1], teacher.side)
        while (low := self.done) < end:
            high = min(low + 64, end)
            readable, small, large = cut_views(sources, plan, range(low, high), sides, seed)
            if readable.any():  # a neighbour takes the place of what cannot be read
                small[~readable], large[~readable] = small[readable][0], large[readable][0]
            self.pixels[low:high], self.tokens[low:high] = small, teacher.tokens(large).half().numpy()
            self.done = high
            if high == end or high // 64 % 20 == 0:
                self.pixels.flush()
                self.tokens.flush()
                write_json(self.folder / "done.json", {"done": high})
                rate = (high - first) / (time.monotonic() - begun)
                left = (end - high) / rate / 60
                print(f"teacher: {high}/{end} views, {rate:.0f}/s, {left:.0f} min left", flush=True)

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random views, mirrored at random (the teacher's grid as well), a little brighter or darker."""
        rows = torch.randint(self.done, (size,), generator=generator).numpy()
        pixels, tokens = torch.from_numpy(self.pixels[rows]), torch.from_numpy(self.tokens[rows]).float()
        grid = math.isqrt(tokens.shape[1] - 1)
        mirrored = (torch.rand(size, generator=generator) < 0.5)[:, None, None, None]
        patches = tokens[:, 1:].unflatten(1, (grid, grid))
        patches = torch.where(mirrored, patches.flip(2), patches).flatten(1, 2)
        contrast, brightness = (torch.rand(2, size, 1, 1, 1, generator=generator) - 0.5) * 0.2
        images = to_tensor(torch.where(mirrored, pixels.flip(2), pixels)) * (1 + contrast) + brightness
        return images, torch.cat([tokens[:, :1], patches], dim=1)


def normal_equations(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of weighted least squares from x to y, with a touch of ridge, in double precision."""
    x, y, w = x.flatten(0, -2), y.flatten(0, -2), weights.reshape(-1, 1)
    gram, cross = (x.T @ (w * x)).double(), (x.T @ (w * y)).double()
    return gram + 1e-4 * gram.diagonal().mean() * torch.eye(len(gram)), cross


def least_squares(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that best maps x to y."""
    w = weights[..., None] / weights.sum()
    axes = tuple(range(x.ndim - 1))
    mean_x, mean_y = (w * x).sum(axes), (w * y).sum(axes)
    weight = torch.linalg.solve(*normal_equations(x - mean_x, y - mean_y, weights)).float().T
    return weight, mean_y - weight @ mean_x


def set_linear(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight.data.copy_(weight.reshape(layer.weight.shape))
    layer.bias.data.copy_(bias)


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def best_heads(context: Tensor, update: Tensor, weights: Tensor, heads: int, keep: int) -> list[int]:
    """The `keep` heads from whose outputs the attention's whole update can be predicted best."""
    gram, cross = normal_equations(context, update, weights)
    columns = torch.arange(len(gram)).unflatten(0, (heads, -1))

    def explained(chosen: Iterable[int]) -> float:
        at = columns[list(chosen)].flatten()
        return float((cross[at] * torch.linalg.solve(gram[at][:, at], cross[at])).sum())

    return list(max(itertools.combinations(range(heads), keep), key=explained))


@torch.no_grad()
def shrink(teacher: Teacher, student: Any, small: np.ndarray, large: np.ndarray) -> None:
    """Make the student a narrow copy of a DINOv2-like teacher of the same depth.

    The teacher's residual stream is projected onto the directions that matter most over all layers. Then,
    layer by layer, the student gets the teacher's most useful heads and neurons, and each linear layer is
    solved for what the teacher computes there, given what the student has *so far*. Later layers thus
    make good for errors of earlier ones, for missing heads and neurons, and for missing register tokens.
    """
    config, big, count = student.config, teacher.model, teacher.grid**2 + 1
    if getattr(big, "encoder", None) is None or len(big.encoder.layer) != config.num_hidden_layers:
        raise SystemExit("the teacher is not DINOv2-like or not as deep as the student: use --start random")
    views, pixels = to_tensor(large, teacher.mean, teacher.std), to_tensor(small)
    keep = torch.tensor([0, *range(1 - count, 0)])  # all tokens but registers
    weights = torch.ones(len(small), count)
    weights[:, 0] = 16.0  # one class token against many patches, but it is what heads will read

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def set_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
        """Give every channel mean 0 and spread 1: directions differ a hundredfold in size, and gradient steps
        that suit the quiet ones would tear the loud ones apart."""
        normed = norm(x).flatten(0, 1)
        layer.weight.copy_(1 / (normed.std(0) + 1e-3))
        layer.bias.copy_(-normed.mean(0) * layer.weight)
        return layer(x)

    # directions: principal components of the normed stream over all layers, the last class token above all
    moment = torch.zeros(teacher.dim, teacher.dim)
    for batch in views[:256].split(64):
        states = [norm(h[:, keep]) for h in big(pixel_values=batch, output_hidden_states=True).hidden_states]
        for state in states:
            weighted = state * weights[: len(state), :, None] / weights[0].sum()
            moment += state.flatten(0, 1).T @ weighted.flatten(0, 1)
        moment += len(states) * states[-1][:, 0].T @ states[-1][:, 0]
    down = torch.linalg.eigh(moment).eigenvectors[:, -config.hidden_size :].T.flip(0)
    down = down @ (torch.eye(teacher.dim) - 1 / teacher.dim)

    x = torch.cat([big.embeddings(batch) for batch in views.split(64)])
    position = big.embeddings.interpolate_pos_encoding(x[:1, keep], teacher.side, teacher.side)
    mine = student.vit.embeddings
    mine.position_embeddings.copy_(position @ down.T)
    mine.cls_token.copy_(big.embeddings.cls_token @ down.T)
    patches = F.unfold(pixels, config.patch_size, stride=config.patch_size).transpose(1, 2)
    target = (x[:, keep] - position)[:, 1:] @ down.T
    set_linear(mine.patch_embeddings.projection, *least_squares(patches, target, weights[:, 1:]))
    z = torch.cat([mine(batch) for batch in pixels.split(64)])

    heads, kept_heads = big.config.num_attention_heads, config.num_attention_heads
    for number, (theirs, ours) in enumerate(zip(big.encoder.layer, student.vit.layers, strict=True)):
        given, of, to = theirs.norm1(x), theirs.attention, ours.attention
        parts = of.q_proj(given), of.k_proj(given), of.v_proj(given)
        context = attend(*parts, heads)
        update = theirs.layer_scale1(of.o_proj(context))
        chosen = best_heads(context[:, keep], update[:, keep] @ down.T, weights, heads, kept_heads)
        own = set_norm(ours.layernorm_before, z)
        for part, layer in zip(parts, (to.q_proj, to.k_proj, to.v_proj), strict=True):
            target = part[:, keep].unflatten(-1, (heads, -1))[:, :, chosen].flatten(2)
            set_linear(layer, *least_squares(own, target, weights))
        context = attend(to.q_proj(own), to.k_proj(own), to.v_proj(own), kept_heads)
        x = x + update
        set_linear(to.o_proj, *least_squares(context, x[:, keep] @ down.T - z, weights))
        z = z + to.o_proj(context)

        inner = theirs.mlp.fc1(theirs.norm2(x))
        active = theirs.mlp.activation_fn(inner)
        effect = (down @ (theirs.layer_scale2.lambda1[:, None] * theirs.mlp.fc2.weight)).norm(dim=0)
        neurons = (active[:, keep].flatten(0, 1).std(0) * effect).topk(config.intermediate_size).indices
        x = x + theirs.layer_scale2(theirs.mlp.fc2(active))
        own = set_norm(ours.layernorm_after, z)
        set_linear(ours.mlp.fc1, *least_squares(own, inner[:, keep][..., neurons], weights))
        active = ours.mlp.activation_fn(ours.mlp.fc1(own))
        set_linear(ours.mlp.fc2, *least_squares(active, x[:, keep] @ down.T - z, weights))
        z = z + ours.mlp.fc2(active)
        error = (z - x[:, keep] @ down.T).square().sum() / (x[:, keep] @ down.T).square().sum()
        print(f"shrink: layer {number}, heads {chosen}, relative error {error:.3f}", flush=True)
    set_norm(student.vit.layernorm, z[:, :1])


class Matcher(nn.Module):
    """The student with two linear maps from its width to the teacher's. They are thrown away in the end."""

    class_mean: Tensor
    class_std: Tensor
    patch_mean: Tensor
    patch_std: Tensor

    def __init__(self, student: Any, tokens: Tensor) -> None:
        super().__init__()
        self.vit, width, dim = student.vit, student.config.hidden_size, tokens.shape[-1]
        self.class_map, self.patch_map = nn.Linear(width, dim), nn.Linear(width, dim)
        # tokens are compared in units of their own spread, so that no loud channel drowns the quiet ones
        for name, part in (("class", tokens[:, 0]), ("patch", tokens[:, 1:].flatten(0, 1))):
            self.register_buffer(f"{name}_mean", part.mean(0))
            self.register_buffer(f"{name}_std", part.std(0) + 1e-3)

    def standard(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        first, rest = tokens[:, 0], tokens[:, 1:]
        return (first - self.class_mean) / self.class_std, (rest - self.patch_mean) / self.patch_std

    @torch.no_grad()
    def solve_maps(self, pixels: Tensor, tokens: Tensor) -> None:
        """Begin with the best maps for the student as it is, or it would be bent to fit random ones."""
        states = torch.cat([self.vit(batch).last_hidden_state for batch in pixels.split(64)])
        first, rest = self.standard(tokens)
        set_linear(self.class_map, *least_squares(states[:, 0], first, torch.ones(len(first))))
        set_linear(self.patch_map, *least_squares(states[:, 1:], rest, torch.ones(rest.shape[:2])))

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What share of the teacher's variance the student misses: of class tokens and of patch tokens."""
        states = self.vit(pixels).last_hidden_state
        first, rest = self.standard(tokens)
        return F.mse_loss(self.class_map(states[:, 0]), first), F.mse_loss(self.patch_map(states[:, 1:]), rest)


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


def train(matcher: Matcher, cache: Cache, args: argparse.Namespace) -> None:
    """AdamW, warm-up, cosine decay. Checkpoints hold all state: a stopped run goes on as if it had not.

    The rate depends on the step alone: to end sooner or later, resume with another `--steps`.
    """
    optimizer = new_optimizer(matcher)
    generator = torch.Generator().manual_seed(args.seed)
    path, first, every = args.work / "checkpoint.pt", 0, 50
    if args.resume and path.exists():
        state = torch.load(path, weights_only=True)
        matcher.load_state_dict(state["matcher"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        first = state["step"]
        print(f"resumed at step {first}", flush=True)
    run = torch.compile(matcher) if args.compile else matcher
    begun, missed = time.monotonic(), torch.zeros(2)
    matcher.train()
    for done in range(first + 1, args.steps + 1):
        rate = args.lr * min(1.0, done / 100) * (0.5 + 0.5 * math.cos(math.pi * (done - 1) / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        losses = torch.stack(run(*cache.draw(args.batch, generator)))
        losses.sum().backward()
        nn.utils.clip_grad_norm_(matcher.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        missed += losses.detach() / every
        if done % every == 0:
            speed = (done - first) * args.batch / (time.monotonic() - begun)
            left = (args.steps - done) * args.batch / speed / 60
            text = f"missed of class tokens {missed[0]:.3f}, of patch tokens {missed[1]:.3f}"
            print(f"step {done}/{args.steps}: {text}; {speed:.0f} views/s, {left:.0f} min left", flush=True)
            missed.zero_()
        if done % 200 == 0 or done == args.steps:
            state = {"matcher": matcher.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save({**state, "generator": generator.get_state()}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
    matcher.eval()


def solve_classifier(features: Tensor, labels: Tensor, classes: int, c: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of multinomial logistic regression; `c` is what scikit-learn calls C."""
    mean, std = features.mean(0), features.std(0) + 1e-6
    inputs = (features - mean) / std
    weight = torch.zeros(classes, inputs.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer: Any = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * c * len(inputs))
        loss = F.cross_entropy(F.linear(inputs, weight, bias), labels) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    scaled = weight.detach() / std
    return scaled, bias.detach() - scaled @ mean


def add_classifier(student: Any, source: Source, seed: int) -> None:
    """Give the student a classifier of its own on its frozen class token: folders are classes."""
    plan = [(0, name, 0) for name in source.names]
    readable, pixels = cut_views([source], plan, range(len(plan)), (student.config.image_size,), seed)
    names = [Path(name).parent.name for name, good in zip(source.names, readable, strict=True) if good]
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    with torch.no_grad():
        batches = torch.from_numpy(pixels[readable]).split(64)
        features = torch.cat([student.vit(to_tensor(batch)).last_hidden_state[:, 0] for batch in batches])
    held, scores = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) < 0.1, {}
    for strength in (0.003, 0.01, 0.03, 0.1, 0.3):
        weight, bias = solve_classifier(features[~held], labels[~held], len(classes), strength)
        guesses = F.linear(features[held], weight, bias).argmax(1)
        scores[strength] = float((guesses == labels[held]).float().mean())
    best = max(scores, key=lambda strength: scores[strength])
    print(f"classifier: {scores[best]:.3f} of held-out training images right, with C = {best}", flush=True)
    student.classifier = nn.Linear(features.shape[1], len(classes))
    set_linear(student.classifier, *solve_classifier(features, labels, len(classes), best))
    student.num_labels = student.config.num_labels = len(classes)
    student.config.id2label = dict(enumerate(classes))
    student.config.label2id = {name: index for index, name in enumerate(classes)}


def export(student: Any, folder: Path) -> None:
    """Write what `from_pretrained` reads: weights stored as float16, used as float32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().contiguous() for name, tensor in student.state_dict().items()}
    save_file(tensors, folder / "model.tmp", metadata={"format": "pt"})
    os.replace(folder / "model.tmp", folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    architecture = {"architectures": ["ViTForImageClassification"], "dtype": "float32"}
    write_json(folder / "config.json", {**student.config.to_diff_dict(), **architecture})
    side = student.config.image_size
    resize = {"do_resize": True, "size": {"height": side, "width": side}, "resample": 3}  # 3 is bicubic
    rescale = {"do_rescale": True, "rescale_factor": 1 / 255, "do_convert_rgb": True}
    normalize = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    kind = {"image_processor_type": "ViTImageProcessor"}
    write_json(folder / "preprocessor_config.json", {**kind, **resize, **rescale, **normalize})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distil a small ViT from a large one.")
    add = parser.add_argument
    add("--teacher", required=True, help="hub id or folder of a ViT with a class token")
    add("--data", required=True, nargs="+", type=Path, help="zip files or folders of images")
    add("--out", required=True, type=Path, help="folder for the finished model")
    add("--work", type=Path, default=Path("distill-work"), help="folder for cache and checkpoint")
    add("--classes", type=Path, help="source whose folders the classifier learns (default: first of --data)")
    add("--resume", action="store_true", help="go on from the checkpoint in --work")
    add("--start", choices=("shrink", "random"), default="shrink", help="narrow copy of teacher, or noise")
    add("--shrink-images", type=int, default=1024, help="images that the narrow copy is fitted on")
    add("--views-per-source", type=int, default=6000, help="views of one source, about (2 to 10 per image)")
    add("--limit-views", type=int, help="let the teacher see only the first so many views of the plan")
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
    sources = [Source(path) for path in args.data]
    plan = plan_views(sources, args.views_per_source, 2, 10, args.seed)
    side = STUDENT["image_size"]
    grid = side // STUDENT["patch_size"]
    teacher = Teacher(args.teacher, grid, args.compile)
    # another plan gets another cache
    key = json.dumps([plan, args.teacher, side, grid, args.seed])
    folder = args.work / f"cache-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    cache = Cache.open(folder, len(plan), side, grid**2 + 1, teacher.dim)
    cache.fill(sources, plan, teacher, args.seed, args.limit_views or len(plan))

    student = ViTForImageClassification(ViTConfig(**STUDENT)).eval()
    sample = np.random.default_rng(args.seed).permutation(cache.done)[:1024]
    pixels, tokens = to_tensor(cache.pixels[sample]), torch.from_numpy(cache.tokens[sample]).float()
    matcher = Matcher(student, tokens)
    if not (args.resume and (args.work / "checkpoint.pt").exists()):
        if args.start == "shrink":
            rows, sides = range(min(args.shrink_images, len(plan))), (side, teacher.side)
            shrink(teacher, student, *cut_views(sources, plan, rows, sides, args.seed)[1:])
        matcher.solve_maps(pixels, tokens)
    del teacher
    train(matcher, cache, args)
    add_classifier(student, Source(args.classes or args.data[0]), args.seed)
    export(student, args.out)
    print(f"written: {args.out}", flush=True)


if __name__ == "__main__":
    main()
