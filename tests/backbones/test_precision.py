"""Precision: what a backbone computes in, how it is chosen, and that tasks of one precision work in another."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prefer_bfloat16, random_task
from families import FAMILIES, Case
from squares import save_squares
from typer.testing import CliRunner

import memoro
from memoro.backbones import precision
from memoro.backbones.precision import FILE, choose_dtype, measure_speedup, prefers_bfloat16
from memoro.cli import app
from memoro.cli.options import allow_tf32

CPU = torch.device("cpu")
families = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


@pytest.fixture
def forget(own_cache: Path) -> Path:
    """A CPU that was never asked; returns the file that remembers."""
    file = own_cache.parent / FILE
    file.unlink()
    return file


def faster(monkeypatch: pytest.MonkeyPatch, ratio: float) -> list[float]:
    """As if the measurement gave this; returns what grows with each."""
    asked: list[float] = []
    monkeypatch.setattr(precision, "measure_speedup", lambda: (asked.append(ratio), ratio)[1])
    return asked


# ----------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(("ratio", "wanted"), [(1.8, torch.bfloat16), (0.14, torch.float32)])
def test_a_cpu_is_asked_once(forget: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, wanted: torch.dtype) -> None:
    asked = faster(monkeypatch, ratio)
    assert [choose_dtype("auto", CPU) for _ in range(3)] == [wanted] * 3
    assert asked == [ratio]
    [(cpu, answer)] = json.loads(forget.read_text()).items()
    assert answer is (wanted == torch.bfloat16)
    assert torch.__version__ in cpu


@pytest.mark.parametrize(("ratio", "wanted"), [(1.2, True), (1.1, False)])
def test_an_unclear_outcome_is_measured_again(
    forget: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, wanted: bool
) -> None:
    asked = faster(monkeypatch, ratio)
    assert [prefers_bfloat16(CPU) for _ in range(2)] == [wanted] * 2
    assert len(asked) == 2
    assert not forget.exists()


@pytest.mark.parametrize("text", ["[]", "no json", '{"other": 3}'])
def test_a_damaged_memory_is_written_again(forget: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    faster(monkeypatch, 2.0)
    forget.write_text(text)
    assert prefers_bfloat16(CPU)
    assert True in json.loads(forget.read_text()).values()


def test_a_cache_that_cannot_be_written_is_no_problem(
    forget: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = faster(monkeypatch, 2.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert prefers_bfloat16(CPU)
    assert prefers_bfloat16(CPU)
    assert len(asked) == 2


def test_the_measurement_is_short_and_keeps_torch_as_it_is() -> None:
    torch.manual_seed(3)
    state, start = torch.get_rng_state(), time.monotonic()
    assert 0.001 < measure_speedup() < 1000
    assert time.monotonic() - start < 5  # some 30 ms, on a machine that does nothing else
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("auto", torch.device("meta")) == torch.float32
    assert choose_dtype("float16", CPU) == torch.float16
    with pytest.raises(memoro.BackboneError, match="choose one of auto, float32, bfloat16, float16"):
        choose_dtype("bf16", CPU)  # type: ignore[arg-type]
    with pytest.raises(memoro.BackboneError, match="choose one of auto"):
        memoro.TrainOptions(precision="no")  # type: ignore[arg-type]
    with pytest.raises(memoro.TrainingError, match="dtype was removed: precision"):
        memoro.train("nowhere", dtype="float32")


def test_tf32_is_allowed_by_verbs_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        allow_tf32(torch.device("cuda"), "float32")
        allow_tf32(CPU, "auto")
        assert not torch.backends.cuda.matmul.allow_tf32
        allow_tf32(torch.device("cuda"), "auto")
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# ------------------------------------------------------------------------------------------------------------ loading


def test_auto_never_converts_a_model_object(vit: Any, own_cache: Path, tmp_path: Path) -> None:
    prefer_bfloat16(own_cache.parents[1], True)
    assert memoro.load_backbone(vit, precision="auto").dtype == torch.float32
    assert memoro.load_backbone(memoro.load_backbone(vit), precision="auto").dtype == torch.float32
    assert memoro.load_backbone(vit, precision="bfloat16").dtype == torch.bfloat16
    vit.save_pretrained(tmp_path / "vit")
    assert memoro.load_backbone(tmp_path / "vit").dtype == torch.float32
    assert memoro.load_backbone(tmp_path / "vit", precision="auto").dtype == torch.bfloat16
    assert memoro.load_backbone(tmp_path / "vit", precision="float32").dtype == torch.float32
    vit.half().save_pretrained(tmp_path / "half")
    prefer_bfloat16(own_cache.parents[1], False)
    assert memoro.load_backbone(tmp_path / "half").dtype == torch.float16
    assert memoro.load_backbone(tmp_path / "half", precision="auto").dtype == torch.float32
    with pytest.raises(memoro.BackboneError, match="leave one of them out"):
        memoro.load_backbone(tmp_path / "vit", precision="float32", dtype="float32")


@families
def test_a_checkpoint_in_a_precision_is_the_plain_model_in_it(case: Case, tmp_path: Path, pixels: torch.Tensor) -> None:
    model = case.model().eval()
    model.save_pretrained(tmp_path / "folder")
    plain = memoro.load_backbone(tmp_path / "folder", dtype="bfloat16")  # as transformers loads it
    rounded = memoro.load_backbone(tmp_path / "folder", precision="bfloat16")
    full = memoro.load_backbone(tmp_path / "folder")
    tasks = [random_task(full, "pets", cells=2), random_task(full, "rooms", seed=1, from_layer=2)]
    composed = memoro.compose(rounded, tasks)
    with torch.no_grad():
        out = composed(pixels)
        assert torch.equal(out["base"], plain.original(pixels))
        assert not torch.equal(out["base"].float(), memoro.compose(full)(pixels)["base"])
    assert {name: logits.dtype for name, logits in out.items()} == {
        "base": torch.bfloat16, "pets": torch.float32, "rooms": torch.float32
    }  # fmt: skip
    found = composed.verify(pixels)
    assert (found.base_equal, found.tasks_equal, found.dtype) == (True, True, "bfloat16")
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}, "nothing is kept twice"


def test_tasks_go_by_the_checkpoint_whatever_the_precision(vit: Any, tmp_path: Path) -> None:
    vit.save_pretrained(tmp_path / "vit")
    full, rounded = (memoro.load_backbone(tmp_path / "vit", precision=name) for name in ("float32", "bfloat16"))
    assert full.fingerprint == rounded.fingerprint == rounded.to("cpu").fingerprint
    assert memoro.load_backbone(tmp_path / "vit", dtype="bfloat16").fingerprint != full.fingerprint
    task = memoro.new_task(rounded, "pets", ["a", "b"], rank=2, seed=1)
    assert {parameter.dtype for parameter in task.parameters()} == {torch.float32}
    assert task.spec.backbone == memoro.new_task(full, "pets", ["a", "b"]).spec.backbone
    memoro.compose(full, [task])
    rounded.check_unchanged(read_weights=True)
    rounded.check_unchanged(read_weights=True)
    with torch.no_grad():
        next(rounded.module.parameters()).mul_(2)
    with pytest.raises(memoro.BackboneError, match="have changed"):
        rounded.check_unchanged()


def test_a_changed_checkpoint_is_found_through_data(vit: Any) -> None:
    rounded = memoro.load_backbone(vit, precision="bfloat16")
    rounded.check_unchanged(read_weights=True)
    rounded.anatomy.tensors["patch.weight"].data.mul_(2)
    with pytest.raises(memoro.BackboneError, match="have changed"):
        rounded.check_unchanged(read_weights=True)


# -------------------------------------------------------------------------------------------------- training, answering


@pytest.fixture
def folder(tmp_path: Path, vit: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    vit.save_pretrained(tmp_path / "vit")
    save_squares(tmp_path / "squares", {"blue": 12, "green": 9, "red": 9})
    monkeypatch.chdir(tmp_path)
    return tmp_path


QUICK: dict[str, Any] = {"image_size": 20, "workers": 0, "quiet": True}


@pytest.mark.parametrize("regime", ["joint", "memory", "readout", "head"])
def test_a_task_of_one_precision_answers_in_another(folder: Path, regime: str) -> None:
    how = {**QUICK, "regime": regime, **({} if regime == "readout" else {"epochs": 8, "lr": 0.01, "folds": 0})}
    found = memoro.train("squares", backbone="vit", precision="bfloat16", out="t.safetensors", **how)
    task = memoro.load_task("t.safetensors")
    assert {tensor.dtype for tensor in task.state_dict().values()} <= {torch.float32, torch.float16}
    images = sorted(Path("squares").rglob("*.png"))[::7]
    answers = [
        memoro.compose(memoro.load_backbone("vit", precision=name), [task]).predict(images)
        for name in ("float32", "bfloat16")
    ]
    assert answers[0] != answers[1]
    for one, other in zip(*answers, strict=True):
        assert one["squares"]["label"] == other["squares"]["label"]
        assert one["squares"]["probability"] == pytest.approx(other["squares"]["probability"], abs=0.05)
        assert one["squares"]["unfamiliar"] == other["squares"]["unfamiliar"]
    assert found.metrics["accuracy"] > 0.8


def shell(*words: Any, code: int = 0) -> tuple[str, str]:
    """What a command prints to stdout and stderr."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


CHOSEN = "computing in bfloat16, which is faster on this device (--precision float32 for full precision)."


@pytest.mark.parametrize("fast", [True, False])
def test_every_verb_has_the_option(folder: Path, own_cache: Path, fast: bool) -> None:
    """With either outcome of the measurement; what was trained is answered in the other precision too."""
    prefer_bfloat16(own_cache.parents[1], fast)
    small = ["--image-size", 20, "--set", "workers=0", "--epochs", 2]
    _, told = shell("train", "squares", "-b", "vit", "--out", "t.safetensors", *small)
    assert told.count(CHOSEN) == fast
    assert memoro.load_task("t.safetensors").spec.training["precision"] == ("bfloat16" if fast else "float32")
    file = ["-t", "t.safetensors", "-b", "vit"]
    image = sorted(Path("squares").rglob("*.png"))[0]
    commands: dict[str, list[Any]] = {
        "eval": ["eval", "squares", *file, "--json"],
        "predict": ["predict", image, *file, "--format", "json"],
        "explain": ["explain", image, *file, "--json"],
        "verify": ["verify", image, *file, "--json"],
        "calibrate": ["calibrate", "t.safetensors", "squares", "-b", "vit", "--out", "c.safetensors"],
        "suspects": ["suspects", "squares", "-t", "t.safetensors", "-b", "vit", "--json"],
        "teach": ["teach", "squares", "-b", "vit", "--labels-file", "l.csv", "--finish", "--image-size", 20, "--json"],
    }
    found: dict[tuple[str, str], str] = {}
    for name, command in commands.items():
        for given in ("auto", "float32", "bfloat16"):
            code = 1 if name == "calibrate" else 0  # it was trained on these images, and has a familiarity
            out, told = shell(*command, "--precision", given, code=code)
            found[name, given] = out
            assert (CHOSEN in told) is (fast and given == "auto" and name != "suspects"), (name, given, told)
    for name in ("eval", "predict", "verify", "explain"):
        same, other = ("bfloat16", "float32") if fast else ("float32", "bfloat16")
        assert found[name, "auto"] == found[name, same]
        assert found[name, "auto"] != found[name, other] or name == "eval", name
    for given in ("float32", "bfloat16"):
        receipt = json.loads(found["verify", given])
        assert (receipt["dtype"], receipt["base_equal"], receipt["tasks_equal"]) == (given, True, True)
    assert "bfloat16" in shell("eval", "squares", *file, "--precision", "half", code=2)[1]


def test_a_server_answers_in_the_precision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[torch.dtype] = []
    monkeypatch.setattr(
        "memoro.serve.server.run_server", lambda store, *_: served.append(store.current.model.backbone.dtype)
    )
    memoro.save_task(random_task(memoro.load_backbone("vit"), "pets"), "t.safetensors")
    for given in ("bfloat16", "float32", "auto"):
        shell("serve", "-t", "t.safetensors", "-b", "vit", "--precision", given)
    assert served == [torch.bfloat16, torch.float32, torch.float32]


def test_an_exported_file_has_the_precision(folder: Path) -> None:
    onnx = pytest.importorskip("onnx")
    memoro.save_task(random_task(memoro.load_backbone("vit"), "pets"), "t.safetensors")
    kinds = {}
    for given in ("float32", "float16"):
        shell("export", "-t", "t.safetensors", "-b", "vit", "--precision", given, "-o", f"{given}.onnx")
        weights = onnx.load(f"{given}.onnx").graph.initializer
        kinds[given] = {one.data_type for one in weights if len(one.dims) == 2 and one.dims[0] == 24}
    assert kinds == {"float32": {onnx.TensorProto.FLOAT}, "float16": {onnx.TensorProto.FLOAT16}}


def test_a_resumed_training_keeps_its_precision(folder: Path) -> None:
    how = {**QUICK, "backbone": "vit", "epochs": 2, "folds": 0, "folder": "run"}
    memoro.train("squares", precision="bfloat16", **how)
    memoro.train("squares", precision="bfloat16", resume=True, **how)
    with pytest.raises(memoro.TrainingError, match="precision"):
        memoro.train("squares", precision="float32", resume=True, **how)


def test_a_job_is_not_continued_in_another_precision(folder: Path) -> None:
    memoro.save_task(random_task(memoro.load_backbone("vit"), "pets"), "t.safetensors")
    job = ["predict", "squares", "-t", "t.safetensors", "-b", "vit", "-o", "answers/", "--set", "workers=0"]
    shell(*job, "--precision", "bfloat16")
    shell(*job, "--precision", "bfloat16", "--resume")
    with pytest.raises(memoro.DataError, match="these differ: --precision"):
        shell(*job, "--precision", "float32", "--resume")
