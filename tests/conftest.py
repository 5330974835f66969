"""What the tests share."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_tasks import random_task as random_task

from memoro.backbones import Backbone, load_backbone
from memoro.backbones import precision as precision_module

_NUMBERS = itertools.count()
_CPU = precision_module._describe_cpu()

torch.set_num_threads(1)  # tiny models, and two test processes
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


def shared_folder() -> Path | None:
    """The folder with real weights and images, where there is one."""
    path = Path(os.environ.get("MEMORO_SHARED", Path(__file__).parents[2] / "shared"))
    return path if (path / "weights").is_dir() else None


@pytest.fixture
def shared() -> Path:
    path = shared_folder()
    if path is None:
        pytest.skip("needs real weights and images: set MEMORO_SHARED to their folder")
    return path


def prefer_bfloat16(cache: Path, preferred: bool) -> None:
    """As if it had been measured on this CPU: what `auto` is does not depend on where tests run."""
    path = cache / "memoro" / precision_module.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({_CPU: preferred}))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kept features stay out of the user's own folder; `auto` is float32."""
    path = tmp_path_factory.getbasetemp() / "caches" / str(next(_NUMBERS))  # mktemp would list all others each time
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    prefer_bfloat16(path, os.environ.get("MEMORO_TEST_PRECISION") == "bfloat16")
    return path / "memoro" / "features"


def in_fork(target: Callable[..., Any], *given: Any) -> Any:
    """A started process. It has everything imported already: importing torch and transformers takes seconds."""
    process = multiprocessing.get_context("fork").Process(target=target, args=given)
    process.start()
    return process


@pytest.fixture
def vit() -> Any:
    from families import CASES

    return next(case for case in CASES if case.name == "vit").model()


@pytest.fixture
def backbone(vit: Any) -> Backbone:
    return load_backbone(vit)


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))
