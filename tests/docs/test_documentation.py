"""Every code block and every command of the README, of docs/ and of docstrings is run, and its output compared."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from blocks import NOT_RUN, ROOT, RUN, Block, Reader, blocks_of, commands_of, docstring_blocks, matches
from world import make_world

import memoro
from memoro.cli import VERBS, app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = [ROOT / "README.md", ROOT / "docs" / "start.md"]
"""What `make test` follows; `make test-slow` follows all."""
UNTRIED = {
    "demo": "takes minutes; tests/demo runs a short one",
    "import": "needs a checkpoint of the public reproduction; tests/tasks makes one",
    "lab": "takes minutes to hours; tests/lab runs short ones",
}
"""Commands whose examples in the help are not run."""

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").is_file(), reason="the documentation is only in the repository"
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(root.parent / "cache")
    make_world(root)
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before
    return root


@pytest.fixture
def reader(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Somebody who follows a page with a copy of the files."""
    folder = tmp_path / "reader"
    shutil.copytree(world, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.parent / "cache"))  # what one page has computed, the next reuses
    reader = Reader(capfd.readouterr)
    yield reader
    reader.close()


def follow(reader: Reader, blocks: list[Block]) -> None:
    for block in blocks:
        if block.reason is None and block.language in RUN:
            printed = reader.run(block)
            assert block.output is None or matches(block.output, printed), f"{block.where} prints:\n{printed}"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[] if page in FIRST else pytest.mark.slow) for page in PAGES], ids=name_of
)
def test_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    blocks = blocks_of(page.read_text(), name_of(page))
    follow(reader, blocks)


def test_docstrings_can_be_followed(reader: Reader) -> None:
    blocks = docstring_blocks()
    assert blocks
    for block in blocks:
        reader.names = {"__name__": "__main__", "memoro": memoro}
        follow(reader, [block])


def examples() -> Iterator[Any]:
    """Each example in the help of a command; the curl commands of `memoro serve` need its server."""
    group: Any = typer.main.get_group(app)
    for verb in sorted(VERBS.keys() - UNTRIED.keys()):
        paragraphs = inspect.cleandoc(group.get_command(None, verb).callback.__doc__).split("\n\n")
        found = [text for text in paragraphs if text.startswith(("memoro ", "curl "))]
        assert found, verb
        for code in ["\n".join(found)] if verb == "serve" else "\n".join(found).splitlines():
            yield pytest.param(Block(f"memoro {verb} --help", "sh", code), id=code)


@pytest.mark.slow
@pytest.mark.parametrize("example", list(examples()))
def test_examples_of_help_run(example: Block, reader: Reader) -> None:
    follow(reader, [example])


def test_blocks_that_are_not_run_say_why() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page.read_text(), name_of(page))]
    reasons = {block.where: block.reason for block in blocks if block.reason is not None}
    assert all(len(reason.split()) >= 3 for reason in reasons.values())
    run = [block for block in blocks if block.reason is None and block.language in RUN]
    assert len(reasons) < len(run) / 4, f"{len(run)} blocks are run, {len(reasons)} are not"
    plain = {"text", "json"}  # formats and answers, not code
    assert {block.language for block in blocks if block.reason is None} <= {*RUN, *plain}
    assert not any(NOT_RUN in page.read_text() for page in PAGES[:1]), "all of the README runs"


def test_the_runner_can_fail(reader: Reader) -> None:
    wrong = "```sh\nmemoro inspect pets.safetensors\n```\n\n```text\nnothing\n```\n"
    with pytest.raises(AssertionError, match="page:1 prints"):
        follow(reader, blocks_of(wrong, "page"))
    with pytest.raises(AssertionError, match="neither run nor checked"):
        follow(reader, blocks_of("```sh\nrm -rf photos\n```\n", "page"))
    with pytest.raises(AssertionError, match="inspect missing"):
        follow(reader, blocks_of("```sh\nmemoro inspect missing.safetensors\n```\n", "page"))
    [block] = blocks_of(f'```sh title="{NOT_RUN}a machine with GPUs"\nmemoro nothing\n```\n', "page")
    assert block.reason == "a machine with GPUs"
    follow(reader, [block])


def test_output_is_compared() -> None:
    assert matches("a …\n…\nz", "a b\nc\nd\nz\n")
    assert matches("…", "")
    assert not matches("a …\nz", "a b\nc\nz")
    assert not matches("a", "a\nb")
    assert matches("│ time │ 5 s: training 4 │\n───", "│ time   │ 12 s: reading 3, training 9 │\n─────")
    assert not matches("│ a │ 5 │", "│ a │ 6 │")
    assert list(commands_of("memoro a 'x *' \\\n  b   # c\n\n# d\n")) == [["memoro", "a", "x *", "b"]]
