"""`python -m tests.outside.fuzz.feed TARGET …`: one target under atheris, with libFuzzer's own arguments."""

import sys

import atheris

with atheris.instrument_imports(include=["quorumlog", "services"]):
    from tests.outside.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
