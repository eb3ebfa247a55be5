"""Whatever bytes come, they are refused as such or mean what they say (`make fuzz`: for longer)."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.outside.fuzz.samples import SAMPLES
from tests.outside.fuzz.targets import TARGETS

FOUND = sorted(Path(__file__).with_name("found").glob("*/*"))


@st.composite
def damaged(draw: st.DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """A sample with a few bytes changed, pieces taken out, doubled or put elsewhere."""
    data = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        piece = draw(st.one_of(st.binary(max_size=9), st.just(data[start:end] * 2)))
        data = (
            data[:start] + piece + data[draw(st.sampled_from((start, start + len(piece), end))) :]
        )
    return data


def test_each_target_has_samples() -> None:
    assert SAMPLES.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_taken(name: str) -> None:
    for sample in SAMPLES[name]:
        TARGETS[name](sample)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_broke_a_claim_breaks_none(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes_are_refused_or_mean_what_they_say(name: str) -> None:
    @settings(max_examples=250)
    @given(damaged(SAMPLES[name]))
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_refused_or_mean_what_they_say(name: str) -> None:
    @settings(max_examples=100)
    @given(st.binary(max_size=600))
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()
