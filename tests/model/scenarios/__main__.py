"""`python -m tests.model.scenarios --write` plays all scenarios and writes down what comes of them."""

import sys

from tests.model.scenarios.script import FOLDER, paths, played


def main() -> int:
    is_writing = sys.argv[1:] == ["--write"]
    if not is_writing and sys.argv[1:]:
        sys.stderr.write("usage: python -m tests.model.scenarios [--write]\n")
        return 2
    changed = 0
    for path in paths():
        before = path.read_text(encoding="utf-8")
        after = played(path)
        if before != after:
            changed += 1
            sys.stdout.write(
                f"{path.relative_to(FOLDER)} {'written' if is_writing else 'differs'}\n"
            )
            if is_writing:
                path.write_text(after, encoding="utf-8")
    return 0 if is_writing or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
