"""The explanation of a problem's code: as JSON, and as a page for people."""

import html
import inspect
from typing import Any

from quorumlog.errors import NOT_DONE, QuorumLogError


def problem_json(cls: type[QuorumLogError]) -> dict[str, Any]:
    """The explanation of a code."""
    return {
        "code": cls.code,
        "status": cls.status,
        "title": cls.title,
        "description": " ".join(inspect.cleandoc(cls.__doc__ or cls.title).split()),
        "retryable": cls.retryable,
        "outcome": cls.outcome,
    }


def problem_page(cls: type[QuorumLogError]) -> str:
    """The explanation of a code as HTML that loads nothing."""
    shown = problem_json(cls)
    retry = "It may be sent again as it is." if cls.retryable else "Sent again, it fails again."
    done = (
        "Nothing was done."
        if cls.outcome == NOT_DONE
        else "Nobody can say whether the request was done."
    )
    return page(
        html.escape(cls.title),
        f"<p><code>{cls.code}</code>, status {cls.status}</p>"
        f"<p>{html.escape(shown['description'])}</p><p>{done} {retry}</p>",
    )


def page(title: str, body: str) -> str:
    """A small page, of a title and a body that are HTML."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{title}</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;"
        f"padding:0 1rem}}:root{{color-scheme:light dark}}</style><h1>{title}</h1>{body}</html>"
    )
