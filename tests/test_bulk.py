"""Predictions for many images: every source, shards that are whole, kill and resume, embeddings."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from conftest import in_fork, random_task
from pyarrow import parquet
from test_cli_words import Shell, shell  # noqa: F401
from test_predict import mess, picture, read_csv, tasks  # noqa: F401

import memoro
from memoro.backbones import Backbone
from memoro.data import loader
from memoro.data.tables import Places
from memoro.data.unlabelled import Chain, Stream, Unlabelled, is_endless, open_unlabelled
from memoro.engine import answers
from memoro.engine.answers import AnswerOptions, Routing
from memoro.errors import DataError
from memoro.evaluation import bulk, on_ray
from memoro.evaluation.bulk import MANIFEST, Job, Predictor, answer_here, begin
from memoro.evaluation.on_ray import place_workers
from memoro.images import find_images, finding
from memoro.regimes import METHODS, TaskPlan
from memoro.tasks.familiarity import fit_familiarity

COUNT = 21
NAMES = [f"{number:02}.png" for number in range(COUNT)]


def png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number, 20, 20).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("photos")
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(png(number))
    (folder / "05.png").write_bytes(b"junk")
    return folder


@pytest.fixture
def predictor(backbone: Backbone) -> Predictor:
    pets = random_task(backbone, "pets", labels=["cat", "dog"])
    return Predictor(backbone, (pets, random_task(backbone, "age", seed=1, head="regression")), AnswerOptions(4))


def new_job(source: Unlabelled | Path, predictor: Predictor, folder: str = "answers", **options: Any) -> Job:
    source = open_unlabelled([str(source)]) if isinstance(source, Path) else source
    return Job(source, predictor, Path(folder), **{"shard_size": 8, **options})


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(file).to_pylist()]


# ---------------------------------------------------------------------------------------------------------- shards


def test_shards_have_the_rows_of_plain_predict(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:  # noqa: F811
    common = ("predict", "mess", "-b", "vit", *tasks, "--batch-size", 2)
    shell(*common, "--out", "one.parquet")
    said = shell(*common, "--out", "many/", "--shard-size", 4)
    whole = parquet.read_table(tmp_path / "one.parquet").to_pylist()
    assert read_rows(tmp_path / "many") == whole, "the same batches, so the same numbers"
    assert sorted(os.listdir("many")) == [MANIFEST, "part-000000.parquet", "part-000001.parquet"]
    assert parquet.read_table("many").num_rows == len(whole), "readers of folders leave out the manifest"
    assert "7 images answered in many" in said.err
    assert "2 of 7 images could not be read" in said.err
    assert sum(row["error"] is not None for row in whole) == 2
    shell(*common, "--out", "text/", "--shard-size", 4, "--format", "csv")
    assert "".join(file.read_text() for file in sorted(Path("text").glob("*.csv"))).count("\n") == len(whole) + 2
    again = shell(*common, "--out", "many/", "--shard-size", 4, "--resume")
    assert "7 images were answered before, 0 are left." in again.err
    assert "0 images answered" in again.err


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_resuming_knows_what_could_not_be_read_before(
    form: str,
    shell: Shell,  # noqa: F811
    mess: Path,  # noqa: F811
    tasks: list[str],  # noqa: F811
) -> None:
    (mess / "junk.jpg").rename(mess / "bad, 1.jpg")
    resume = ("predict", "mess", "-b", "vit", *tasks, "-o", "out/", "-f", form, "--shard-size", 4, "--resume")
    shell(*resume)
    first, last = sorted(Path("out").glob("part-*"))
    said = shell(*resume, "--strict", code=1).err
    assert "2 of 7 images could not be read, such as mess/bad, 1.jpg: not a readable image" in said
    last.unlink()
    assert "2 of 7 images" in shell(*resume, "--strict", code=1).err
    last.unlink()
    (mess / "deep" / "photo").write_bytes(b"\xff\xd8\xff")
    (mess / "deep" / "wrong.txt").write_bytes(b"RIFF0000WEBP")
    assert "4 of 7 images" in shell(*resume).err, "some could be read before"
    first.write_bytes(b"\xff")
    assert "is damaged" in shell(*resume, code=1).err


@pytest.mark.parametrize("embeddings", [False, True])
def test_an_image_whose_answers_are_dropped_has_a_row(photos: Path, predictor: Predictor, embeddings: bool) -> None:
    pets, dim = predictor.models[0], predictor.backbone.dim
    assert isinstance(pets, memoro.Task)
    near = torch.randn(30, dim, generator=torch.Generator().manual_seed(0)) / 1000  # nothing looks like these
    pets.describe(familiarity=fit_familiarity(near, torch.arange(30) % 2, torch.zeros(dim)))
    how = AnswerOptions(4, routing=Routing("drop", 1.0), embeddings=embeddings)
    job = new_job(photos, Predictor(predictor.backbone, (pets,), how))
    answer_here(job, begin(job))
    rows = read_rows(job.folder)
    assert [row["image"] for row in rows] == [f"photos/{name}" for name in NAMES]
    assert [row["image"] for row in rows if row["error"]] == ["photos/05.png"]
    assert {row["task"] for row in rows if not row["error"]} == {"base" if embeddings else None}
    assert {row["label"] for row in rows} == {None}


def test_worker_processes_change_nothing(photos: Path, predictor: Predictor) -> None:
    here, there = (new_job(photos, predictor, name) for name in ("here", "there"))
    ticks: list[int] = []
    answer_here(here, begin(here), tick=ticks.append)
    with pytest.MonkeyPatch.context() as patch:
        started = []
        new = loader.ProcessPoolExecutor
        patch.setattr(
            loader, "ProcessPoolExecutor", lambda *given, **options: started.append(1) or new(*given, **options)
        )
        tally = answer_here(there, begin(there), workers=2)
    assert len(started) == 1, "the processes go on from shard to shard"
    assert read_rows(here.folder) == read_rows(there.folder)
    assert (tally.images, tally.unreadable, sum(ticks)) == (COUNT, 1, COUNT)


def test_an_image_that_kills_its_decoder_is_a_row_with_an_error(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = list(predictor.predict(read_all(open_unlabelled(["photos"]), COUNT)))
    own, here = answers.open_image, os.getpid()

    def crash(picture: Any, **options: Any) -> Any:
        if str(picture) in {"photos/03.png", "photos/11.png"}:
            assert os.getpid() != here
            os.kill(os.getpid(), signal.SIGKILL)
        return own(picture, **options)

    monkeypatch.setattr(answers, "open_image", crash)
    found = list(predictor.predict(read_all(open_unlabelled(["photos"]), COUNT), predictor.decoder(2)))
    assert {one.image: one.error for one in found if one.error and "process" in one.error} == dict.fromkeys(
        ["photos/03.png", "photos/11.png"], "the process that decoded it died, possibly out of memory."
    )
    assert [one.image for one in found] == [one.image for one in right]
    assert found[5] == right[5], "errors of other images stay"
    for one, other in zip(found, right, strict=True):
        if one.error is None:  # two batches are one image smaller, which rounds differently
            expected = other.answers["pets"]["probability"]
            assert one.answers["pets"]["probability"] == pytest.approx(expected, abs=1e-5)


def test_killed_in_the_middle_and_resumed(photos: Path, predictor: Predictor) -> None:
    """The second shard is under way, and its file begun, when the process is killed."""

    def run() -> None:
        seen = 0

        def tick(count: int) -> None:
            nonlocal seen
            seen += count
            if seen > 8:
                Path("waiting").touch()
                time.sleep(600)

        answer_here(job, begin(job), workers=1, tick=tick)

    job = new_job(photos, predictor)
    process = in_fork(run)
    while not Path("waiting").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [file.name for file in job.folder.glob("part-*")] == ["part-000000.parquet"]
    assert len(list(job.folder.glob(".part-000001*"))) == 1, "half a shard has a hidden name"
    first = job.path(0).stat()
    todo = begin(job, resume=True)
    assert (todo.images, todo.answered, todo.done) == (COUNT, 8, {0})
    assert answer_here(job, todo).images == COUNT - 8
    assert job.path(0).stat() == first, "what is done is not done again"
    assert sorted(os.listdir(job.folder)) == [MANIFEST, *(f"part-00000{number}.parquet" for number in range(3))]
    rows = read_rows(job.folder)
    assert [row["image"] for row in rows if row["task"] != "age"] == [f"photos/{name}" for name in NAMES]
    assert [row["image"] for row in rows if row["error"]] == ["photos/05.png"]


def test_a_failing_disk_leaves_no_shard(photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: Any, *given: Any, **options: Any) -> None:
        next(rows)
        raise DataError("full")

    job = new_job(photos, predictor)
    todo = begin(job)
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "write_predictions", fail)
        with pytest.raises(DataError, match="full"):
            answer_here(job, todo)
    assert os.listdir(job.folder) == [MANIFEST]
    assert answer_here(job, begin(job, resume=True)).images == COUNT


def test_a_disk_that_is_full_at_the_end_of_a_shard(
    photos: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: Any, *given: Any, **options: Any) -> None:
        list(rows)
        raise DataError("full")

    def run() -> None:
        with pytest.raises(DataError, match="full"):
            answer_here(job, todo)
        ended.append(True)

    monkeypatch.setattr(bulk, "write_predictions", fail)
    job, ended = new_job(photos, predictor), list[bool]()
    todo = begin(job)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert ended, "it stops with the error instead of waiting forever"
    assert os.listdir(job.folder) == [MANIFEST]


def test_killed_while_the_manifest_was_written(photos: Path, predictor: Predictor) -> None:
    def run() -> None:
        os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        begin(job)

    job = new_job(photos, predictor)
    in_fork(run).join()
    assert [file.suffix for file in job.folder.iterdir()] == [".part"]
    assert answer_here(job, begin(job, resume=True)).images == COUNT
    assert not list(job.folder.glob(".*"))


def test_another_job_is_refused(photos: Path, predictor: Predictor, backbone: Backbone) -> None:
    job = new_job(photos, predictor)
    answer_here(job, begin(job))
    with pytest.raises(DataError, match=r"already has 3 shards of answers\. To continue, add --resume"):
        begin(job)
    with pytest.raises(DataError, match="photos is not an empty folder"):
        begin(replace(job, folder=photos))
    age = predictor.models[1]
    trained = random_task(backbone, "pets", seed=5, labels=["cat", "dog"])
    others: dict[str, Job] = {
        "the tasks": replace(job, predictor=replace(predictor, models=(trained, age))),
        "--top": replace(job, predictor=replace(predictor, how=AnswerOptions(4, top=2))),
        "--shard-size": replace(job, shard_size=4),
        "--format": replace(job, form="csv"),
    }
    for what, other in others.items():
        with pytest.raises(DataError, match=f"these differ: {what}\\. Repeat"):
            begin(other, resume=True)
    begin(replace(job, predictor=replace(predictor, how=AnswerOptions(2))), resume=True)  # the same but for rounding
    (photos / "07.png").rename(photos / "more.png")
    with pytest.raises(DataError, match="these differ: the images"):
        begin(job, resume=True)
    (job.folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"_manifest\.json is missing or damaged"):
        begin(job, resume=True)


def test_images_that_change_while_it_runs_are_noticed(photos: Path, predictor: Predictor) -> None:
    job = new_job(photos, predictor)
    todo = begin(job)
    (photos / "12a.png").write_bytes(png(0))
    with pytest.raises(DataError, match="these differ: the images"):
        answer_here(job, todo)
    assert [row["image"] for row in read_rows(job.folder) if row["task"] != "age"][-1] == "photos/07.png"


# ------------------------------------------------------------------------------------------------------------- Ray


@pytest.mark.parametrize(
    ("machines", "wanted", "right"),
    [
        ([(8, 0)], None, (2, 4, 0)),
        ([(6, 0)], None, (1, 6, 0)),
        ([(2, 0)] * 2, None, (2, 2, 0)),  # a worker of four cores would never be placed
        ([(2, 0)] * 2, 1, (1, 2, 0)),
        ([(2, 0)] * 2, 3, (3, 1, 0)),
        ([(2, 0)] * 2, 9, (9, 1, 0)),
        ([(0, 0), (16, 0), (1, 0)], None, (5, 3, 0)),
        ([(16, 0), (16, 4)], None, (4, 4, 1)),
        ([(16, 2), (3, 1)], None, (3, 3, 1)),
        ([(16, 2), (2, 4)], None, (4, 1, 1)),
        ([(0, 2), (8, 0)], None, (2, 4, 0)),  # a worker on a GPU needs a core as well
        ([(0, 0)], None, (1, 1, 0)),
        ([], 3, (3, 1, 0)),
    ],
)
def test_workers_fit_on_single_machines(
    machines: list[tuple[int, int]], wanted: int | None, right: tuple[int, int, int]
) -> None:
    assert place_workers([{"CPU": cpus, "GPU": gpus} for cpus, gpus in machines], wanted) == right


def test_a_ray_worker_out_of_memory_is_replaced(photos: Path, predictor: Predictor) -> None:
    """With a stand-in for Ray that runs calls when their results are asked for."""
    errors = {name: type(name, (Exception,), {}) for name in ("RayActorError", "OutOfMemoryError", "RayTaskError")}
    asked, told, deaths = list[dict[str, int]](), list[str](), [errors["OutOfMemoryError"], errors["RayActorError"]]

    class Remote:
        def __init__(self, job: Job) -> None:
            self.ready = SimpleNamespace(remote=lambda *given: lambda: None)
            self.answer = SimpleNamespace(remote=lambda shard: lambda: job.answer(shard))

    def get(call: Callable[[], Any]) -> Any:
        if deaths and (found := call()) is not None:
            raise deaths.pop()(found)
        return call()

    def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return (calls[:1] if len(waits) > 2 else []), calls

    waits: list[float] = []
    node = {"Alive": True, "Resources": {"CPU": 2.0}}
    fake = SimpleNamespace(
        nodes=lambda: [node, node, {**node, "Alive": False}],
        remote=lambda **options: asked.append(options) or (lambda kind: SimpleNamespace(remote=Remote)),
        put=lambda job: job,
        get=get,
        wait=wait,
        exceptions=SimpleNamespace(**errors),
    )
    job = new_job(photos, predictor)
    tally = on_ray._run(fake, job, begin(job), None, lambda count: None, told.append)
    assert asked == [{"num_cpus": 2, "num_gpus": 0}]
    assert told == ["no worker is ready after 60 s; each needs 2 cores of one machine. See `ray status`."]
    assert (tally.images, deaths) == (COUNT, [])
    assert len(list(job.folder.glob("part-*"))) == 3


def test_streams_are_not_for_ray(photos: Path, predictor: Predictor) -> None:
    stream = Stream(None, "image", "owner/name:train", Places("."), COUNT)
    for source in (stream, Chain((open_unlabelled(["photos"]), stream))):
        with pytest.raises(DataError, match="leave out --ray or --streaming"):
            on_ray.check_ray(new_job(source, predictor))


def test_an_address_behind_ray_is_no_image(shell: Shell, photos: Path, tasks: list[str]) -> None:  # noqa: F811
    common = ("predict", "photos", "-b", "vit", *tasks, "-o", "out/")
    assert "use --ray-address head:6379" in shell(*common, "--ray", "head:6379", code=2).err


# --------------------------------------------------------------------------------------------------------- sources


def write_zip(folder: Path) -> None:
    with zipfile.ZipFile("set.zip", "w") as archive:
        archive.writestr("__MACOSX/x.png", b"x")
        for name in NAMES:
            archive.writestr(f"deep/{name}", (folder / name).read_bytes())


def write_csv(folder: Path) -> None:
    Path("set.csv").write_text("id,path\n" + "".join(f"{name[:2]},photos/{name}\n" for name in NAMES))


def write_json_lines(folder: Path) -> None:
    Path("set.jsonl").write_text("".join(json.dumps({"image": f"photos/{name}"}) + "\n" for name in NAMES))


def write_paths(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"path": [f"photos/{name}" for name in NAMES]}), "paths.parquet")


def write_images(folder: Path) -> None:
    cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in NAMES]
    parquet.write_table(pyarrow.table({"n": list(range(COUNT)), "photo": cells}), "images.parquet", row_group_size=5)


def save_dataset(folder: Path) -> None:
    cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in NAMES]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": cells}, features=features).save_to_disk("saved")


SOURCES: dict[str, Callable[[Path], None]] = {
    "set.zip": write_zip,
    "set.csv": write_csv,
    "set.jsonl": write_json_lines,
    "paths.parquet": write_paths,
    "images.parquet": write_images,
    "saved": save_dataset,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_answers(name: str, photos: Path, predictor: Predictor) -> None:
    SOURCES[name](photos)
    found = list(predictor.predict(read_all(open_unlabelled([name]), 6)))
    right = list(predictor.predict(read_all(open_unlabelled(["photos"]), COUNT)))
    assert [one.answers for one in found] == [one.answers for one in right]
    assert [at for at, one in enumerate(found) if one.error] == [5]
    assert len({one.image for one in found}) == COUNT
    assert found[3].answers != found[4].answers


def read_all(source: Unlabelled, step: int) -> Any:
    """In parts that are no multiples of a batch or of a row group."""
    keys = list(source.keys())
    return (picture for at in range(0, len(keys), step) for picture in source.read(keys[at : at + step]))


def test_sources_can_be_mixed(photos: Path, predictor: Predictor) -> None:
    write_zip(photos)
    write_images(photos)
    write_paths(photos)
    source = open_unlabelled(["photos/01.png", "photos", "set.zip", "*.parquet"])
    images = [name for name, _ in read_all(source, 10)]
    assert len(images) == 4 * COUNT
    assert images[:3] == ["photos/01.png", "photos/00.png", "photos/02.png"], "each file once"
    assert images[COUNT] == "set.zip/deep/00.png"
    assert images[-1] == "photos/20.png"
    assert "images.parquet, row 20" in images


def test_places_that_overlap_give_each_image_once(photos: Path) -> None:
    (photos / "deep").mkdir()
    (photos / "deep" / "x.png").write_bytes(png(1))
    (photos / "link").symlink_to("deep")
    Path("other").mkdir()
    Path("other/y.png").write_bytes(png(2))
    places = ["photos/deep", "photos/*.png", "photos", "photos/link", "other", "./photos/0*", "other/y.png", "**/*.png"]
    found = list(find_images(places))
    separate = [path for place in places for path in find_images([place])]
    assert found == list(dict.fromkeys(separate))
    assert len(found) < len(separate)
    assert list(find_images(["other/y.png"] * 2)) == [Path("other/y.png")]


def test_folders_that_do_not_overlap_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "walk_images", lambda folder: (Path(folder, f"{at}.png") for at in range(20_000)))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tracemalloc.start()
    assert sum(1 for _ in find_images([tmp_path / "one", tmp_path / "two"])) == 40_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400_000, "the paths of one folder have several megabytes"


def test_a_bad_row_of_a_table_is_a_row_with_an_error(photos: Path, predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(0))
    (photos / "set.csv").write_text("path,note\n00.png,\nmissing.png,\n../secret.png,\n,empty\n")
    found = list(predictor.predict(read_all(open_unlabelled(["photos/set.csv"]), 9)))
    assert [one.error and one.error.split(";")[0] for one in found] == [
        None, "no such file.", "'../secret.png' leaves the table's folder", "no image.",
    ]  # fmt: skip
    assert "--allow-absolute" in (found[2].error or "")
    trusted = open_unlabelled(["photos/set.csv"], allow_absolute=True)
    assert [one.error for one in predictor.predict(read_all(trusted, 9))][2] is None


def test_trusting_a_table_is_part_of_the_job(
    photos: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.png").write_bytes(png(0))
    monkeypatch.chdir(photos)
    Path("set.csv").write_text("path\n../secret.png\n")
    cells = [{"bytes": None, "path": "../secret.png"}]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    parquet.write_table(pyarrow.table({"image": pyarrow.array(cells, kind)}), "set.parquet")
    dataset = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    for number, table in enumerate(["set.csv", "set.parquet", dataset, dataset.to_iterable_dataset()]):
        plain, trusting = (
            new_job(open_unlabelled([table], allow_absolute=trust), predictor, f"answers-{number}")
            for trust in (False, True)
        )
        answer_here(plain, begin(plain))
        [row] = read_rows(plain.folder)
        assert "use --allow-absolute" in row["error"]
        with pytest.raises(DataError, match="these differ: --allow-absolute"):
            begin(trusting, resume=True)
        plain.path(0).unlink()
        assert answer_here(trusting, begin(trusting, resume=True)).unreadable == 0
        with pytest.raises(DataError, match="these differ: --allow-absolute"):
            begin(plain, resume=True)
        manifest = json.loads((plain.folder / MANIFEST).read_text())
        assert manifest.pop("allow_absolute") is True
        (plain.folder / MANIFEST).write_text(json.dumps(manifest))  # as older versions wrote it
        begin(plain, resume=True)


def test_tables_say_what_they_lack(photos: Path) -> None:
    Path("odd.csv").write_text("name,size\na,1\n")
    with pytest.raises(DataError, match="no column for the image's path among 'name', 'size'"):
        open_unlabelled(["odd.csv"])
    Path("odd.jsonl").write_text('{"path": "1.png"}\n[1]\n')
    with pytest.raises(DataError, match=r"odd.jsonl, line 2: not a JSON object"):
        list(open_unlabelled(["odd.jsonl"]).keys())
    Path("odd.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_unlabelled(["odd.parquet"])


def test_streams_without_a_length(photos: Path, predictor: Predictor) -> None:
    def rows() -> Any:
        for name in NAMES[:16]:
            yield {"image": {"bytes": (photos / name).read_bytes(), "path": None}}

    features = datasets.Features({"image": datasets.Image()})
    source = open_unlabelled([datasets.IterableDataset.from_generator(rows, features=features)])
    assert isinstance(source, Stream)
    assert is_endless(source)
    job = new_job(source, predictor)
    assert answer_here(job, begin(job)).images == 16
    assert len(list(job.folder.glob("part-*"))) == 2, "none for an empty rest"
    job.path(1).unlink()
    assert answer_here(job, begin(job, resume=True)).images == 8
    pets = [row for row in read_rows(job.folder) if row["task"] == "pets"]
    right = predictor.predict(read_all(open_unlabelled(["photos"]), COUNT))
    assert [row["probability"] for row in pets] == [
        one.answers["pets"]["probability"] for one in right if one.error is None
    ][:15]
    with pytest.raises(DataError, match="name one split only"):
        open_unlabelled([datasets.IterableDataset.from_generator(rows, features=features), "photos"])


# ------------------------------------------------------------------------------------------------------ embeddings


def test_embeddings_are_the_engines_tokens(photos: Path, backbone: Backbone, predictor: Predictor) -> None:
    tags = random_task(backbone, "tags", seed=2, head="multilabel", from_layer=2)
    full = METHODS["full"].build(backbone, TaskPlan("full", ("a", "b")))
    how = AnswerOptions(COUNT, embeddings=True)
    job = new_job(photos, Predictor(backbone, (*predictor.models, tags, full), how), shard_size=COUNT)
    answer_here(job, begin(job))
    rows = read_rows(job.folder)
    model = memoro.compose(backbone, [*(task for task in predictor.models if isinstance(task, memoro.Task)), tags])
    (preprocessing,) = model.passes()
    names = [name for name in NAMES if name != "05.png"]
    pixels = torch.stack([preprocessing.to_tensor(memoro.images.open_image(photos / name)) for name in names])
    with torch.no_grad():
        out, own = model.run(pixels), full.features(pixels)
    found = {}
    for name, right in {**out.tokens, "full": own}.items():
        cells = [row["embedding"] for row in rows if row["task"] == name and row["embedding"] is not None]
        found[name] = torch.tensor(cells)
        assert torch.equal(found[name], right), name
    assert set(found) == {"base", "pets", "age", "tags", "full"}
    assert torch.equal(tags.head(found["tags"]), out.logits["tags"]), "what the head reads"
    assert not torch.allclose(found["pets"], found["base"])
    base = [row for row in rows if row["task"] == "base"]
    assert [row["image"] for row in base] == [f"photos/{name}" for name in names]
    assert {row["label"] for row in base} == {None}
    assert len([row for row in rows if row["task"] == "tags"]) == 3 * len(names), "one row for each label"


def test_embeddings_need_parquet(shell: Shell, mess: Path, tasks: list[str], tmp_path: Path) -> None:  # noqa: F811
    common = ("predict", "mess/c.png", "-b", "vit", *tasks, "--embeddings")
    assert "use --format parquet" in shell(*common, "--out", "a.csv", code=1).err
    assert "use --format parquet" in shell(*common, "--out", "a/", "--format", "csv", code=1).err
    shell(*common, "--out", "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32())
    assert table["task"].to_pylist() == ["base", "pets", "tags", "tags", "tags", "age"]
    assert [cell is not None for cell in table["embedding"].to_pylist()] == [True, True, True, False, False, True]


def test_predict_reads_tables_and_zips_too(shell: Shell, tasks: list[str], photos: Path) -> None:  # noqa: F811
    write_zip(photos)
    rows = read_csv(shell("predict", "set.zip", "-b", "vit", *tasks, "-f", "csv").out)
    assert rows[0]["image"] == "set.zip/deep/00.png"
    assert "no images" in shell("predict", "nothing.png", "-b", "vit", *tasks, code=1).err
