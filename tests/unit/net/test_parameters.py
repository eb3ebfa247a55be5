"""A parameter's declaration is what refuses a request and what the OpenAPI document shows."""

import contextlib
import re
from typing import Any, Final

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import BaseModel

from quorumlog.errors import BadRequest, InvalidRequest
from quorumlog.net.bodies import parsed
from quorumlog.net.operations import Route
from quorumlog.net.parameters import (
    PAIRS_MAX,
    Given,
    Parameter,
    header_integer,
    query_choice,
    query_integer,
    query_pairs,
    query_text,
    read,
    time_of,
)
from quorumlog.protocol.ids import ID_MAX
from services.autorecovery.handlers import ROUTES as AUTORECOVERY
from services.bookie.handlers import ROUTES as BOOKIE
from services.gateway.edge import cluster, entries, ledgers, log_records, logs, transactions
from services.metadata.app import ROUTES as METADATA

GATEWAY: Final = (
    cluster,
    entries,
    ledgers,
    logs,
    log_records,
    transactions,
)
WEAKER: Final = {"Producer-Id", "X-Ledger-Key", "since", "from"}
"""JSON schemas can't count bytes, and a format is a note."""
LENIENT: Final = {"/path/code", "/path/bookie", "/query/metadata", "/query/header"}
"""Another code or bookie is 404, and pairs have no text of their own."""


def declared() -> dict[str, Parameter[Any]]:
    """Every parameter that a module of the gateway or a route of another service declares."""
    routes: tuple[Route, ...] = (*METADATA, *BOOKIE, *AUTORECOVERY)
    found = [one for route in routes for one in route.operation.parameters]
    found += [
        one for module in GATEWAY for one in vars(module).values() if isinstance(one, Parameter)
    ]
    return {f"{one.pointer} {one.description}": one for one in found if one.pointer not in LENIENT}


DECLARED: Final = declared()


def texts(schema: Any) -> st.SearchStrategy[str]:
    """Texts around what a schema lets through."""
    kinds = [st.text(max_size=30), st.integers(-2, 2**64).map(str), st.sampled_from(("01", "-0"))]
    for one in (schema, *schema.get("anyOf", ())):
        if "minimum" in one:
            low, high = one["minimum"], one["maximum"]
            kinds += [st.sampled_from((low - 1, low, high, high + 1)).map(str)]
            kinds += [st.integers(low, high).map(str)]
        if "pattern" in one:
            kinds += [st.from_regex(one["pattern"], fullmatch=True)]
        if "enum" in one:
            kinds += [st.sampled_from(one["enum"])]
        if "maxLength" in one:
            most = one["maxLength"]
            kinds += [st.sampled_from(("x" * most, "x" * (most + 1), "ü" * most))]
    return st.one_of(kinds)


def reads(parameter: Parameter[Any], text: str) -> bool:
    """Whether a parameter takes a text; a refusal names the parameter."""
    try:
        parameter.parse(text, parameter.pointer)
    except (BadRequest, InvalidRequest) as error:
        return parameter.pointer not in error.detail
    return True


@pytest.mark.parametrize("name", DECLARED)
def test_what_a_declaration_reads_is_what_it_shows(name: str) -> None:
    parameter = DECLARED[name]
    shown = Draft202012Validator(parameter.schema)

    @settings(max_examples=50)
    @given(texts(parameter.schema))
    def check(text: str) -> None:
        is_read = reads(parameter, text)
        is_number = re.fullmatch(r"-?[1-9][0-9]*|0", text, re.ASCII) is not None
        takes_numbers = "minimum" in str(parameter.schema)
        is_shown = shown.is_valid(int(text) if is_number and takes_numbers else text)
        # A pattern's `$` stands before a newline too.
        if text.endswith("\n") or (parameter.name in WEAKER and not is_read):
            return
        assert is_read == is_shown

    check()


@pytest.mark.parametrize("name", DECLARED)
def test_a_default_is_what_is_shown(name: str) -> None:
    parameter = DECLARED[name]

    if "default" in parameter.schema:
        assert parameter.parse(str(parameter.default), "") == parameter.default
        assert parameter.schema["default"] == parameter.default


LIMIT: Final = query_integer("limit", 1, 100, "Rows.", 10)
AFTER: Final = query_integer("after", 0, ID_MAX, "Rows after.")
NAME: Final = query_text("name", "[a-z]+", "A name.")
SORT: Final = query_choice("sort", ("up", "down"), "The order.", "up")
TAGS: Final = query_pairs("tag", "Tags.")
SINCE: Final = header_integer("Since", "A time.")


def given_by(query: str, **headers: str) -> Given:
    request: web.Request = make_mocked_request("GET", f"/?{query}", headers=headers)
    return read((LIMIT, AFTER, NAME, SORT, TAGS, SINCE), request)


def test_what_a_request_gives_is_told_from_a_default() -> None:
    nothing, all_of_it = given_by(""), given_by("limit=10&tag[a]=1&tag[b]=&sort=down", Since="7")

    assert (nothing[LIMIT], nothing.get(LIMIT), nothing[AFTER], nothing[TAGS]) == (
        10,
        None,
        None,
        (),
    )
    assert (all_of_it[LIMIT], all_of_it.get(LIMIT), all_of_it[SORT]) == (10, 10, "down")
    assert (all_of_it[TAGS], all_of_it[SINCE]) == ((("a", "1"), ("b", "")), 7)


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("limit=0", "/query/limit: must be an integer from 1 to 100"),
        ("name=A", r"/query/name: must match \[a-z\]\+"),
        ("sort=left", "/query/sort: must be one of up, down"),
        ("colour=red", "/query/colour: is not a parameter of this route: remove it"),
        ("tag=1", "/query/tag: is not a parameter of this route: remove it"),
        ("tag[a][b]=1", r"/query/tag: must have the form tag\[key\]=value"),
        ("tag[a]=%00", "/query/tag: must not contain NUL"),
    ],
)
def test_a_value_that_is_not_allowed_is_invalid(query: str, detail: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{detail}$"):
        given_by(query)


@pytest.mark.parametrize("query", ["limit=x", "limit=", "limit=01", "limit=1&limit=2"])
def test_a_text_that_can_not_be_read_is_a_bad_request(query: str) -> None:
    with pytest.raises(BadRequest):
        given_by(query)


def test_of_many_faults_of_a_body_the_first_hundred_are_named() -> None:
    class Body(BaseModel):
        numbers: list[int]

    with pytest.raises(InvalidRequest) as reported:
        parsed(b'{"numbers":[%b]}' % b",".join([b"null"] * 101), Body)

    pointers = [fault["pointer"] for fault in reported.value.members["errors"]]
    assert pointers == [f"/numbers/{number}" for number in range(100)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05+00:00"),
        ("2026-01-02t03:04:05.678901234z", "2026-01-02T03:04:05.678901+00:00"),
        ("2026-01-02T03:04:05.5-23:59", "2026-01-03T03:03:05.500000+00:00"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00+00:00"),
        # Leap seconds are the last ones of a month in UTC (RFC 3339, 5.7 and appendix D).
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00+00:00"),
        ("1990-12-31T15:59:60.75-08:00", "1991-01-01T00:00:00+00:00"),
    ],
)
def test_a_time_of_rfc_3339_is_read(text: str, expected: str) -> None:
    assert time_of(text).isoformat() == expected


@pytest.mark.parametrize(
    "text",
    [
        "2026-W48-1T10:00:00Z", "2026-01-02T03:04:05,5Z", "2026-01-02T03:04Z", "2026-01-02 03:04:05Z",
        "2026-01-02T24:00:00Z", "2026-01-02T03:60:00Z", "2026-01-02T03:04:61Z", "2026-01-02T03:04:05",
        "2026-01-02T03:04:05+0100", "2026-01-02T03:04:05+24:00", "2026-01-02T03:04:05+01:60", "20260102T030405Z",
        "2026-02-30T03:04:05Z", "2026-01-30T23:59:60Z", "2016-12-31T23:59:60+01:00", "2016-12-31T22:59:60Z",
        "9999-12-31T23:59:60Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0000-01-01T00:00:00Z",
        "\uff12026-01-02T03:04:05Z", "2026-01-02T03:04:05Z ", "",
    ],
)  # fmt: skip
def test_what_rfc_3339_does_not_know_is_no_time(text: str) -> None:
    with contextlib.suppress(ValueError):
        pytest.fail(f"is read as {time_of(text)}")


def test_pairs_have_a_number() -> None:
    pairs, few = (
        ledgers.METADATA,
        {f"metadata[{n}]": "a" for n in range(PAIRS_MAX)},
    )
    assert len(pairs.taken(dict(few)) or ()) == PAIRS_MAX
    with pytest.raises(InvalidRequest, match="at most 8 pairs"):
        pairs.taken(few | {"metadata[x]": "a"})
