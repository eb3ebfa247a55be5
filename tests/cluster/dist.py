"""`python -m tests.cluster.dist WHEEL` (`make dist`): installs a wheel into an empty environment and runs README's example.

The packages come from the index that pip is configured for.
"""

import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path
from typing import Final

from loadtest.ports import free_ports

README: Final = Path(__file__).resolve().parents[2] / "README.md"
_EXAMPLE: Final = re.compile(
    r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Exit with a sentence if the example does not print what README says."""
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        python = home / "venv" / "bin" / "python"
        say(f"installing {wheel.name}[server] into an empty environment")
        venv.create(home / "venv", with_pip=True)
        install: list[str | Path] = [python, "-m", "pip", "install", "-q", f"{wheel}[server]"]
        subprocess.run(install, check=True, cwd=home)
        printed, wanted = run_example(python, home)
    if printed != wanted:
        sys.exit(f"the example of README.md printed {printed!r}, not {wanted!r}")
    say(f"{wheel.name}: quorumlog serve and the example of README.md work")


def run_example(python: Path, home: Path) -> tuple[str, str]:
    """What README's example prints beside `quorumlog serve`, and what it should print."""
    found = _EXAMPLE.search(README.read_text(encoding="utf-8"))
    assert found is not None, "README.md has an example with its output"
    (port,) = free_ports(1)
    code = found[1].replace("8080", str(port)).replace("8081", str(port))
    serve: list[str | Path] = [python.with_name("quorumlog"), "serve", "--dev", "--gateways", "1", "--port",
             str(port)]  # fmt: skip
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=home) as serving:
        assert serving.stdout is not None
        try:
            for line in serving.stdout:
                if line.startswith("Ctrl-C "):  # the last line before it serves
                    break
            check_console(f"http://127.0.0.1:{port}")
            done = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, check=False, cwd=home
            )
        finally:
            serving.send_signal(signal.SIGINT)
        serving.stdout.read()
    return done.stdout + done.stderr, found[2]


def check_console(gateway: str) -> None:
    """Exit with an error unless the gateway serves the console with each file that it names."""
    with urllib.request.urlopen(f"{gateway}/") as page:
        names = re.findall(r'"(/console/[^"]+)"', page.read().decode())
    assert names, "the page names its files"
    for name in names:
        urllib.request.urlopen(f"{gateway}{name}").close()


if __name__ == "__main__":
    main()
