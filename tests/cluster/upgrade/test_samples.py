"""What releases before this one stored and sent is read by this one; `make upgrade` runs their processes."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from loadtest.stores import scratch
from quorumlog.protocol.messages import Status
from quorumlog.wire import frames
from quorumlog.wire.bodies import codec, document_of, received
from services.bookie.cookie import read_cookie
from services.bookie.log import Kind
from tests.cluster.upgrade.samples import (
    ENTRIES,
    LAC,
    ROW,
    SAMPLES,
    answers,
    model_of,
    requests,
    unpacked,
)
from tests.unit.bookie.support import (
    ME,
    add,
    assert_right,
    ids_of,
    opened,
    read,
    read_lac,
    run_of,
    started,
)

RELEASES = sorted(SAMPLES.iterdir())
SAMPLE = RELEASES[0].name
WIRE = {path.name: orjson.loads((path / "wire.json").read_bytes()) for path in RELEASES}
BODIES = [
    pytest.param(name, sample, id=f"{release}-{name}-{number}")
    for release, wire in WIRE.items()
    for name, samples in wire["bodies"].items()
    for number, sample in enumerate(samples)
]
SOME_JSON = st.one_of(
    st.none(),
    st.integers(0, 9),
    st.text(max_size=3),
    st.lists(st.just(1)),
    st.just({"a": {"b": 1}}),
)


@pytest.fixture
def root() -> Iterator[Path]:
    with scratch("ql-samples-") as path:
        yield path


@pytest.mark.parametrize("has_index", [True, False], ids=["with its index", "without an index"])
@pytest.mark.parametrize("sample", RELEASES, ids=lambda path: path.name)
async def test_a_directory_of_an_earlier_release_is_opened_with_all_that_it_holds(
    sample: Path, root: Path, *, has_index: bool
) -> None:
    folder = unpacked(sample, root / "d")
    if not has_index:
        shutil.rmtree(folder / "index")

    store = started(folder)
    for ledger_id, ids in (ENTRIES | {10: range(3)}).items():
        answer = await read(store, ledger_id, 0, 99)
        assert_right(answer, ledger_id)
        assert ids_of(answer) == list(ids)
    assert (await read_lac(store, 7)).last_add_confirmed >= LAC
    assert [copy.name for copy in store.index.copies(7)] == [ROW] or not has_index
    assert (await add(store, run_of(8, [9]))).status is Status.FENCED
    assert (await add(store, run_of(7, range(20, 30)))).status is Status.OK
    await store.stop()

    again = opened(folder)
    assert again.replayed.was_clean
    again.close()


@pytest.mark.parametrize("sample", RELEASES, ids=lambda path: path.name)
def test_a_cookie_of_an_earlier_release_is_read(sample: Path, root: Path) -> None:
    cookie = read_cookie(unpacked(sample, root / "d"))

    assert cookie is not None
    assert (cookie.member, cookie.was_registered) == (ME, True)


@pytest.mark.parametrize("release", WIRE)
def test_the_channel_has_the_same_bytes_as_in_an_earlier_release(release: str) -> None:
    assert requests() == WIRE[release]["requests"]
    assert answers() == WIRE[release]["answers"]
    for name, message in WIRE[release]["answers"].items():
        ((found,),) = (frames.parse_answers(bytes.fromhex(message))[1],)
        assert found.status is Status[name]


@pytest.mark.parametrize("release", WIRE)
def test_a_record_keeps_the_number_that_its_kind_had(release: str) -> None:
    kinds = {kind.name: int(kind) for kind in Kind}

    assert WIRE[release]["kinds"].items() <= kinds.items()


@pytest.mark.parametrize(("name", "sample"), BODIES)
def test_a_body_of_an_earlier_release_is_read_whole(name: str, sample: dict[str, Any]) -> None:
    body = codec(model_of(name)).validate_json(orjson.dumps(sample))

    assert contains(document_of(body), sample)


@pytest.mark.parametrize(("name", "sample"), BODIES)
@settings(max_examples=10)
@given(data=st.data())
def test_fields_of_a_later_release_change_nothing_of_what_is_read(
    name: str, sample: dict[str, Any], data: st.DataObject
) -> None:
    model: type[Any] = model_of(name)
    body = received(model, orjson.dumps(sample))
    later = copy.deepcopy(sample)
    for document in data.draw(st.lists(st.sampled_from(documents(body, later)), max_size=3)):
        field = data.draw(st.text("xyz_", min_size=4, max_size=8))
        document.setdefault(field, data.draw(SOME_JSON))

    assert received(model, orjson.dumps(later)) == body


def test_a_request_with_a_field_of_a_later_release_is_refused() -> None:
    sample = {**WIRE[SAMPLE]["bodies"]["wire.bodies.LedgerChange"][0], "only_if": 1}

    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        model_of("wire.bodies.LedgerChange").model_validate_json(orjson.dumps(sample))


def contains(whole: Any, part: Any) -> bool:
    """Whether a document says all that another one says."""
    if isinstance(part, dict):
        return all(name in whole and contains(whole[name], item) for name, item in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)


def documents(body: object, reported: Any) -> list[dict[str, Any]]:
    """The parts of a body to which a later release may add fields: not those whose names are users'."""
    if isinstance(body, BaseModel) or is_dataclass(body):
        parts = [documents(getattr(body, name), part) for name, part in reported.items()]
        return [reported, *(document for some in parts for document in some)]
    if isinstance(body, tuple) and isinstance(reported, list):
        return [
            one for item, part in zip(body, reported, strict=True) for one in documents(item, part)
        ]
    return []
