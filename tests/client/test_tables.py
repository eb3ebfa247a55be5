"""What the command line prints for people: all of it, however narrow the terminal is."""

import pytest

from quorumlog.cli.printing import print_object, print_rows

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
