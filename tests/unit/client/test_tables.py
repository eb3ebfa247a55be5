"""What the command line prints for people: all of it, however narrow the terminal is."""

import pytest

from quorumlog.cli.output import print_object, print_rows, text_of

LONG = "-".join(f"part{number}" for number in range(40))


def test_a_value_that_is_wider_than_the_terminal_is_printed_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    print_object({"name": "b1", "value": LONG})
    as_object = capsys.readouterr().out
    print_rows([{"name": "b1", "value": LONG}], ("name", "value"))
    as_rows = capsys.readouterr().out

    for printed in (as_object, as_rows):
        assert LONG in "".join(printed.split())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("free_bytes", 73_002_577_920, "67.99 GiB"),
        ("roll_bytes", 67_108_864, "64 MiB"),
        ("length", 900, "900 B"),
        ("lag_ms", 1500, "1.5 s"),
        ("lag_ms", 3_600_000, "60 min"),
        ("created_at", "2026-11-28T13:51:33.538680Z", "2026-11-28 13:51:33Z"),
        ("holder", None, ""),
        ("degraded", True, "yes"),
        ("offset", 7_000_000, "7000000"),
        ("holders", ["a", "b"], "a, b"),
        ("settings", {"ack_quorum": 2, "roll_bytes": 1 << 20}, "ack_quorum 2, roll_bytes 1 MiB"),
        ("ledgers", [{"ledger_id": 1}, {"ledger_id": 2}], "ledger_id 1\nledger_id 2"),
    ],
)
def test_sizes_durations_and_times_are_readable(name: str, value: object, text: str) -> None:
    assert text_of(name, value) == text
