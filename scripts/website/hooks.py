"""Hooks of mkdocs: the pages that are not in docs/, links between both, and pictures that follow the colour scheme."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "build" / "reference"
OTHERS = {
    "CHANGELOG.md": "changelog.md",
    "LOG.md": "log.md",
    "CONTRIBUTING.md": "contributing.md",
    "src/memoro/weights/memoro-tiny/README.md": "memoro-tiny.md",
}
"""Pages of other folders, and their names on the site."""


def on_files(files: Files, config: Any) -> Files:
    pages = {f"reference/{path.name}": path for path in REFERENCE.glob("*.md")}
    if not pages:
        raise SystemExit(f"{REFERENCE} is empty: run `make docs`, which writes the reference first.")
    pages |= {name: ROOT / path for path, name in OTHERS.items()}
    for path in (ROOT / "results").rglob("*"):
        if path.suffix in {".md", ".png"}:
            pages[path.relative_to(ROOT).as_posix()] = path
    for name, path in pages.items():
        files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository, where pages lie elsewhere, become links of the site."""
    name = page.file.src_uri
    if name.startswith("results/") or name in OTHERS.values():
        page.meta["search"] = {"boost": 0.2}  # guides and the reference come first
    up = "../" * name.count("/")
    if name in OTHERS.values():
        markdown = markdown.replace("](docs/", "](")
    else:
        markdown = markdown.replace("](../results/", f"]({up}results/")
        for path, there in OTHERS.items():
            markdown = markdown.replace(f"](../{path}", f"]({up}{there}")
    # A bar within code is none between cells: GitHub wants it escaped, this Markdown does not.
    markdown = re.sub(r"`[^`\n]*`", lambda found: found[0].replace("\\|", "|"), markdown)
    return re.sub(r"!\[([^\]]*)\]\((pictures/[\w-]+\.svg)\)", _inline, markdown)


def _inline(found: re.Match[str]) -> str:
    """The drawing itself instead of a link to it, so that it has the colours of the page."""
    svg = (ROOT / "docs" / found[2]).read_text(encoding="utf-8")
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    return f'<figure class="drawing">{svg.strip()}</figure>'


def on_page_content(html: str, **_: Any) -> str:
    """The empty corner of a table is no heading."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme loads the script that lets search work on files from another host, ours is here; and a name for its
    search dialog."""
    up = "../" * page.file.dest_uri.count("/")
    output = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    return re.sub(r'src="https://unpkg.com/iframe-worker/shim[^"]*"', f'src="{up}assets/worker.js"', output)
