"""The model of docs/internals/scaling.md: the page says what the model says, and the model what its parts say."""

import re
import shlex
from dataclasses import replace

import pytest

from loadtest.scaling import FIGURES, WRITES, Cluster, carried, figures, main
from services.local.config import ROOT

PAGE = (ROOT / "docs" / "internals" / "scaling.md").read_text(encoding="utf-8")
CASES = (
    "",
    "--bookies 6 --gateways 2 --ledgers 100000",
    "--entry 65536 --readers 3 --disk 100",
)


@pytest.mark.parametrize("options", CASES)
def test_the_page_has_the_models_table(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(options))

    assert capsys.readouterr().out in PAGE
    assert options in PAGE


def test_each_figure_names_its_source() -> None:
    for source in re.findall(r'"(\w+)": \[[\d.]+, "([^"]+)"\]', FIGURES.read_text("utf-8")):
        assert len(source[1]) > len("of a run")
    assert set(WRITES) < set(figures())


def test_what_a_resource_carries_grows_with_it_and_with_nothing_else() -> None:
    known, small = figures(), Cluster(readers=0)
    for write in WRITES:
        base = carried(small, write, known)
        more = carried(replace(small, gateways=2 * small.gateways), write, known)
        assert more["CPU of the gateways"] == 2 * base["CPU of the gateways"]
        assert more["CPU of the bookies"] == base["CPU of the bookies"]
        assert more["CPU of the metadata service"] < base["CPU of the metadata service"]
        faster = carried(replace(small, disk=2 * small.disk), write, known)
        assert faster["disks of the bookies"] == 2 * base["disks of the bookies"]
        read = carried(replace(small, readers=1), write, known)
        assert read["CPU of the gateways"] < base["CPU of the gateways"]


def test_a_metadata_service_that_idle_processes_use_up_carries_nothing() -> None:
    crowded = Cluster(bookies=10_000, metadata=1)
    assert carried(crowded, WRITES[0], figures())["CPU of the metadata service"] == 0
