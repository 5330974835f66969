"""Task files with odd but parseable training facts and metrics: inspect shows what it can. Seeded and bounded."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import random_task
from safetensors import safe_open
from safetensors.torch import save_file
from shell import Shell, save_images, shell

import memoro
from memoro.backbones import Backbone
from memoro.cli import main
from memoro.evaluation.metrics import COLUMNS

__all__ = ["shell"]  # a fixture

CASES = 30
SECONDS = 20.0

TEXTS = ("", "a", "loss", "\x1b[2J", "a\nbase equal", "\u202e", "\x00", "[bold]", ":cat:", "{0}", "%s", "é", "x" * 5000)
NUMBERS = (0, -1, 10**300, 10**400, -(10**400), 1e-320, 1e308, -0.0, 0.5, 1, True, False, None)
KEYS = (*COLUMNS, "worst_classes", "split", "images", "lr", "epochs", "seconds", "best_epoch", "trained_parameters")


def any_json(draw: random.Random, depth: int = 4) -> Any:
    kind = draw.randrange(8 if depth else 4)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(TEXTS)
    if kind < 6:
        return [any_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice((*TEXTS, *KEYS)): any_json(draw, depth - 1) for _ in range(draw.randrange(5))}


def odd_record(draw: random.Random) -> dict[str, Any]:
    return {key: any_json(draw) for key in draw.sample((*KEYS, *TEXTS), draw.randrange(8))}


def rewrite(source: Path, target: Path, training: Any, metrics: Any) -> Path:
    """The file with other facts; its content hash does not cover them."""
    with safe_open(source, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(file.metadata()["memoro"])
    for item in record["tasks"]:
        item |= {"training": training, "metrics": metrics}
    save_file(tensors, target, metadata={"memoro": json.dumps(record)})
    return target


@pytest.fixture
def whole(backbone: Backbone, tmp_path: Path) -> Path:
    return memoro.save_task(random_task(backbone, "t"), tmp_path / "whole.safetensors")


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"worst_classes": [1], "accuracy": 0.5}, ("worst classes [1]", "accuracy 0.5")),
        ({"worst_classes": {"cat": "x", "dog": 0.25, "cow": None}}, ("worst classes dog 0.250",)),
        ({"worst_classes": "all", "accuracy": "high"}, ("worst classes all", "accuracy high")),
        ({"accuracy": {"a": [1, {"b": None}]}}, ("accuracy {'a': [1, {'b': None}]}",)),
        ({"loss": 10**300}, ("loss 1000",)),
        ({"loss": 10**400, "members": [10**400]}, ("loss 1000", "members [1000")),
        ({"worst_classes": {"cat": -(10**400), "dog": 0.25}}, ("worst classes dog 0.250",)),
        ({"loss": "x" * 10_000}, ("xxxx…",)),
        ({f"m{number}": 1 for number in range(500)}, ("m49 1", "… and 450 more")),
        ({"a\n\x1b[2J": "\ud800\u202e"}, (r"a\n\x1b[2J \ud800\u202e",)),
    ],
)
def test_odd_metrics_are_shown(
    shell: Shell,
    whole: Path,
    tmp_path: Path,
    metrics: dict[str, Any],
    shown: tuple[str, ...],
) -> None:
    path = rewrite(whole, tmp_path / "odd.safetensors", metrics, metrics)
    said = shell("inspect", path).out
    for text in shown:
        assert text in said
    record = json.loads(shell("inspect", path, "--json").out)
    assert record["tasks"][0]["metrics"] == metrics


def test_random_metrics_never_end_in_a_traceback(shell: Shell, whole: Path, tmp_path: Path) -> None:
    draw, started, done = random.Random(13), time.monotonic(), 0
    for _ in range(CASES):
        path = rewrite(whole, tmp_path / "odd.safetensors", odd_record(draw), odd_record(draw))
        said = shell("inspect", path)
        assert "parameters" in said.out
        assert not set(said.out) & set("\x00\x1b\u202e")
        done += 1
        if time.monotonic() - started > SECONDS:
            break
    assert done > 5


def test_the_readers_of_a_record_take_any_facts(
    shell: Shell,
    backbone: Backbone,
    tmp_path: Path,
) -> None:
    """The card, the report of an evaluation and a training that starts from the task."""
    whole = memoro.save_task(random_task(backbone, "t", labels=["cat", "dog"]), tmp_path / "whole.safetensors")
    save_images(tmp_path, *(f"set/{label}/{number}.png" for label in ("cat", "dog") for number in range(4)))
    facts = {key: [10**400] for key in (*KEYS, "members", "phases", "history", "image_sketch", "data")}
    path = rewrite(whole, tmp_path / "odd.safetensors", {**facts, "ensemble": 10**400, "seed": {"a": 10**400}}, facts)
    shell("card", path)
    assert "| members | 1000" in Path("odd/README.md").read_text()
    shell("eval", "set", "-b", "vit", "-t", path, "--report", "--set", "workers=0")
    assert f"{10**150}" in Path("report.html").read_text()
    how = ("--epochs", 1, "--lr", 0.1, "--set", "workers=0", "--start-from", path, "--out", "new.safetensors")
    shell("train", "set", "-b", "vit", *how)
    shell("inspect", "new.safetensors")
    shell("card", "new.safetensors")


def test_deep_metrics_are_shown_or_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, codes = tmp_path / "deep.safetensors", []
    for depth in (50, *range(380, 500, 30), 5000):
        rewrite(whole, path, {}, {"deep": "HERE"})
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            record = file.metadata()["memoro"].replace('"HERE"', '{"a": [' * depth + "1" + "]}" * depth)
        save_file(tensors, path, metadata={"memoro": record})
        for form in ([], ["--json"]):
            monkeypatch.setattr(sys, "argv", ["memoro", "inspect", str(path), *form])
            with pytest.raises(SystemExit) as end:  # anything else would be a traceback
                main()
            said = capfd.readouterr()
            assert "deep" in said.out if not end.value.code else said.err.startswith("error: ")
            codes.append(end.value.code or 0)
    assert codes[:2] == [0, 0]
    assert codes[-2:] == [1, 1]
