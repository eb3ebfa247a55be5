"""JSON over HTTP from drivers and executors, where there is nothing but Spark's own packages."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

DEADLINE_S: Final = 60.0
_PAUSE_S: Final = 0.2
_BUSY: Final = (429, 503)
_PAGE: Final = 1000


class Refused(Exception):
    """An answer that is an error; `status` and the problem's code say which."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status} {problem.get('code', '')}: {problem.get('detail', '')}")
        self.status = status
        self.problem = problem


class Unreachable(Exception):
    """Nobody answered in time."""


def ask(
    urls: Sequence[str],
    method: str,
    path: str,
    body: Any = None,
    *,
    deadline_s: float = DEADLINE_S,
    timeout_s: float = DEADLINE_S,
) -> Any:
    """The answer of the first of these URLs that gives one. Only for requests that may be sent
    twice. A service that is overloaded is asked again after a pause.

    Raises: Refused, Unreachable.
    """
    end = time.monotonic() + deadline_s
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    while True:
        failure: Exception = Unreachable("no URL to ask")
        for url in urls:
            request = urllib.request.Request(  # noqa: S310 - http URLs of an operator
                url + path, data=data, headers=headers, method=method
            )
            try:
                with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                    content = answer.read()
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                failure = Refused(error.code, _problem(error.read()))
                if error.code not in _BUSY:
                    raise failure from None
            except (OSError, ValueError) as error:
                failure = Unreachable(f"{url}{path}: {error}")
        if time.monotonic() + _PAUSE_S >= end:
            raise failure
        time.sleep(_PAUSE_S)


def pages(urls: Sequence[str], path: str, items: str, **query: Any) -> Iterator[dict[str, Any]]:
    """All items of a list, page by page."""
    after: Any = None
    while True:
        asked = {**query, "limit": _PAGE} | ({} if after is None else {"after": after})
        page = ask(urls, "GET", f"{path}?{urlencode(asked)}")
        yield from page[items]
        after = page["next"]
        if after is None:
            return


def part(text: str) -> str:
    """A name as a part of a path."""
    return quote(text, safe="")


def _problem(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
