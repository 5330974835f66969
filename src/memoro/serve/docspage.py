"""/docs: the API as one plain page, without scripts and without other hosts."""

from __future__ import annotations

from html import escape
from typing import Any

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
:root{color-scheme:light dark}
h2{font:600 1rem ui-monospace,monospace;margin:2rem 0 .25rem;overflow-wrap:anywhere}p{margin:.25rem 0}
code{font-family:ui-monospace,monospace}table{border-collapse:collapse;margin:.5rem 0}
td{border-top:1px solid #8884;padding:.2rem .8rem .2rem 0;vertical-align:top}"""


def docs_page(schema: dict[str, Any]) -> str:
    """The page for an OpenAPI schema."""
    info = schema["info"]
    parts = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"]
    parts.append('<p>For programs: <a href="/openapi.json">openapi.json</a></p>')
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2>{escape(method.upper())} {escape(path)}</h2><p>{escape(operation.get('summary', ''))}</p>"
            )
            if operation.get("description"):
                parts.append(f"<p>{escape(operation['description'])}</p>")
            rows = [(one["name"], one["in"], one.get("description", "")) for one in operation.get("parameters", [])]
            rows += [("body", kind, "") for kind in operation.get("requestBody", {}).get("content", {})]
            rows += [(status, "answer", one["description"]) for status, one in operation["responses"].items()]
            cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
            parts.append(f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    body = "".join(parts)
    return f"<!doctype html><html lang=en><head><title>memoro: API</title>{head}</head><body>{body}</body></html>"
