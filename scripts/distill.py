"""Distil a small plain ViT from a large pre-trained one, on a CPU, in about two hours.

    python scripts/distill.py --teacher facebook/dinov2-with-registers-small --data a.zip b.zip photos/ --out memoro-tiny/

Three ideas make that possible with a few ten thousand images:

1. The teacher sees every view (a crop of an image) once; its tokens are kept on disk, so that an epoch of the student
   costs no teacher time. Teacher and student cut an image into the same grid, so patch tokens can be compared too.
2. The student does not start from noise. It starts as a narrow copy of the teacher, fitted layer by layer with
   least squares (`shrink`), and gradient descent only has to repair what the narrowing lost.
3. Small sources get more views per image than large ones, so no source drowns the others.

Sources are zip files or folders of images. Where a source has a `train/` folder, only that is read: `test/` and `val/`
stay unseen. Everything is kept in `--work`; the same command with `--resume` goes on where it stopped.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, PreTrainedModel, ViTConfig, ViTForImageClassification

IMAGE_TYPES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPLITS = {"train", "test", "val", "valid", "validation"}


# ---------------------------------------------------------------------------------------------------------- images


@dataclass
class Source:
    """One zip file or folder. Zip members are decoded in memory: nothing is ever unpacked to disk."""

    path: Path
    names: list[str] = field(init=False)
    archive: zipfile.ZipFile | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.path.is_dir():
            found = [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()]
        else:
            self.archive = zipfile.ZipFile(self.path)
            found = self.archive.namelist()
        images = sorted(n for n in found if Path(n).suffix.lower() in IMAGE_TYPES)
        splits = {name: split_of(name) for name in images}
        self.names = [n for n in images if splits[n] == "train"] or [n for n in images if splits[n] is None]
        if not self.names:
            raise SystemExit(f"{self.path}: no images found")

    def read(self, name: str) -> Image.Image | None:
        """The image in RGB, or None where it cannot be decoded: one broken file must not end a long run."""
        try:
            data = self.archive.read(name) if self.archive else (self.path / name).read_bytes()
            return Image.open(io.BytesIO(data)).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, zipfile.BadZipFile):
            return None


def split_of(name: str) -> str | None:
    """The split an image is in: the outermost folder that names one, since "train" may be a class as well."""
    return next((part for part in Path(name).parts[:-1] if part in SPLITS), None)


def random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """The box of a random crop: 30 to 100 % of the area, sides between 3:4 and 4:3."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.3, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return x, y, x + w, y + h
    return 0, 0, width, height


def plan_views(sources: list[Source], target: int, low: int, high: int, seed: int) -> list[tuple[int, str, int]]:
    """(source, name, view) of everything the teacher is to see, whole images (view 0) first, else shuffled.

    A source of n images gets about `target` views in all, but at least `low` and at most `high` per image. Rounds come
    one after the other, so a cache that is not complete yet is already a fair sample.
    """
    plan = [
        (index, name, view)
        for index, source in enumerate(sources)
        for view in range(min(high, max(low, round(target / len(source.names)))))
        for name in source.names
    ]
    order = np.random.default_rng(seed).permutation(len(plan))
    return sorted((plan[i] for i in order), key=lambda item: item[2] > 0)


# ----------------------------------------------------------------------------------------------------------- cache


class Teacher:
    """The frozen large model: class token and patch tokens, both after the final norm."""

    def __init__(self, name: str, grid: int, compiled: bool) -> None:
        self.model: PreTrainedModel = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.grid, self.side = grid, grid * int(self.model.config.patch_size)
        processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil")
        self.mean, self.std = tuple(processor.image_mean), tuple(processor.image_std)
        self.run = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def tokens(self, pixels: np.ndarray) -> Tensor:
        """Bytes (n, side, side, 3) to tokens (n, 1 + grid², dim). Register tokens, if any, are left out."""
        states = self.run(pixel_values=to_tensor(torch.from_numpy(pixels), self.mean, self.std)).last_hidden_state
        return torch.cat([states[:, :1], states[:, -(self.grid**2) :]], dim=1)


def to_tensor(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (n, h, w, 3) as a normalised float tensor (n, 3, h, w)."""
    return ((pixels.float() / 255 - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()


@dataclass
class Cache:
    """Views (bytes) and the teacher's tokens for them (float16), as memory maps."""

    pixels: np.ndarray
    tokens: np.ndarray
    done: int

    def __len__(self) -> int:
        return self.done


def open_cache(folder: Path, plan: list[tuple[int, str, int]], side: int, tokens: int, dim: int) -> Cache:
    """Open the cache for exactly this plan, or begin it. Another plan gets another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"pixels": ((len(plan), side, side, 3), np.uint8), "tokens": ((len(plan), tokens, dim), np.float16)}
    arrays = {}
    for name, (shape, dtype) in shapes.items():
        path = folder / f"{name}.npy"
        mode = "r+" if path.exists() else "w+"
        arrays[name] = np.lib.format.open_memmap(path, mode=mode, dtype=dtype, shape=shape)
    progress = folder / "done.json"
    done = json.loads(progress.read_text())["done"] if progress.exists() else 0
    return Cache(arrays["pixels"], arrays["tokens"], done)


def cut_views(
    sources: list[Source], plan: list[tuple[int, str, int]], rows: list[int], sides: tuple[int, ...], seed: int
) -> list[np.ndarray]:
    """The planned views as bytes, once per side length. A crop depends on seed and row only: safe to resume."""
    views = [np.zeros((len(rows), side, side, 3), np.uint8) for side in sides]
    for at, row in enumerate(rows):
        index, name, view = plan[row]
        image = sources[index].read(name)
        if image is None:
            print(f"skipped, not readable: {sources[index].path}/{name}", flush=True)
            continue
        box = random_box(image.size, np.random.default_rng((seed, row))) if view else None
        for side, pixels in zip(sides, views, strict=True):
            pixels[at] = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC, box))
    return views


def fill_cache(
    cache: Cache, folder: Path, sources: list[Source], plan: list[tuple[int, str, int]], teacher: Teacher, seed: int
) -> None:
    """Let the teacher see what it has not seen yet."""
    side, batch, begun, first = cache.pixels.shape[1], 64, time.monotonic(), cache.done
    while cache.done < len(plan):
        low, high = cache.done, min(cache.done + batch, len(plan))
        small, large = cut_views(sources, plan, list(range(low, high)), (side, teacher.side), seed)
        cache.pixels[low:high] = small
        cache.tokens[low:high] = teacher.tokens(large).half().numpy()
        cache.done = high
        if high == len(plan) or high // batch % 20 == 0:
            cache.pixels.flush(), cache.tokens.flush()  # type: ignore[attr-defined]
            write_json(folder / "done.json", {"done": high})
            rate = (high - first) / (time.monotonic() - begun)
            print(f"teacher {high}/{len(plan)} views, {rate:.0f}/s, {(len(plan) - high) / rate / 60:.0f} min left", flush=True)


def write_json(path: Path, content: Any) -> None:
    """Write to a temporary file, then rename: a reader never sees half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


# -------------------------------------------------------------------------------------------------------- starting


def least_squares(inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that maps inputs (…, i) to targets (…, o) best, ever so slightly ridged."""
    x, y, w = inputs.flatten(0, -2), targets.flatten(0, -2), weights.reshape(-1, 1)
    mean_x, mean_y = (w * x).sum(0) / w.sum(), (w * y).sum(0) / w.sum()
    x, y = x - mean_x, y - mean_y
    gram = (x.T @ (w * x)).double()
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram))
    weight = torch.linalg.solve(gram, (x.T @ (w * y)).double()).float().T
    return weight, mean_y - weight @ mean_x


def set_linear(layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
    layer.weight.data.copy_(weight.reshape(layer.weight.shape))  # type: ignore[operator, union-attr, arg-type]
    layer.bias.data.copy_(bias)  # type: ignore[operator, union-attr, arg-type]


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def best_heads(context: Tensor, update: Tensor, weights: Tensor, heads: int, keep: int) -> list[int]:
    """The `keep` heads from whose outputs the attention's whole update can be predicted best."""
    x, y, w = context.flatten(0, 1), update.flatten(0, 1), weights.reshape(-1, 1)
    gram, cross = (x.T @ (w * x)).double(), (x.T @ (w * y)).double()
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram))
    columns = torch.arange(len(gram)).unflatten(0, (heads, -1))

    def explained(chosen: tuple[int, ...]) -> float:
        at = columns[list(chosen)].flatten()
        return float((cross[at] * torch.linalg.solve(gram[at][:, at], cross[at])).sum())

    return list(max(itertools.combinations(range(heads), keep), key=explained))


@torch.no_grad()
def shrink(teacher: Teacher, student: ViTForImageClassification, small: np.ndarray, large: np.ndarray) -> None:
    """Make the student a narrow copy of a DINOv2-like teacher of the same depth.

    The teacher's residual stream is projected onto the directions that matter most over all layers. Then, layer by
    layer, the student gets the teacher's most useful heads and neurons, and each of its linear layers is solved for
    what the teacher computes at the same place, given what the student has *so far*: later layers thereby make good for
    the errors of earlier ones, for the missing heads and neurons, and for the missing register tokens.
    """
    config, source = student.config, teacher.model
    pixels, tokens = to_tensor(torch.from_numpy(small), IMAGENET_MEAN, IMAGENET_STD), teacher.grid**2 + 1
    views = to_tensor(torch.from_numpy(large), teacher.mean, teacher.std)
    keep = torch.tensor([0, *range(-tokens + 1, 0)])  # without registers
    weights = torch.ones(len(small), tokens)
    weights[:, 0] = 16.0  # one class token per image against many patches, but it is what heads will read

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    # 1. the directions: principal components of the normed stream, over all layers, the last class token above all
    moment = torch.zeros(source.config.hidden_size, source.config.hidden_size)
    for batch in views.split(64):
        states = [norm(h[:, keep]) for h in source(pixel_values=batch, output_hidden_states=True).hidden_states]
        for state in states:
            moment += torch.einsum("nti,ntj,nt->ij", state, state, weights[: len(state)]) / (tokens + 15)
        moment += len(states) * torch.einsum("ni,nj->ij", states[-1][:, 0], states[-1][:, 0])
    down = torch.linalg.eigh(moment).eigenvectors[:, 1 - config.hidden_size :].T.flip(0)
    # the student's own norms subtract the mean over its width: keep to the vectors whose mean is zero anyway
    zero_mean = torch.linalg.svd(torch.eye(config.hidden_size) - 1 / config.hidden_size)[0][:, :-1]
    down = zero_mean @ down @ (torch.eye(down.shape[1]) - 1 / down.shape[1])

    # 2. the embedding
    x = torch.cat([source.embeddings(batch) for batch in views.split(64)])  # type: ignore[operator]
    position = source.embeddings.interpolate_pos_encoding(x[:1, keep], teacher.side, teacher.side)  # type: ignore
    mine = student.vit.embeddings
    mine.position_embeddings.copy_(position @ down.T)
    mine.cls_token.copy_(source.embeddings.cls_token @ down.T)  # type: ignore[operator, union-attr]
    patches = F.unfold(pixels, config.patch_size, stride=config.patch_size).transpose(1, 2)
    target = (x[:, keep] - position)[:, 1:] @ down.T
    set_linear(mine.patch_embeddings.projection, *least_squares(patches, target, weights[:, 1:]))
    z = torch.cat([mine(batch) for batch in pixels.split(64)])

    # 3. the layers
    heads = source.config.num_attention_heads
    for number, (big, little) in enumerate(zip(source.encoder.layer, student.vit.layers, strict=True)):  # type: ignore
        given = big.norm1(x)
        parts = [layer(given) for layer in (big.attention.q_proj, big.attention.k_proj, big.attention.v_proj)]
        context = attend(*parts, heads)
        update = big.layer_scale1(big.attention.o_proj(context))
        chosen = best_heads(context[:, keep], update[:, keep] @ down.T, weights, heads, config.num_attention_heads)
        x = x + update
        mine_parts = []
        for part, layer in zip(parts, (little.attention.q_proj, little.attention.k_proj, little.attention.v_proj), strict=True):
            target = part[:, keep].unflatten(-1, (heads, -1))[:, :, chosen].flatten(2)
            set_linear(layer, *least_squares(norm(z), target, weights))
            mine_parts.append(layer(norm(z)))
        context = attend(*mine_parts, config.num_attention_heads)
        set_linear(little.attention.o_proj, *least_squares(context, x[:, keep] @ down.T - z, weights))
        z = z + little.attention.o_proj(context)

        inner = big.mlp.fc1(big.norm2(x))
        active = big.mlp.activation_fn(inner)
        out = down @ (big.layer_scale2.lambda1[:, None] * big.mlp.fc2.weight)
        worth = active[:, keep].flatten(0, 1).std(0) * out.norm(dim=0)
        chosen_neurons = worth.topk(config.intermediate_size).indices
        x = x + big.layer_scale2(big.mlp.fc2(active))
        set_linear(little.mlp.fc1, *least_squares(norm(z), inner[:, keep][..., chosen_neurons], weights))
        active = little.mlp.activation_fn(little.mlp.fc1(norm(z)))
        set_linear(little.mlp.fc2, *least_squares(active, x[:, keep] @ down.T - z, weights))
        z = z + little.mlp.fc2(active)
        kept = x[:, keep] @ down.T
        error = [float((z - kept)[:, at].square().sum() / kept[:, at].square().sum()) for at in (slice(0, 1), slice(1, None))]
        print(f"layer {number}: heads {chosen}, error of class token {error[0]:.3f}, of patches {error[1]:.3f}", flush=True)
