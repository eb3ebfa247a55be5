"""An OpenAPI description as one HTML page for people, which loads nothing from elsewhere."""

import html
from collections.abc import Iterator, Mapping
from typing import Any, Final

_METHODS: Final = ("get", "put", "post", "delete", "patch", "head", "options")
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:.1rem .3rem;border-radius:.2rem}"
    "summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}"
    "td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}"
    ":root{color-scheme:light dark}"
)


def render(openapi: Mapping[str, Any]) -> str:
    """The page."""
    info = openapi.get("info", {})
    title = html.escape(str(info.get("title", "API")))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(str(info.get('description', '')))}"
        f'</p><p>As data: <a href="/openapi.json"><code>/openapi.json</code></a></p>'
        + "".join(_operations(openapi))
        + "</html>"
    )


def _operations(openapi: Mapping[str, Any]) -> Iterator[str]:
    for path, item in openapi.get("paths", {}).items():
        for method in _METHODS:
            if method in item:
                shared = item.get("parameters", [])
                yield _operation(method, path, item[method], shared)


def _operation(
    method: str, path: str, operation: Mapping[str, Any], shared: list[Mapping[str, Any]]
) -> str:
    rows = [
        f"<tr><td><code>{html.escape(str(p.get('name', '')))}</code><td>{html.escape(str(p.get('in', '')))}"
        f"<td>{html.escape(str(p.get('description', '')))}"
        for p in (*shared, *operation.get("parameters", []))
        if "$ref" not in p
    ]
    bodies = ", ".join(operation.get("requestBody", {}).get("content", {}))
    answers = [
        f"<tr><td><code>{html.escape(str(status))}</code><td>{html.escape(str(answer.get('description', '')))}"
        for status, answer in operation.get("responses", {}).items()
    ]
    parts = [f"<p>{html.escape(str(operation.get('description', '')))}</p>"]
    if rows:
        parts.append(f"<table>{''.join(rows)}</table>")
    if bodies:
        parts.append(f"<p>Body: <code>{html.escape(bodies)}</code></p>")
    parts.append(f"<table>{''.join(answers)}</table>")
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(str(operation.get('summary', '')))}</summary>{''.join(parts)}</details>"
    )
