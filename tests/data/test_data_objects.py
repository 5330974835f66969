"""Images that Python users hold: tables of pandas, lists, datasets of torch, image folders of `datasets`; and paths in
lines."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from image_files import picture, save_classes, to_bytes
from shell import Shell, shell

import memoro
from memoro.data import Loader, Splits, load_data
from memoro.data.open import open_source
from memoro.data.source import read_bytes
from memoro.errors import DataError
from memoro.images import Preprocessing

__all__ = ["shell"]  # a fixture
LABELS = ["cat", "dog"] * 6
SMALL = Preprocessing(resize=(9, 12))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Twelve images, by paths from the working directory."""
    monkeypatch.chdir(tmp_path)
    save_classes(tmp_path, {"photos": 12})
    return [f"photos/{at:04}.png" for at in range(12)]


def pixels(splits: Splits) -> torch.Tensor:
    """Of all training images, which must be those of `files` with their labels, in order."""
    assert splits.train is not None
    assert splits.labels == ("cat", "dog")
    assert [splits.labels[at] for at in splits.train.targets] == LABELS
    return torch.cat([batch.images for batch in Loader(splits.train, SMALL, batch_size=5, workers=0).epoch(0)])


class Photos(torch.utils.data.Dataset[Any]):
    """A dataset as torchvision's are: with or without targets that can be had without the images."""

    def __init__(self, images: list[Any], targets: list[int] | None = None) -> None:
        self.images, self.classes = images, ["cat", "dog"]
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        return self.images[at], at % 2


OBJECTS = {
    "frame": lambda files: pandas.DataFrame({"path": files, "label": LABELS}),
    "frame of images": lambda files: pandas.DataFrame({"image": [picture(at) for at in range(12)], "label": LABELS}),
    "lists": lambda files: (files, LABELS),
    "lists of paths": lambda files: ([Path(file) for file in files], np.array(LABELS)),
    "lists of images": lambda files: ([picture(at) for at in range(12)], pandas.Series(LABELS)),
    "arrays": lambda files: ([np.asarray(picture(at)) for at in range(12)], LABELS),
    "encoded": lambda files: ([Path(file).read_bytes() for file in files], LABELS),
    "pairs": lambda files: list(zip(files, LABELS, strict=True)),
    "pairs of images": lambda files: [(picture(at), label) for at, label in enumerate(LABELS)],
    "torch": lambda files: Photos([picture(at) for at in range(12)]),
    "torch with targets": lambda files: Photos(files, [at % 2 for at in range(12)]),
    "torch tensors": lambda files: Photos([torch.tensor(np.asarray(picture(at))).permute(2, 0, 1) for at in range(12)]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_every_object_gives_the_same_images_and_labels(name: str, files: list[str]) -> None:
    found = pixels(load_data(OBJECTS[name](files), val_fraction=0, quiet=True))
    expected = torch.stack([torch.tensor(np.asarray(SMALL.fit(picture(at)))) for at in range(12)])
    assert torch.equal(found, expected)


def test_a_task_is_trained_on_what_is_in_memory(backbone: Any) -> None:
    rows = [(picture(at), label) for at, label in enumerate(LABELS * 2)]
    quick: dict[str, Any] = {"regime": "readout", "image_size": 20, "workers": 0, "quiet": True}
    found = memoro.train(rows, backbone=backbone, task="pets", **quick)
    assert list(found.task.labels) == ["cat", "dog"]
    again = memoro.train(rows, backbone=backbone, task="pets", **quick)  # from kept statistics: digests are the same
    assert torch.equal(found.task.readout.weight, again.task.readout.weight)


def test_labels_of_other_kinds() -> None:
    images = [picture(at) for at in range(8)]
    several = load_data((images, [["a"], ["a", "b"], {"b"}, []] * 2), val_fraction=0, quiet=True)
    assert several.kind == "multilabel"
    assert several.train is not None
    assert several.train.targets[:4].tolist() == [[1, 0], [1, 1], [0, 1], [0, 0]]
    numbers = load_data((images, [at / 3 for at in range(8)]), val_fraction=0, quiet=True)
    assert numbers.kind == "regression"
    frame = pandas.DataFrame({"image": images, "price": range(8), "split": ["train"] * 6 + ["test"] * 2})
    priced = load_data(frame, label_column="price", kind="number", val_fraction=0, quiet=True)
    assert priced.test is not None
    assert priced.test.targets.tolist() == [[6.0], [7.0]]


def test_a_frame_keeps_to_the_working_directory_unless_it_is_trusted(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    frame = pandas.DataFrame({"path": [f"../{file}" for file in files], "label": LABELS})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "work")
        with pytest.raises(DataError, match=r"row 0: .* leaves the table's folder.*allow_absolute=True"):
            load_data(frame)
        pixels(load_data(frame, allow_absolute=True, val_fraction=0, quiet=True))


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (([picture(0)], ["a", "b"]), "1 images, but 2 labels"),
        (["a.png", "b.png", "c.png"], "a list without labels: give a path"),
        ([], "list is not a dataset; give a path"),
        (3, "int is not a dataset; give a path"),
    ],
)
def test_what_is_no_set_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(thing)


def test_an_item_that_is_no_image_is_left_out_and_named() -> None:
    items = [*(picture(at) for at in range(39)), b"junk"]
    [(where, reason)] = load_data((items, [*"ab"] * 20), quiet=True).skipped
    assert (where, reason) == ("image 39", "not a readable image (no known format)")


def test_image_folders_of_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` found these files itself, outside the working directory."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    save_classes(tmp_path / "set", {"a": 6, "b": 6})
    folder = {"data_dir": str(tmp_path / "set"), "cache_dir": str(tmp_path / "cache")}
    made = datasets.load_dataset("imagefolder", split="train", **folder)
    splits = load_data(made, val_fraction=0, quiet=True)
    assert splits.train is not None
    assert splits.train.targets.bincount().tolist() == [6, 6]
    assert splits.train.open(7).tobytes() == picture(7).tobytes()
    assert len(list(open_source([made]).keys())) == 12
    cells = [{"bytes": None, "path": str(tmp_path / "set" / "a" / "0000.png")}] * 4
    forged = datasets.Dataset.from_dict({"image": cells, "label": [0, 1, 0, 1]}, features=made.features)
    forged.info.builder_name = "imagefolder"  # its record says the same, but anybody may have written it
    with pytest.raises(DataError, match="leaves the table's folder"):
        load_data(forged, quiet=True)


def test_paths_are_read_from_lines(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.txt").write_text("\n".join([*files, "", "gone.png"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(files[:3]) + "\n"))
    listed, piped = open_source(["@list.txt"]), open_source(["-"])
    assert list(listed.keys()) == [*files, "gone.png"]
    assert list(piped.keys()) == list(piped.keys()) == files[:3]
    assert [read_bytes(one) for _, one in piped.read(files[:3])] == [to_bytes(picture(at)) for at in range(3)]
    assert listed.describe() != open_source(["@list.txt", "photos"]).describe()
    with pytest.raises(DataError, match=r"@nothing\.txt: No such file.*a path on each line"):
        open_source(["@nothing.txt"])


def test_predictions_of_paths_in_lines(
    shell: Shell, backbone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_classes(tmp_path, {"photos": 3})
    file = memoro.save_task(memoro.new_task(backbone, "pets", ["cat", "dog"]), tmp_path / "pets.safetensors")
    monkeypatch.setattr("sys.stdin", io.StringIO("photos/0002.png\nphotos/gone.png\nphotos/0000.png\n"))
    found = json.loads(shell("predict", "-", "-b", "vit", "-t", file, "-f", "json").out)
    assert list(found) == ["photos/0002.png", "photos/gone.png", "photos/0000.png"]
    assert found["photos/gone.png"] == {"error": "no such file."}
    (tmp_path / "list.txt").write_text("photos/0001.png\n")
    seen = json.loads(shell("explain", "@list.txt", "-b", "vit", "-t", file, "--json").out)
    assert list(seen["images"]) == ["photos/0001.png"]
