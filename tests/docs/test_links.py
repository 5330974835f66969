"""Links, anchors, options, settings and names in the README, in docs/ and in the pages that `make docs` generates."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from blocks import ROOT

import memoro
from memoro.cli import VERBS, app
from memoro.cli.settings import FIELDS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {
    *("--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"),
    *("--multi_gpu", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port"),
    *("--cpu", "--mixed_precision", "--nproc-per-node", "--head", "--port", "--address", "--data-binary"),
}
"""Options of other programs: torchrun, accelerate, ray, curl."""

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").is_file(), reason="the documentation is only in the repository"
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", text), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"[\s-]+", "-", plain))
    return found


def links_of(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^ *```.*?^ *```$", "", text))


def broken_links(page: Path, text: str) -> list[str]:
    problems = []
    for link in links_of(text):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if target.parts[-2:-1] == ("reference",):  # written by `make docs`, which checks these itself
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            problems.append(link)
    return problems


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_exist(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_the_check_of_links_can_fail() -> None:
    text = "[a](missing.md) [b](README.md#nothing) [c](README.md#first-example)\n```\n[d](code.md)\n```\n"
    assert broken_links(ROOT / "page.md", text) == ["missing.md", "README.md#nothing"]


def commands() -> Iterator[Any]:
    group: Any = typer.main.get_group(app)
    waiting = [group.get_command(None, verb) for verb in VERBS]
    while waiting:
        command = waiting.pop()
        inner = getattr(command, "commands", None)
        waiting += list((inner or {}).values())
        if inner is None:
            yield command


@pytest.fixture(scope="module")
def options() -> set[str]:
    found = {flag for command in commands() for one in command.params for flag in [*one.opts, *one.secondary_opts]}
    return {flag for flag in found if flag.startswith("--")} | {"--help", "--version"}


@pytest.fixture(scope="module")
def settings() -> set[str]:
    return {name for fields in FIELDS.values() for name in fields.named()} | {"help"}


def unknown_words(text: str, options: set[str], settings: set[str]) -> list[str]:
    """Options and settings in code that memoro does not have, and verbs that it does not have."""
    code = "\n".join([*re.findall(r"(?ms)^ *```(?:sh|text).*?^ *```$", text), *re.findall(r"`([^`\n]+)`", text)])
    wrong = [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code) if flag not in options | OTHERS]
    wrong += [name for name in re.findall(r"--set ([a-z_]+)=", code) if name not in settings]
    verbs = re.findall(r"(?:^|\n|`)\s*memoro ([a-z]+)\b", "\n".join(f"`{line}" for line in code.splitlines()))
    return wrong + [verb for verb in verbs if verb not in VERBS]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_settings_and_verbs_exist(page: Path, options: set[str], settings: set[str]) -> None:
    assert unknown_words(page.read_text(), options, settings) == []


def test_the_check_of_options_can_fail(options: set[str], settings: set[str]) -> None:
    text = "`--epoch 5`, `--epochs`, `memoro tarin x`, `--set momentun=1`, `--set momentum=1`\n"
    assert unknown_words(text, options, settings) == ["--epoch", "momentun", "tarin"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_public_names_exist(page: Path) -> None:
    for name in re.findall(r"\bmemoro\.([A-Za-z_]\w*)", page.read_text()):
        assert hasattr(memoro, name) or import_module(f"memoro.{name}"), name
    for name in re.findall(r"\bmemoro\.lab\.([A-Za-z_]\w*)", page.read_text()):
        assert hasattr(import_module("memoro.lab"), name), name


# ---------------------------------------------------------------------------------------------- what make docs writes


@pytest.fixture(scope="module")
def pages() -> Iterator[dict[str, str]]:
    sys.path.insert(0, str(ROOT / "scripts"))
    from website.commands import command_pages
    from website.python import python_pages

    yield {**python_pages(), **command_pages()}
    sys.path.remove(str(ROOT / "scripts"))


def test_the_reference_has_every_public_name(pages: dict[str, str]) -> None:
    text = "\n".join(pages.values())
    for name in memoro.__all__:
        assert f"{{ #{name} }}" in text, name
        value = getattr(memoro, name)
        if inspect.isclass(value):
            for member, one in vars(value).items():
                if not member.startswith("_") and inspect.isfunction(one) and one.__doc__:
                    assert f"{{ #{name}.{member} }}" in text, f"{name}.{member}"


def test_the_reference_has_every_verb_option_and_setting(pages: dict[str, str]) -> None:
    text = pages["commands.md"] + pages["lab.md"]
    for command in commands():
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden and parameter.name != "help":
                assert f"`{max(parameter.opts, key=len)}`" in text, parameter.opts
    for verb in VERBS:
        assert verb == "lab" or f"## memoro {verb} " in text
    for fields in FIELDS.values():
        for name in fields.named():
            assert f"| `{name}` |" in text, name


def test_every_public_name_says_what_it_is() -> None:
    for name in memoro.__all__:
        text = inspect.cleandoc(getattr(memoro, name).__doc__ or "")
        assert len(text.split()) >= 4, name


def test_the_drawings_are_those_of_the_script() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from website.pictures import FOLDER, PICTURES

    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    for name, draw in PICTURES.items():
        assert (FOLDER / f"{name}.svg").read_text() == draw().svg(), (
            "run: PYTHONPATH=scripts python -m website.pictures"
        )


def test_the_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    results = [path.relative_to(ROOT).as_posix() for path in (ROOT / "results").rglob("*.md")]
    assert results
    for name in [*results, *(path.name for path in (ROOT / "docs").glob("*.md"))]:
        assert re.search(rf"[ :]{re.escape(name)}$", text, re.MULTILINE), f"{name} is not in mkdocs.yml"
