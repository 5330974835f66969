"""Tasks as folders of the hub: saved, found in its cache, described by a card that its own parser reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from conftest import random_task
from huggingface_hub import ModelCard, constants
from PIL import Image
from test_train_cli import run

import memoro
from memoro.backbones import Backbone
from memoro.cli.tasks import card as command
from memoro.errors import ServeError, TaskFileError
from memoro.serve.store import open_store
from memoro.tasks import hub
from memoro.tasks.task import Task
from memoro.tasks.taskfile import FILE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def pets(backbone: Backbone) -> Task:
    task = random_task(backbone, "pets", labels=["cat", "d|og <b>", "`hen`"])
    task.update_spec(
        training={"data": "photos/pets", "lr": 0.1, "notes": ["a list"]},
        metrics={
            "split": "test", "images": 9, "accuracy": 0.75, "loss": 0.5, "worst_classes": {"cat": 0.5},
            "confusion": [[2, 1, 0], [0, 3, 0], [1, 0, 2]],
        },
    )  # fmt: skip
    return task


Publish = Callable[..., None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Puts a task into an empty cache of the hub, as a download leaves it. There is no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def put(task: Task, name: str, *, commit: str = COMMIT, branch: str = "main") -> None:
        repository = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
        snapshot, blob = repository / "snapshots" / commit, repository / "blobs" / commit
        snapshot.mkdir(parents=True)
        memoro.save_task(task, blob)
        (snapshot / FILE).symlink_to(f"../../blobs/{commit}")

    return put


def test_a_saved_folder_is_loaded_again(pets: Task, tmp_path: Path) -> None:
    folder = pets.save_pretrained(tmp_path / "new" / "pets")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "confusion.png", FILE]
    for source in (folder, str(folder), folder / FILE):
        assert memoro.Task.from_pretrained(source).content_hash() == pets.content_hash()
    assert memoro.load_tasks(folder)[0].spec.metrics == pets.spec.metrics
    with pytest.raises(TaskFileError, match="contains no task files"):
        memoro.load_task(tmp_path)


def test_a_task_of_the_hub(pets: Task, backbone: Backbone, publish: Publish, tmp_path: Path) -> None:
    old = random_task(backbone, "pets", seed=5)
    publish(pets, "me/pets")
    publish(old, "me/pets", commit=COMMIT[::-1], branch="v1")
    assert memoro.load_task("me/pets").content_hash() == pets.content_hash()
    assert memoro.Task.from_pretrained("me/pets", revision="v1").content_hash() == old.content_hash()
    assert memoro.load_tasks("me/pets@v1")[0].content_hash() == old.content_hash()
    assert memoro.load_task("me/pets", revision=COMMIT).content_hash() == pets.content_hash()
    with pytest.raises(TaskFileError, match="No such file"):
        memoro.load_task(Path("me/pets"))  # a Path is always local
    local = memoro.save_task(random_task(backbone, "local"), tmp_path / "me" / "pets")
    assert memoro.load_task("me/pets").name == "local"
    local.unlink()
    assert memoro.load_task("me/pets").name == "pets"


def test_a_server_with_tasks_of_the_hub(pets: Task, backbone: Backbone, publish: Publish, tmp_path: Path) -> None:
    publish(pets, "me/pets")
    memoro.save_task(random_task(backbone, "local"), tmp_path / "local.safetensors")
    for places in (["me/pets"], ["me/pets@main"], ["me/pets", "local.safetensors"]):
        store = open_store(places, lambda _: backbone)
        assert store.current.info["pets"]["content"] == pets.content_hash()
        assert not store.writable
    with pytest.raises(
        ServeError, match=r"'my/tasks' is not a file or folder here.* For a new folder, write my/tasks/"
    ):
        open_store(["my/tasks"], lambda _: backbone)
    assert not (tmp_path / "my").exists()
    assert open_store(["my/tasks/"], lambda _: backbone).writable
    with pytest.raises(ServeError, match=r"local\.safetensor.* For a new folder, write local\.safetensor/"):
        open_store(["local.safetensor"], lambda _: backbone)  # a typo
    assert not (tmp_path / "local.safetensor").exists()


def test_what_the_hub_does_not_have(pets: Task, publish: Publish) -> None:
    publish(pets, "me/pets")
    with pytest.raises(TaskFileError, match=r"'me/cats' is not a file or folder here.*hf download me/cats"):
        memoro.load_task("me/cats")
    with pytest.raises(TaskFileError, match="could not be downloaded"):
        memoro.load_task("me/pets", revision="v2")
    for path in ("me/pets.safetensors", "pets", "./me/pets", "../me/pets", "a/b/c", "/me/pets"):
        with pytest.raises(TaskFileError, match="No such file"):
            memoro.load_task(path)


def test_a_file_of_the_hub_is_not_trusted(pets: Task, publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(pets, "me/pets")
    blob = Path("cache/models--me--pets/blobs") / COMMIT
    with monkeypatch.context() as patch:
        patch.setattr(hub, "MAX_FILE", blob.stat().st_size - 1)
        with pytest.raises(TaskFileError, match=r"me/pets/task\.safetensors on the hub is 0 MiB"):
            memoro.load_task("me/pets")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(TaskFileError, match="changed after saving"):
        memoro.load_task("me/pets")


def test_commands_take_hub_ids(pets: Task, backbone: Backbone, publish: Publish, tmp_path: Path, vit: Any) -> None:
    publish(pets, "me/pets")
    vit.save_pretrained("vit")
    Image.new("RGB", (30, 30), "red").save("red.png")
    assert run(tmp_path, "inspect", "me/pets", "--json").json["file"] == "me/pets"
    found = run(tmp_path, "predict", "red.png", "-b", "vit", "-t", "me/pets", "--format", "json").json
    assert found["red.png"]["pets"]["label"] in pets.labels
    run(tmp_path, "compose", f"me/pets@{COMMIT}", "-o", "bundle.safetensors")
    assert [task.name for task in memoro.load_tasks("bundle.safetensors")] == ["pets"]
    said = run(tmp_path, "predict", "red.png", "-b", "vit", "-t", "me/pets", "-t", "me/cats", code=1).stderr
    assert "hf download me/cats" in said
    assert len(said.splitlines()) == 1
    for colour in ("red", "blue"):
        Path("set", colour).mkdir(parents=True)
        for at in range(4):
            Image.new("RGB", (20 + at, 20), colour).save(f"set/{colour}/{at}.png")
    run(tmp_path, "train", "set", "-b", "vit", "--extends", "me/pets", "--task", "colours", "--lr", 0.1, "--epochs", 1,
        "--image-size", 20, "--set", "workers=0", "--set", "cache=false")  # fmt: skip
    trained = memoro.load_task("colours.safetensors")
    assert trained.parents[0].content == pets.content_hash()
    assert sum(map(sum, trained.spec.metrics["confusion"])) == trained.spec.metrics["images"]


def test_the_card_is_valid(pets: Task, tmp_path: Path) -> None:
    folder = pets.save_pretrained(tmp_path, repo_id="me/pets", license="apache-2.0", base_model="google/vit-base")
    card = ModelCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "memoro"
    assert data["base_model"] == "google/vit-base"
    assert data["pipeline_tag"] == "image-classification"
    assert data["license"] == "apache-2.0"
    assert "memoro" in data["tags"]
    results = {result.metric_type: result for result in card.data.eval_results}
    assert set(results) == {"accuracy", "loss"}
    assert results["accuracy"].metric_value == 0.75
    assert results["accuracy"].dataset_name == "photos/pets"
    assert results["accuracy"].dataset_split == "test"
    assert "![confusion matrix: true by predicted classes](confusion.png)" in card.text
    with Image.open(folder / "confusion.png") as picture:
        assert picture.size[0] > 300
    assert "| accuracy | 0.75 |" in card.text
    assert r"cat, d\|og \<b\>, \`hen\`" in card.text  # no markup of the file's own


def test_the_cards_example_runs(pets: Task, vit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    pets.save_pretrained("pets", base_model="vit")
    code = Path("pets/README.md").read_text().split("```")[1].removeprefix("python\n")
    assert len(code.strip().splitlines()) == 4
    Image.new("RGB", (30, 30), "red").save("photo.jpg")
    exec(code)


def test_the_card_of_a_strangers_file(pets: Task, backbone: Backbone, tmp_path: Path) -> None:
    name = "x`]([a](b)---"
    odd = random_task(backbone, name, labels=["---", "\n# title"], extends=[pets])
    odd.update_spec(
        training={"data": "\n---\nlicense: mit", "deep": {"a": 1}, "big": 10**400},
        metrics={"accuracy": True, "<b>": 1.0, "big": 10**400, "split": ["a"], "confusion": [[1, 2], [3, -4]]},
    )
    folder = odd.save_pretrained(tmp_path)
    assert not (folder / "confusion.png").exists()
    card = ModelCard.load(folder / "README.md")
    assert "license" not in card.data.to_dict()
    assert "\n# title" not in card.text
    assert "It extends pets" in card.text
    assert "model-index" not in card.data.to_dict()


def test_the_card_command(pets: Task, backbone: Backbone, tmp_path: Path) -> None:
    memoro.save_tasks([pets, random_task(backbone, "age", head="regression")], tmp_path / "both.safetensors")
    said = run(tmp_path, "card", "both.safetensors", "--license", "mit").stdout
    assert said == f"both: README.md, confusion-0.png, {FILE}\n"
    card = ModelCard.load(tmp_path / "both" / "README.md")
    assert card.data.license == "mit"
    assert "memoro.load_tasks('both')" in card.text
    assert [task.name for task in memoro.load_tasks(tmp_path / "both")] == ["pets", "age"]
    assert "memoro card pets.safetensors --repo me/pets" in str(command.__doc__), "the help names what is published"
    run(tmp_path, "card", "both", "--repo", "me/both")
    assert "memoro.load_tasks('me/both')" in ModelCard.load(tmp_path / "both" / "README.md").text
    run(tmp_path, "card", "both", "--base-model", "google/vit-base")  # written again, in place
    assert ModelCard.load(tmp_path / "both" / "README.md").data.base_model == "google/vit-base"
    there = sorted(path.name for path in (tmp_path / "both").iterdir())
    assert "kept" not in run(tmp_path, "card", "both", "--base-model", "google/vit-base").stdout, "nothing changed"
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == there
    (tmp_path / "both" / "README.md").write_text("my words")
    assert "you may have edited, is kept as README.md.3." in run(tmp_path, "card", "both").stdout
    assert (tmp_path / "both" / "README.md.3").read_text() == "my words"
    (tmp_path / "both" / "README.md").write_text("my other words")
    pets.save_pretrained(tmp_path / "both")
    assert (tmp_path / "both" / "README.md.4").read_text() == "my other words", "and so it is in Python"


def test_a_card_does_not_go_among_other_files(pets: Task, tmp_path: Path) -> None:
    memoro.save_task(pets, tmp_path / "pets.safetensors")
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "README.md").write_text("my photos")
    said = run(tmp_path, "card", "pets.safetensors", code=1).stderr
    assert "pets is a folder with other files" in said
    assert sorted(path.name for path in (tmp_path / "pets").iterdir()) == ["README.md", "cat"]
    assert (tmp_path / "pets" / "README.md").read_text() == "my photos"
    run(tmp_path, "card", "pets.safetensors", "--out", "pets")
    assert (tmp_path / "pets" / FILE).is_file()


def test_a_card_keeps_the_file_of_another_task(pets: Task, backbone: Backbone, tmp_path: Path) -> None:
    memoro.save_task(pets, tmp_path / "pets.safetensors")
    memoro.save_task(random_task(backbone, "age", head="regression"), tmp_path / "age.safetensors")
    run(tmp_path, "card", "pets.safetensors", "--out", "hub")
    assert "kept" not in run(tmp_path, "card", "pets.safetensors", "--out", "hub").stderr
    said = run(tmp_path, "card", "age.safetensors", "--out", "hub").stderr
    assert f"{FILE} was there already: the old file is kept as hub/{FILE}.1." in said
    (tmp_path / "hub" / f"{FILE}.1").rename(tmp_path / "kept.safetensors")
    assert memoro.load_task(tmp_path / "kept.safetensors").content_hash() == pets.content_hash()
    assert memoro.load_task(tmp_path / "hub").name == "age"


def test_pushing(pets: Task, publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskFileError, match=r"could not upload to me/pets .*hf auth login"):
        pets.push_to_hub("me/pets")  # there is no network
    with pytest.raises(TaskFileError, match="look like owner/name"):
        pets.push_to_hub("./pets")
    pushed: dict[str, Any] = {}

    def upload(api: Any, *, repo_id: str, folder_path: str, **options: Any) -> str:
        pushed.update(options, task=memoro.load_task(folder_path), card=ModelCard.load(Path(folder_path, "README.md")))
        return f"https://huggingface.co/{repo_id}/commit/1"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda api, name, **options: pushed.update(options))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert pets.push_to_hub("me/pets", private=True, license="mit").endswith("me/pets/commit/1")
    assert pushed["private"] is True
    assert pushed["task"].content_hash() == pets.content_hash()
    assert "memoro.load_task('me/pets')" in pushed["card"].text
    assert pushed["card"].data.license == "mit"
    branches: list[str] = []

    def create_branch(api: Any, name: str, *, branch: str, exist_ok: bool) -> None:
        assert (name, exist_ok) == ("me/pets", True)
        branches.append(branch)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_branch", create_branch)
    for revision in ("v2", "refs/pr/1"):
        pets.push_to_hub("me/pets", revision=revision)
        assert pushed["revision"] == revision
    assert branches == ["v2"], "pull requests are no branches"
