"""Runs the command line as `python -m quorumlog.cli`."""

from quorumlog.cli import main

if __name__ == "__main__":
    main()
