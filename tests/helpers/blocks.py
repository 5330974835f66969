"""Code blocks of the README, of the pages in docs/ and of docstrings: what they contain, and how they are run."""

from __future__ import annotations

import inspect
import re
import shlex
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from glob import glob
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import memoro

ROOT = Path(__file__).parents[2]
NOT_RUN = "Not run by the tests: "
"""A block with such a title is not run. The page shows the title, which goes on with the reason."""
FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>[\w+]+)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^ *```$',
    re.DOTALL | re.MULTILINE,
)
HIDDEN = re.compile(r"^<!-- before\n(?P<code>.*?)^-->$", re.DOTALL | re.MULTILINE)
"""Python that makes what the next block takes as given; the page does not show it."""
RUN = ("sh", "python")
ADDRESS = "127.0.0.1:8000"


class Block(NamedTuple):
    where: str
    language: str
    code: str
    output: str | None = None
    """What the page shows below it as its output."""
    reason: str | None = None
    """Why it is not run."""


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page in order, each with the output that follows it."""
    found: list[tuple[int, int, Block]] = []
    for match in sorted([*FENCE.finditer(text), *HIDDEN.finditer(text)], key=lambda one: one.start()):
        fields = match.groupdict()
        code = textwrap.dedent(fields["code"])
        language = fields.get("language", "python")
        where = f"{page}:{text.count(chr(10), 0, match.start()) + 1}"
        if language == "text" and found and not text[found[-1][1] : match.start()].strip():
            start, _, block = found[-1]
            if block.output is None and block.language in RUN:
                found[-1] = (start, match.end(), block._replace(output=code))
                continue
        title = fields.get("title") or ""
        reason = title.removeprefix(NOT_RUN) if title.startswith(NOT_RUN) else None
        found.append((match.start(), match.end(), Block(where, language, code, None, reason)))
    return [block for *_, block in found]


def commands_of(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, without comments; lines that end with a backslash go on."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            quoted = set(re.findall(r"'([^']*)'|\"([^\"]*)\"", line))
            plain = {one for pair in quoted for one in pair if one}
            yield [part for word in words for part in (expand(word) if word not in plain else [word])]


def expand(word: str) -> list[str]:
    """As a shell does: a pattern that matches nothing stays as it is."""
    return sorted(glob(word)) or [word] if set(word) & set("*?") and "://" not in word else [word]


def matches(shown: str, real: str) -> bool:
    """Whether the output is as the page shows it, but for times and for the width of tables.

    `…` stands for anything in a line, and alone for any lines.
    """
    text = "".join(f"{line}\n" for line in narrow(real))
    pattern = "".join("(?:.*\n)*?" if line.strip() == "…" else _line(line) for line in narrow(shown))
    return re.fullmatch(pattern, text) is not None


def narrow(text: str) -> list[str]:
    """The lines without repeated spaces and rules, and without those that go on with a cell of the line above."""
    lines = [re.sub(r"([ ─━])\1+", r"\1", line.rstrip()) for line in text.strip("\n").splitlines()]
    return [line for line in lines if not line.startswith("│ │")]


def _line(shown: str) -> str:
    """The pattern of a line."""
    parts = re.split(r"…|\d+(?:\.\d+)? s(?:: [^│]*)?(?= │|$)", shown)
    return ".*?".join(map(re.escape, parts)) + "\n"


class Reader:
    """Follows a page from its first block to its last, in the current folder."""

    def __init__(self, read_output: Callable[[], tuple[str, str]]) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.read_output = read_output
        self.server: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.ran = 0

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.communicate(timeout=60)

    def run(self, block: Block) -> str:
        """Runs a block; returns what it printed to standard output."""
        if block.language == "python":
            self.ran += 1
            out = StringIO()
            code = compile(block.code.replace(ADDRESS, self.address or ADDRESS), block.where, "exec")
            with redirect_stdout(out):
                exec(code, self.names)
            return out.getvalue()
        return "".join(self.command(words, block.where) for words in commands_of(block.code))

    def command(self, words: list[str], where: str) -> str:
        self.ran += 1
        words = [word.replace(ADDRESS, self.address or ADDRESS) for word in words]
        name = words[0]
        if name == "find" and "|" in words:
            paths = subprocess.run(words[: words.index("|")], capture_output=True, check=True).stdout
            before, sys.stdin = sys.stdin, TextIOWrapper(BytesIO(paths))
            try:
                return self.command(words[words.index("|") + 1 :], where)
            finally:
                sys.stdin = before
        if name == "memoro":
            return self.serve(words) if "serve" in words[:2] or words[1:2] == ["teach"] else self.memoro(words, where)
        if name == "curl":
            done = subprocess.run(
                [*words, "--silent", "--show-error", "--fail-with-body"], capture_output=True, check=False
            )
            assert done.returncode == 0, f"{where}: {words}: {done.stdout.decode()} {done.stderr.decode()}"
            return done.stdout.decode()
        checks: dict[str, Callable[[list[str]], None]] = {"pip": check_pip, "make": check_make}
        assert name in checks, f"{where}: {name} is neither run nor checked: say why in the title of the block"
        checks[name](words)
        return ""

    def memoro(self, words: list[str], where: str) -> str:
        from memoro.cli import main

        self.read_output()
        arguments, sys.argv = sys.argv, words
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.argv = arguments
        out, err = self.read_output()
        assert not code, f"{where}: {shlex.join(words)}\n{out}{err}"
        return out

    def serve(self, words: list[str]) -> str:
        """Starts the server in a process of its own; later commands find it under the address that they name."""
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [word for word in words if word != "--open"]
        self.address = f"127.0.0.1:{port}"
        self.server = subprocess.Popen([sys.executable, "-m", *words, "--port", str(port)], stderr=subprocess.PIPE)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://{self.address}/healthz", timeout=5)
                return ""
            except OSError:
                assert self.server.poll() is None, self.server.communicate()[1].decode()
                time.sleep(0.2)
        raise AssertionError(f"{words} did not start")


def check_pip(words: list[str]) -> None:
    """An installation is not made, but what it names exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[1] == "install"
    for word in words[2:]:
        for asked in re.findall(r"\[(.*)\]", word):
            assert set(asked.split(",")) <= extras.keys(), word
        assert re.sub(r"\[.*\]", "", word) in {"memoro", "-e", "."}, word


def check_make(words: list[str]) -> None:
    """It would run this very test, or for minutes: only the target is looked up."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(words[1:]) <= targets, words


def docstring_blocks() -> list[Block]:
    """The examples in docstrings of the public names and their methods: paragraphs that are indented, and calls of
    memoro in backticks."""
    found = []
    for name in memoro.__all__:
        owner = getattr(memoro, name)
        members = vars(owner).items() if isinstance(owner, type) else ()
        for place, value in [
            (name, owner),
            *((f"{name}.{key}", one) for key, one in members if not key.startswith("_")),
        ]:
            if not str(getattr(value, "__module__", "memoro")).startswith("memoro"):
                continue
            text = inspect.cleandoc(value.__doc__ or "")
            code = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    "))
            calls = [call for call in re.findall(r"`([^`]*)`", text) if re.match(r"(\w+ = )?memoro\.\w+\(", call)]
            found += [Block(f"memoro.{place}", "python", part) for part in (code, *calls) if part]
    return found
