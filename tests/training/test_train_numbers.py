"""Regression: numbers are learned in any units, from plain views, and come out in the user's units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memoro
from memoro.backbones import Backbone
from memoro.data import Augment, ImageSet, Loader, load_data
from memoro.evaluation.metrics import warn_of
from memoro.heads import Scale
from memoro.images import Preprocessing

QUICK: dict[str, Any] = {"image_size": 20, "batch_size": 8, "workers": 0, "cache": False, "quiet": True}


def save_table(folder: Path, scale: float = 1.0, offset: float = 0.0, count: int = 40) -> Path:
    """Grey images, and a table with their brightness in some unit; the last quarter is for testing."""
    rng = np.random.default_rng(0)
    lines = ["path,number,split"]
    folder.mkdir(exist_ok=True)
    for number in range(count):
        level = rng.uniform(40, 215)
        pixels = np.clip(level + rng.normal(0, 10, (24, 24, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{level / 255 * scale + offset},{'test' if number >= count * 3 // 4 else 'train'}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def test_units_do_not_matter(backbone: Backbone, tmp_path: Path) -> None:
    """The same numbers in another unit give the same model, up to the unit."""
    tables = save_table(tmp_path / "a"), save_table(tmp_path / "b", 3000.0, 50_000.0)
    small, large = (memoro.train(table, backbone=backbone, epochs=4, lr=0.03, **QUICK) for table in tables)
    assert large.metrics["r2"] == pytest.approx(small.metrics["r2"], abs=1e-3)
    assert small.metrics["r2"] > 0.3
    assert large.metrics["mean_absolute_error"] == pytest.approx(3000 * small.metrics["mean_absolute_error"], rel=1e-2)
    assert large.history[-1]["train_loss"] == pytest.approx(3000**2 * small.history[-1]["train_loss"], rel=1e-2)

    file = memoro.save_task(large.task, tmp_path / "brightness.safetensors")
    model = memoro.compose(backbone, [memoro.load_task(file)])
    answers = [
        one["table"]["values"]["number"] for one in model.predict([tmp_path / "b" / "39.png", tmp_path / "b/0.png"])
    ]
    assert all(50_000 < answer < 53_000 for answer in answers)
    assert memoro.evaluate(backbone, [memoro.load_task(file)], tables[1], workers=0)["table"]["r2"] == pytest.approx(
        large.metrics["r2"], abs=1e-3
    )


def test_training_goes_on_from_a_trained_head(backbone: Backbone, tmp_path: Path) -> None:
    table = save_table(tmp_path / "set", 100.0, 7.0)
    task = memoro.new_task(backbone, "light", ["number"], head="regression", seed=0)
    first = memoro.fit(backbone, task, table, epochs=3, lr=0.03, **QUICK)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    still = memoro.fit(backbone, task, table, epochs=1, lr=1e-9, **QUICK)
    assert still.metrics["r2"] == pytest.approx(first.metrics["r2"], abs=1e-3)
    torch.testing.assert_close(task.state_dict()["head.weight"], before["head.weight"], rtol=1e-4, atol=1e-4)
    further = memoro.fit(backbone, task, table, epochs=3, lr=0.03, **QUICK)
    assert further.metrics["loss"] < first.metrics["loss"]


def test_an_interrupted_training_leaves_a_trained_head_in_its_units(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = save_table(tmp_path / "set", 100.0, 7.0)
    task = memoro.new_task(backbone, "light", ["number"], head="regression", seed=0)
    memoro.fit(backbone, task, table, epochs=1, lr=0.03, **QUICK)
    before = task.head.weight.detach().clone()

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memoro.training.loop.Trainer.step", stop)
    with pytest.raises(KeyboardInterrupt):
        memoro.fit(backbone, task, table, epochs=1, lr=0.03, **QUICK)
    torch.testing.assert_close(task.head.weight.detach(), before)


def test_folding_the_scale_changes_units_only() -> None:
    targets = torch.tensor([[1.0, 500.0], [3.0, 500.0], [8.0, 500.0]])
    scale, head, tokens = Scale.of(targets), torch.nn.Linear(6, 2), torch.randn(5, 6)
    standardised = head(tokens).detach()
    assert scale.apply(targets)[:, 0].std(correction=0) == pytest.approx(1.0)
    assert scale.std[1] == 1.0  # all the same: nothing to divide by
    scale.fold(head)
    torch.testing.assert_close(head(tokens), scale.undo(standardised))
    assert not torch.allclose(head(tokens), standardised)
    scale.unfold(head)
    torch.testing.assert_close(head(tokens), standardised, rtol=1e-4, atol=1e-4)


def views(images: ImageSet, augment: Augment) -> list[torch.Tensor]:
    loader = Loader(images, Preprocessing().at(16), batch_size=99, augment=augment, views=3, workers=0)
    return [next(iter(loader.epoch(epoch))).pixels for epoch in (0, 1)]


def test_numbers_have_plain_views_unless_told_otherwise(tmp_path: Path) -> None:
    numbers = load_data(save_table(tmp_path / "set", count=8), val_fraction=0, workers=0).train
    classes = load_data(tmp_path / "set" / "table.csv", kind="class", val_fraction=0, workers=0).train
    assert numbers is not None
    assert classes is not None
    plain, second = views(numbers, Augment())
    assert torch.equal(plain, second)
    first, second = views(classes, Augment())
    assert torch.equal(first, plain)
    assert not torch.equal(first, second)
    for told in (Augment(crop="inception"), Augment(flip=1.0)):
        first, second = views(numbers, told)
        assert not torch.equal(first, second)
    assert torch.equal(*views(numbers, Augment(flip=0.0))), "no mirror images does not mean crops"


def test_a_model_no_better_than_the_mean_says_so(backbone: Backbone, tmp_path: Path) -> None:
    table = save_table(tmp_path / "set")
    header, *lines = table.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    drawn = np.random.default_rng(1).permutation(len(cells))
    shuffled = [f"{path},{cells[at][1]},{split}" for (path, _, split), at in zip(cells, drawn, strict=True)]
    table.write_text("\n".join([header, *shuffled]) + "\n")
    said: list[str] = []
    result = memoro.train(table, backbone=backbone, epochs=1, lr=0.01, log=said.append, **QUICK)
    assert result.metrics["r2"] < 0.05
    assert "no better than always predicting the mean" in result.notes[-1]
    assert [line for line in said if line.startswith("warning: table: R² is")]
    memoro.evaluate(backbone, [result.task], table, workers=0, log=said.append)
    assert sum("no better than always predicting the mean" in line for line in said) == 2
    assert warn_of({"split": "test", "r2": 0.4}) is None


@pytest.mark.slow
def test_the_radius_of_a_disc(tmp_path: Path) -> None:
    """400 images of 96 px, a disc of random radius, place and colour on noise, in pixels. All defaults but one: one
    learning rate instead of three, to save time."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:96, :96]
    lines = ["path,radius,split"]
    for number in range(400):
        radius = rng.uniform(6, 40)
        left, top = rng.uniform(radius, 96 - radius, 2)
        pixels = rng.integers(0, 256, (96, 96, 3)).astype(np.uint8)
        pixels[(x - left) ** 2 + (y - top) ** 2 <= radius**2] = rng.integers(0, 256, 3)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png", compress_level=1)
        split = "test" if number >= 300 else "val" if number >= 240 else "train"
        lines.append(f"{number}.png,{radius:.2f},{split}")
    (tmp_path / "discs.csv").write_text("\n".join(lines) + "\n")
    result = memoro.train(tmp_path / "discs.csv", label_column="radius", lr=0.003, quiet=True, workers=0)
    assert (result.task.kind, result.metrics["split"], result.metrics["images"]) == ("regression", "test", 100)
    assert result.metrics["r2"] >= 0.8
    assert result.metrics["mean_absolute_error"] < 5, "pixels"
