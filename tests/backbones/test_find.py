"""A task file knows its backbone: the shipped one, one of the user's folders, or one of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from PIL import Image
from shell import Shell, shell

import memoro
from memoro.backbones import Backbone
from memoro.backbones.load import FOLDERS
from memoro.errors import BackboneError, CompositionError

__all__ = ["shell"]  # fixtures


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def saved(folder: Path, tmp_path: Path, name: str = "pets", **options: Any) -> Path:
    task = random_task(memoro.load_backbone(folder), name, **options)
    return memoro.save_task(task, tmp_path / f"{name}.safetensors")


def renamed(file: Path, name: str, into: Path) -> Path:
    """The same task, whose file claims another name for its backbone."""
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    record = json.loads(header["__metadata__"]["memoro"])
    record["tasks"][0]["backbone"]["name"] = name
    header["__metadata__"]["memoro"] = json.dumps(record)
    whole = json.dumps(header).encode()
    into.write_bytes(len(whole).to_bytes(8, "little") + whole + text[8 + size :])
    return into


def test_a_task_of_the_shipped_backbone_needs_no_backbone_option(shell: Shell, photo: Path, tmp_path: Path) -> None:
    task = random_task(memoro.load_backbone(), "pets")
    memoro.save_task(task, tmp_path / "pets.safetensors")
    assert memoro.load_backbone(task.spec.backbone).name == "memoro-tiny"
    shell("predict", photo, "-t", "pets.safetensors")
    said = shell("predict", photo, "-t", "pets.safetensors", "-b", "vit", code=1)
    assert "'pets' was trained for memoro-tiny" in said.err, "-b overrides"


def test_a_folder_is_found_by_its_fingerprint(
    shell: Shell, vit: Any, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "vit", tmp_path)
    assert memoro.load_task(file).spec.backbone.name == "vit"
    assert str(tmp_path).encode() not in file.read_bytes(), "no path of this machine is in the file"
    told = shell("predict", photo, "-t", file, code=1).err
    assert "the tasks were trained on vit (ViT," in told
    assert "Pass it with --backbone FOLDER" in told
    assert "set MEMORO_BACKBONES" in told
    shell("predict", photo, "-t", file, "-b", "vit")
    # Other weights under the same name come first and do not match; the right ones have another name.
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "vit").rename(models / "other")
    next(vit.parameters()).data.add_(1)
    vit.save_pretrained(models / "vit")
    (models / "broken").mkdir()
    (models / "broken" / "config.json").write_text("{")
    monkeypatch.setenv(FOLDERS, f"{tmp_path / 'mess'}")
    assert "is not a folder" in shell("predict", photo, "-t", file, code=1).err
    (tmp_path / "mess").mkdir()
    monkeypatch.setenv(FOLDERS, f"{tmp_path / 'mess'}:{models}")
    answer = json.loads(shell("predict", photo, "-t", file, "--format", "json").out)
    explicit = json.loads(shell("predict", photo, "-t", file, "-b", models / "other", "--format", "json").out)
    assert answer == explicit
    assert "pets" in shell("verify", "-t", file).out
    assert memoro.load_backbone(memoro.load_task(file).spec.backbone).name == "other"
    monkeypatch.setenv(FOLDERS, str(models / "other"))
    shell("predict", photo, "-t", file)
    monkeypatch.setenv(FOLDERS, str(models / "vit"))
    assert "set MEMORO_BACKBONES" in shell("predict", photo, "-t", file, code=1).err


def test_a_folder_that_a_file_names_is_never_opened(shell: Shell, photo: Path, tmp_path: Path) -> None:
    file = saved(tmp_path / "vit", tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "vit").rename(tmp_path / "owner" / "vit")
    for number, name in enumerate((str(tmp_path / "owner" / "vit"), "owner/vit", "./owner/vit", "owner\\vit", "..")):
        other = renamed(file, name, tmp_path / f"{number}.safetensors")
        assert "Pass it with --backbone FOLDER" in shell("predict", photo, "-t", other, code=1).err
    shell("predict", photo, "-t", tmp_path / "0.safetensors", "-b", "owner/vit")


def offline_hub(folder: Path, source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds one model, and no network. Returns the folder of the model's files."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    place = folder / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    for file in source.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return snapshot


@pytest.fixture
def hub(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A task file that names owner/vit of the hub, and the folder of that model's files in the hub cache."""
    file = renamed(saved(tmp_path / "vit", tmp_path), "owner/vit", tmp_path / "hub.safetensors")
    return file, offline_hub(tmp_path / "hub", tmp_path / "vit", "owner/vit", monkeypatch)


def test_a_hub_id_is_loaded_and_its_fingerprint_checked(
    shell: Shell, hub: tuple[Path, Path], vit: Any, photo: Path
) -> None:
    file, snapshot = hub
    said = shell("predict", photo, "-t", file)
    assert "backbone: owner/vit" in said.err
    assert memoro.load_backbone(memoro.load_task(file).spec.backbone).name == "owner/vit"
    next(vit.parameters()).data.add_(1)
    vit.save_pretrained(snapshot)
    told = shell("predict", photo, "-t", file, code=1).err
    assert "trained on owner/vit (ViT" in told
    assert "has other weights now" in told


@pytest.mark.parametrize("answer", [True, ConnectionError("the hub went away")])
def test_a_processor_that_could_not_be_downloaded_is_not_replaced(
    hub: tuple[Path, Path], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has no processor: as after a download that broke off."""

    def file_exists(source: str, name: str) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    (hub[1] / "preprocessor_config.json").unlink(missing_ok=True)
    memoro.load_backbone("owner/vit")  # offline there is none, as far as one can tell
    monkeypatch.setattr("memoro.backbones.load.is_hub_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.file_exists", file_exists)
    with pytest.raises(BackboneError, match="owner/vit: its image processor cannot be read"):
        memoro.load_backbone("owner/vit")


def test_a_model_of_another_shape_is_not_downloaded(shell: Shell, hub: tuple[Path, Path], photo: Path) -> None:
    file, snapshot = hub
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 99}))
    (snapshot / "model.safetensors").unlink()
    assert "owner/vit on the hub is another model now" in shell("predict", photo, "-t", file, code=1).err


def test_code_of_a_checkpoint_is_never_run(
    shell: Shell, hub: tuple[Path, Path], photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, snapshot = hub
    config = json.loads((snapshot / "config.json").read_text())
    trace = tmp_path / "was-run"
    (snapshot / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    evil = {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    for change in ({**evil, "model_type": "evil"}, {"attn_implementation": "owner/kernel"}):
        (snapshot / "config.json").write_text(json.dumps({**config, **change}))
        shell("predict", photo, "-t", file, code=1)
        with pytest.raises(BackboneError, match="owner/vit"):
            memoro.load_backbone("owner/vit")
        assert not trace.exists()
    (snapshot / "config.json").write_text(json.dumps({**config, **evil}))
    shell("predict", photo, "-t", file)
    assert not trace.exists()


def test_tasks_of_two_backbones_are_refused(vit: Any, backbone: Backbone) -> None:
    other = random_task(memoro.load_backbone(), "other")
    with pytest.raises(CompositionError, match="'other' was trained for memoro-tiny"):
        memoro.compose(backbone, [random_task(backbone, "pets"), other])
