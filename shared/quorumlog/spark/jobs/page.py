"""Renders a report as one self-contained HTML file: text, tables, and plots as SVG."""

import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1c2733; background: #fff }
h1, h2 { line-height: 1.2; font-weight: 600 } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #e3e8ee }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
.empty { color: #6b7785 }
"""
_COLOR: Final = "#2563a8"
_ROWS_MAX: Final = 200


def report(figures: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> str:
    """The HTML page of the job `retention_stats`."""
    totals = [
        (name.replace("_", " "), figures[name])
        for name in ("ledgers", "entries", "bytes", "stored_bytes", "small_share", "skew")
    ]
    hours = figures["per_hour"]
    parts = [
        f"<h1>Ledgers and retention</h1><p>{html.escape(figures['at'])}</p>",
        _table(("", ""), totals),
        "<h2>Ledgers by the hour of their creation</h2>",
        _bars([row["hour"][5:16] for row in hours], [row["ledgers"] for row in hours], "ledgers"),
        "<h2>Size of ledgers</h2>",
        _bars(*_columns(figures["size_percentiles"]), "payload bytes"),
        _table(("share of the ledgers", "bytes at most"), figures["size_percentiles"].items()),
        "<h2>Bytes on each bookie</h2>",
        _bars(*_columns(figures["bookies"]), "bytes"),
        "<h2>Copies of each ledger</h2>",
        _bars(*_columns(figures["replicas"]), "ledgers"),
        "<h2>Logs</h2>",
        _bars(list(figures["logs"]), [item["bytes"] for item in figures["logs"].values()], "bytes"),
        _table(
            ("log", "ledgers", "batches of records", "bytes", "bytes an hour"),
            [(name, *item.values()) for name, item in figures["logs"].items()],
        ),
        "<h2>What may be deleted</h2>",
        _table(
            ("kind", "ledger", "log", "bookie", "bytes", "why", "not yet, because"),
            [tuple(item.values()) for item in candidates[:_ROWS_MAX]],
        ),
    ]
    if len(candidates) > _ROWS_MAX:
        parts.append(f"<p>{len(candidates) - _ROWS_MAX} more are in the plan (--plan).</p>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Ledgers and retention</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _columns(values: Mapping[str, float]) -> tuple[list[str], list[float]]:
    return list(values), list(values.values())


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    if not body:
        return '<p class="empty">Nothing.</p>'
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float):
        return f'<td class="number">{value:,}</td>'
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return f"<td>{html.escape(text)}</td>"


def _bars(names: Sequence[str], values: Sequence[float], unit: str) -> str:
    """A bar chart as SVG."""
    if not names:
        return '<p class="empty">Nothing.</p>'
    # Imported here: matplotlib is large, and only plots need it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(len(names)), values, color=_COLOR, width=0.7)
    step = max(1, len(names) // 12)
    axes.set_xticks(range(0, len(names), step), names[::step], fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="y", style="plain")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"
