"""/docs: the API as one plain page, without scripts and without other hosts."""

from __future__ import annotations

from typing import Any

from memoro.pages.page import render_page, table, tag


def docs_page(schema: dict[str, Any]) -> str:
    """The page for an OpenAPI schema."""
    info = schema["info"]
    parts = [tag("h1", f"{info['title']} {info['version']}"), tag("p", info["description"])]
    parts.append(tag("p", "For programs: ", tag("a", "openapi.json", href="openapi.json")))
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts += [tag("h2", f"{method.upper()} {path}"), tag("p", operation.get("summary", ""))]
            if operation.get("description"):
                parts.append(tag("p", operation["description"]))
            rows = [(one["name"], one["in"], one.get("description", "")) for one in operation.get("parameters", [])]
            rows += [("body", kind, "") for kind in operation.get("requestBody", {}).get("content", {})]
            rows += [(status, "answer", one["description"]) for status, one in operation["responses"].items()]
            parts.append(table([], rows, left=3))
    return render_page("memoro: API", *parts)
