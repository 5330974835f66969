"""Where a task looked: maps over images, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import random_task
from families import CASES, Case
from oracle import hidden_states, pool_hidden_states
from PIL import Image
from shell import Shell, shell
from trust import add_readout

import memoro
from memoro.backbones import Backbone
from memoro.engine.explain import READ_OUT, VIEW, read_views
from memoro.errors import CompositionError, ImageError
from memoro.images import Decoder, open_image

__all__ = ["shell"]  # a fixture


def save_photo(path: Path, seed: int = 0) -> Path:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(path)
    return path


def test_explain_takes_paths_and_images(backbone: Backbone, tmp_path: Path) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "pets"), random_task(backbone, "rooms", seed=1)])
    photo, other = save_photo(tmp_path / "a.png"), save_photo(tmp_path / "b.png", 1)
    found = model.explain(photo, "pets")
    pixels = backbone.preprocessing.to_tensor(open_image(photo))[None]
    assert torch.equal(found.patches, model.explain(pixels, "pets", normalised=True).patches)
    assert not torch.equal(found.patches, model.explain(photo, "rooms").patches)
    several = model.explain([str(other), open_image(photo)], "pets")
    assert torch.allclose(several.heatmap()[1], found.heatmap()[0], atol=1e-6)  # another batch size rounds differently
    shares = found.shares()
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    assert {"patches", "memory", "itself"} < set(shares)


def test_a_parent_may_have_any_name(backbone: Backbone, tmp_path: Path) -> None:
    parent = random_task(backbone, "memory")
    model = memoro.compose(backbone, [parent, random_task(backbone, "child", seed=1, extends=[parent])])
    shares = model.explain(save_photo(tmp_path / "a.png"), "child").shares()
    assert {"memory", "memory (task)"} < set(shares)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)


def test_a_long_and_thin_input_is_shown_as_it_is() -> None:
    wide = memoro.Preprocessing(resize=(64, 512))
    pixels, [view] = read_views([("wide", Image.new("RGB", (600, 80)))], wide)
    assert pixels.shape[-2:] == (64, 512)
    assert view.size == (512, 64)


def test_a_tensor_means_what_it_means_in_predict(backbone: Backbone, tmp_path: Path) -> None:
    task = random_task(backbone, "pets")
    task.update_spec(preprocessing=backbone.preprocessing.at(20))
    model, photo = memoro.compose(backbone, [task]), save_photo(tmp_path / "a.png")
    array = np.asarray(open_image(photo))
    pixels = torch.from_numpy(array / 255).permute(2, 0, 1)
    for given in (array, pixels, pixels[None]):
        assert torch.equal(model.explain(given, "pets").patches, model.explain(photo, "pets").patches)
    with pytest.raises(CompositionError, match="'pets' was trained on images of 20x20, this tensor is 28x28"):
        model.explain(torch.rand(1, 3, 28, 28), "pets", normalised=True)


def test_images_of_several_sizes_are_explained_one_by_one(backbone: Backbone, tmp_path: Path) -> None:
    task = random_task(backbone, "pets")
    task.update_spec(preprocessing=memoro.Preprocessing(resize=20))
    model = memoro.compose(backbone, [task])
    wide, high = (Image.new("RGB", size) for size in ((40, 20), (20, 40)))
    with pytest.raises(ImageError, match=r"differ in size.*one by one"):
        model.explain([wide, high], "pets")


def test_an_explanation_is_of_the_pixels_that_were_answered(backbone: Backbone, tmp_path: Path) -> None:
    """A large JPEG is decoded at a fraction of its size, and the overlay at another."""
    task = random_task(backbone, "pets")
    task.update_spec(preprocessing=backbone.preprocessing.at(20))
    model, photo = memoro.compose(backbone, [task]), tmp_path / "a.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    steps = task.spec.preprocessing
    assert steps is not None
    [[images]] = Decoder((steps,))([("a", photo)]).images
    pixels = steps.normalise(images)
    assert torch.equal(model.explain(photo, "pets").patches, model.explain(pixels, "pets", normalised=True).patches)


def test_an_overlay_is_bright_where_the_attention_is(backbone: Backbone, tmp_path: Path) -> None:
    model = memoro.compose(backbone, [random_task(backbone, "pets")])
    grey = Image.new("RGB", (90, 60), (128, 128, 128))
    found = model.explain([grey, save_photo(tmp_path / "a.png")], "pets")
    overlay = found.overlay()
    assert isinstance(overlay, Image.Image)
    assert min(overlay.size) == VIEW
    heat, shown = found.heatmap()[0], np.asarray(overlay).astype(int)
    rows, columns = heat.shape
    centres = [((at // columns + 0.5) / rows, (at % columns + 0.5) / columns) for at in (heat.argmax(), heat.argmin())]
    most, least = (shown[int(y * overlay.height), int(x * overlay.width)] for y, x in centres)
    assert most.sum() > least.sum() + 200
    assert found.overlay(1).tobytes() != overlay.tobytes()
    with pytest.raises(ImageError, match="give explain\\(\\) images or paths, not a tensor"):
        model.explain(backbone.preprocessing.to_tensor(grey)[None], "pets", normalised=True).overlay()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_head_shows_what_the_base_attends_to(case: Case) -> None:
    """Against the attention that transformers itself reports."""
    theirs = case.model("eager")
    backbone = memoro.load_backbone(theirs)
    head = random_task(backbone, "head", from_layer=backbone.depth)
    pixels = torch.randn(2, 3, *backbone.image_size, generator=torch.Generator().manual_seed(0))
    found = memoro.compose(backbone, [head]).explain(pixels, "head", normalised=True)
    assert found.layers == tuple(range(backbone.depth))
    assert torch.isfinite(found.heatmap()).all()
    weights = torch.cat([found.prefix, found.patches.flatten(-2)], dim=-1)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    if case.name == "mae":
        return  # it drops patches at random
    with torch.no_grad():
        reported = theirs(pixels, output_attentions=True).attentions
    expected = torch.stack([one[:, :, 0] if "class token" in found.source else one.mean(2) for one in reported])
    assert torch.allclose(weights, expected, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_read_outs_map_adds_up_to_what_it_reads_of_the_patches(case: Case) -> None:
    """Against the plain model's hidden states: of the answer's logit, compared with the mean over all labels."""
    backbone = memoro.load_backbone(case.model().double())
    task = add_readout(backbone, random_task(backbone, "pets", rank=2), share=0.5)
    assert task.readout is not None
    pixels = torch.randn(3, 3, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model = memoro.compose(backbone, task)
    found = model.explain(pixels, "pets", normalised=True)
    assert found.source == READ_OUT
    assert found.note is not None
    assert found.heatmap().shape == (3, 5, 5)
    with torch.no_grad():
        means = pool_hidden_states(hidden_states(backbone, pixels), backbone.anatomy)[:, 1:, -2]
        weight = task.readout.weight.unflatten(1, (4, -1, 24))[:, :, -2]
        parts = torch.einsum("bld,cld->bc", means, weight)
        chosen = model(pixels)["pets"].argmax(dim=1)
        expected = parts[torch.arange(3), chosen] - parts.mean(dim=1)
    assert torch.allclose(found.heatmap().sum(dim=(1, 2)), expected, atol=1e-10), "two formulations in float64"
    assert not torch.allclose(found.heatmap()[0], found.heatmap()[1], atol=1e-3)
    plain = random_task(backbone, "pets", rank=2)
    attention = memoro.compose(backbone, plain).explain(pixels, "pets", normalised=True)
    assert (attention.evidence, attention.note) == (None, None)
    assert torch.equal(attention.patches, found.patches), "the token attends to the same"


def test_the_command_draws_one_overlay(shell: Shell, backbone: Backbone, tmp_path: Path) -> None:
    memoro.save_task(random_task(backbone, "pets", labels=["cat", "dog"]), tmp_path / "pets.safetensors")
    photo = save_photo(tmp_path / "photo.png")
    said = shell("explain", "photo.png", "-t", "pets.safetensors", "-b", "vit", "-o", "overlay.png")
    assert "patches" in said.out
    assert "memory" in said.out
    [answer] = memoro.compose(backbone, [memoro.load_task("pets.safetensors")]).predict([photo])
    assert f"{answer['pets']['label']} {answer['pets']['probability']:.2f}" in said.out
    overlay = memoro.compose(backbone, [memoro.load_task("pets.safetensors")]).explain(photo, "pets").overlay()
    drawn = np.asarray(open_image("overlay.png"), dtype=int) - np.asarray(overlay, dtype=int)
    assert np.abs(drawn).max() <= 1, "but for the rounding of a loaded copy of the weights"
    said = shell("explain", "photo.png", "-t", "pets.safetensors", "-b", "vit", "-o", "overlay.gif", code=1)
    assert "choose a name that ends with .png, .jpg or .webp" in said.err


def test_the_command_draws_a_sheet_and_names_heads(shell: Shell, backbone: Backbone, tmp_path: Path) -> None:
    memoro.save_task(random_task(backbone, "pets"), tmp_path / "pets.safetensors")
    memoro.save_task(random_task(backbone, "top", from_layer=backbone.depth), tmp_path / "top.safetensors")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        save_photo(tmp_path / "photos" / f"{number}.png", number)
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    files = ("-t", "pets.safetensors", "-t", "top.safetensors", "-b", "vit")
    said = shell("explain", "photos", *files, "-o", "sheet.png", "--json")
    note = "A head has no attention of its own: this is the attention of the base's class token."
    assert f"note: top: {note}" in said.err
    assert "pets:" not in said.err
    assert "broken.png: not a readable image" in said.err
    record = json.loads(said.out)
    assert len(record["images"]) == 3
    top, pets = (record["images"]["photos/0.png"][name] for name in ("top", "pets"))
    assert (top["source"], top["note"], pets["note"]) == ("the base's class token", note, None)
    assert "memory" not in record["images"]["photos/0.png"]["top"]["attention"]
    width, height = open_image("sheet.png").size
    assert width > 3 * 256
    assert height > 3 * 256
