"""The page of `retention_stats` is one file: plots in it, and nothing that a browser would fetch."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="PySpark is not installed: make setup-spark")

from quorumlog.spark.jobs.page import report


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                self.links.append(value or "")
            self.links += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def figures(**more: Any) -> dict[str, Any]:
    return {
        "at": "2026-01-02T03:04:05+00:00",
        "ledgers": 3,
        "entries": 30,
        "bytes": 1_234_567,
        "stored_bytes": 3_703_701,
        "small_share": 0.25,
        "skew": 1.5,
        "per_hour": [{"hour": f"2026-01-02T{hour:02}:00:00", "ledgers": 1} for hour in range(24)],
        "size_percentiles": {"p50": 10, "p90": 100, "p99": 1000, "max": 10_000},
        "bookies": {"b1@1": 5, "b2@1": 7},
        "replicas": {"2": 1, "3": 2},
        "logs": {"<log>": {"ledgers": 1, "entries": 2, "bytes": 3, "bytes_per_hour": 4}},
        **more,
    }


CANDIDATE = {
    "kind": "expired",
    "ledger": 7,
    "log": "<log>",
    "bookie": None,
    "bytes": 9,
    "reason": "older than 1 s & a bit",
    "excluded": None,
}


def test_the_page_has_its_plots_in_it_and_fetches_nothing() -> None:
    seen = Seen(report(figures(), [CANDIDATE] * 201))

    assert seen.tags.count("svg") == 5
    assert not {"script", "link", "img", "image", "iframe", "object", "embed"} & set(seen.tags)
    assert seen.links
    assert all(link.startswith("#") for link in seen.links)
    assert "<log>" in seen.text
    assert "older than 1 s & a bit" in seen.text
    assert "1,234,567" in seen.text
    assert "bytes at most" in seen.text, "p50 cannot be seen in a plot beside the maximum"
    assert "1 more are in the plan (--plan)" in seen.text


def test_the_page_of_an_empty_cluster_says_so() -> None:
    nothing: dict[str, Any] = {
        name: {} for name in ("size_percentiles", "bookies", "replicas", "logs")
    }
    seen = Seen(report(figures(per_hour=[], **nothing), []))

    assert "svg" not in seen.tags
    assert seen.text.count("Nothing.") == 8
