"""Similar images and near-duplicates: what is found, what is kept, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from shell import Said
from shell import shell as shell

import memoro
from memoro import similar as find_similar
from memoro.backbones import Backbone

similar = import_module("memoro.similar")
SIDE = 48


def draw(kind: int, number: int) -> Image.Image:
    """Stripes, a chessboard or blobs, in several sizes and places."""
    rng = np.random.default_rng(100 * kind + number)
    y, x = np.mgrid[0:SIDE, 0:SIDE] * (0.35 + 0.05 * number)
    plane = (np.sin(x + number), np.sign(np.sin(x + number) * np.sin(y)), np.sin(x / 3) + np.sin(y / 3 + number))[kind]
    noisy = 128 + 60 * np.stack([plane] * 3, axis=2) + rng.normal(0, 4, (SIDE, SIDE, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for kind, name in enumerate(("stripes", "chess", "blobs")):
        for number in range(5):
            draw(kind, number).save(folder / f"{name}{number}.png")
    return folder


def test_finds_images_of_the_same_kind(photos: Path) -> None:
    index = memoro.ImageIndex.build(photos)
    for kind, name in enumerate(("stripes", "chess", "blobs")):
        found = index.search(draw(kind, 7), top=3)[0]
        assert [Path(match.image).name.rstrip("0123456789.png") for match in found] == [name] * 3
        assert found == sorted(found, key=lambda match: -match.similarity)
    own = index.search(photos / "chess2.png", top=1)[0][0]
    assert Path(own.image).name == "chess2.png"
    assert own.similarity == pytest.approx(1, abs=1e-3)  # vectors are kept in float16
    assert find_similar(photos / "chess2.png", photos, top=1) == [[own]]
    assert len(index.search(draw(0, 1), top=99)[0]) == 15
    with pytest.raises(memoro.DataError, match="ask for one"):
        index.search(draw(0, 1), top=0)


def test_blocks_make_no_difference(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, queries = memoro.ImageIndex.build(photos), [draw(0, 8), draw(2, 9)]
    whole = index.search(queries, top=4)
    monkeypatch.setattr(similar, "BLOCK", 4)
    parts = index.search(queries, top=4)
    assert [[match.image for match in row] for row in parts] == [[match.image for match in row] for row in whole]
    assert whole[0] != whole[1]


def test_a_vector_is_at_most_a_kilobyte() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(600, 700, generator=generator) @ torch.randn(700, 700, generator=generator)
    weight, bias = similar._find_projection(lambda index: features[index], 600)
    vectors = similar._project(lambda index: features[index], 600, weight, bias)
    assert vectors.shape == (600, similar.MOST_VALUES)
    assert vectors[0].numel() * vectors.element_size() == 1024
    assert torch.allclose(vectors.float().norm(dim=1), torch.ones(600), atol=1e-3)  # in float16
    raw = torch.nn.functional.linear(features, weight.float(), bias.float())
    spread = raw.var(dim=0)
    assert spread[0] > spread[200] > spread[-1]  # the principal directions, the largest first
    standard = torch.nn.functional.normalize((features - features.mean(dim=0)) / features.std(dim=0), dim=1)
    exact, found = standard @ standard.T, vectors.float() @ vectors.float().T
    assert (exact - found).abs().max() < 0.05  # what 88 of 600 directions leave out
    assert not torch.allclose(exact, found)
    some, _ = similar._find_projection(lambda index: features[index], 1)
    assert some.shape[0] <= similar.MOST_VALUES


def test_an_index_of_one_image(tmp_path: Path) -> None:
    draw(0, 0).save(tmp_path / "one.png")
    found = find_similar(draw(0, 1), str(tmp_path))[0]
    assert [Path(match.image).name for match in found] == ["one.png"]


def test_is_kept_in_a_file(photos: Path, tmp_path: Path, backbone: Backbone) -> None:
    index = memoro.ImageIndex.build([draw(1, number) for number in range(6)])
    assert index.names[0] == "image 0"
    file = tmp_path / "index.safetensors"
    index.save(file)
    again = memoro.ImageIndex.load(file)
    assert again.names == index.names
    assert torch.equal(again.vectors, index.vectors)
    assert again.search(draw(1, 9)) == index.search(draw(1, 9)) == find_similar(draw(1, 9), file)
    with pytest.raises(memoro.DataError, match="has other weights"):
        memoro.ImageIndex.load(file, backbone)
    with safe_open(file, "pt") as opened:
        tensors, facts = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    wrong: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({**tensors, "bias": tensors["bias"][1:]}, facts),
        ({**tensors, "names": tensors["names"][1:]}, facts),
        (tensors, {**facts, "format": "something else"}),
        (tensors, {**facts, "facts": "[]"}),
        (tensors, {**facts, "facts": json.dumps({"backbone": {}, "image_size": None})}),
        ({"vectors": tensors["vectors"]}, facts),
    ]
    for some, about in wrong:
        save_file(some, file, metadata=about)
        with pytest.raises(memoro.DataError, match="not a readable index"):
            memoro.ImageIndex.load(file)
    file.write_bytes(b"junk")
    with pytest.raises(memoro.DataError, match="not a readable index"):
        memoro.ImageIndex.load(file)


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def copies(folder: Path) -> None:
    """Of one photograph: the same file, half its size, compressed; and one that only looks a little like it."""
    rng = np.random.default_rng(5)
    smooth = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize(
        (256, 256), Image.Resampling.BICUBIC
    )
    smooth.save(folder / "a.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    smooth.resize((128, 128)).save(folder / "c.png")
    smooth.save(folder / "d.jpg", quality=40)
    smooth.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "e.png")
    Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((256, 256)).save(folder / "f.png")
    Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((256, 256)).save(folder / "g.png")
    (folder / "h.png").write_bytes((folder / "g.png").read_bytes())


def test_duplicates_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"junk")
    found = [[Path(name).name for name in group] for group in memoro.duplicates(tmp_path)]
    assert found == [["a.png", "b.png", "c.png", "d.jpg"], ["g.png", "h.png"]]
    listed = [Image.open(tmp_path / name) for name in ("a.png", "f.png", "c.png")]
    assert memoro.duplicates(listed) == [["image 0", "image 2"]]
    monkeypatch.setattr(similar, "MOST_GROUPED", 3)  # too many to compare: copies alone
    found = [[Path(name).name for name in group] for group in memoro.duplicates(tmp_path)]
    assert found == [["a.png", "b.png"], ["g.png", "h.png"]]


def test_from_the_shell(shell: Callable[..., Said], photos: Path, tmp_path: Path) -> None:
    draw(0, 7).save(tmp_path / "new.png")
    (photos / "broken.png").write_bytes(b"junk")
    said = shell("similar", "new.png", "photos", "--top", 2, "-o", "sheet.png", "--index", "photos.safetensors")
    assert said.out.count("stripes") == 2
    assert "skipped photos/broken.png" in said.err
    assert "index of 15 images: photos.safetensors" in said.err
    assert size_of(tmp_path / "sheet.png") == (3 * 268 + 12, 312 + 12)
    again = json.loads(shell("similar", "new.png", "photos.safetensors", "--top", 2, "--json").out)
    assert [Path(row["image"]).name[:7] for row in again["new.png"]] == ["stripes"] * 2
    itself = json.loads(shell("similar", "photos/chess1.png", "photos.safetensors", "--top", 15, "--json").out)
    names = [row["image"] for row in itself["photos/chess1.png"]]
    assert len(names) == 14
    assert "photos/chess1.png" not in names


def test_duplicates_from_the_shell(shell: Callable[..., Said], tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    copies(folder)
    said = shell("similar", "copies", "--duplicates", "-o", "groups.png")
    assert "2 groups" in said.err
    assert said.out.count("copies/a.png") == 3
    assert size_of(tmp_path / "groups.png") == (4 * 268 + 12, 2 * 312 + 12)
    assert json.loads(shell("similar", "copies", "--duplicates", "--json").out)[1] == ["copies/g.png", "copies/h.png"]
    assert "give images and a folder" in shell("similar", "copies", code=2).err
    assert "give images and a folder" in shell("similar", "copies/a.png", "copies", "--duplicates", code=2).err
    assert "choose a name that ends with" in shell("similar", "copies/a.png", "copies", "-o", "x.gif", code=1).err


def test_an_unreadable_image_is_named(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"junk")
    with pytest.raises(memoro.ImageError, match=r"broken\.png: not a readable image \(no known format\)\.$"):
        memoro.similar(tmp_path / "broken.png", photos)
