"""The command `quorumlog` in forks of one process that has imported it, which saves each command half a second.

`python -I -S quick_command.py SOCKET WORDS…` passes its arguments, environment, folder and standard streams to the
process that listens at SOCKET, and exits with the command's status. Signals are not passed on, and /proc shows
another command line: tests of these start `python -m quorumlog.cli`.
"""

import gc
import marshal
import os
import socket
import sys

_STREAMS = 3


def ask(path: str, words: list[str]) -> int:
    """Run a command, and return its exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = marshal.dumps((words, os.getcwd(), dict(os.environ)))  # noqa: PTH109
        socket.send_fds(server, [len(request).to_bytes(4, "big")], range(_STREAMS))
        server.sendall(request)
        return int.from_bytes(server.recv(4) or b"\1", "big")


def serve(path: str) -> None:
    """Run commands until this process is killed; in a fork, return as a process that is to run one."""
    import quorumlog.cli.commands  # noqa: F401

    gc.freeze()  # forks need not scan what is imported
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)  # noqa: PTH104 - a client may connect from now on
        while True:
            connection, _ = listener.accept()
            with connection:
                _reap()
                if os.fork():
                    continue
                listener.close()
                command = _received(connection)
                if child := os.fork():
                    _, status = os.waitpid(child, 0)
                    connection.sendall(
                        (os.waitstatus_to_exitcode(status) & 0xFF).to_bytes(4, "big")
                    )
                    os._exit(0)
            _become(*command)
            return


def _reap() -> None:
    """Collect the forks that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _received(connection: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """What the client sent; its standard streams become this process's."""
    size, streams, _, _ = socket.recv_fds(connection, 4, _STREAMS)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with connection.makefile("rb") as file:
        words, folder, environment = marshal.loads(file.read(int.from_bytes(size, "big")))
    return words, folder, environment


def _become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[2])
    from quorumlog.cli import main

    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        sys.stderr.flush()
        os._exit(end.code)  # no time goes into the end of the interpreter
