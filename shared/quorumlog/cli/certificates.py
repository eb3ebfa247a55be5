"""`quorumlog certificates …`: a small certificate authority for the services of a cluster. Asks no server.

The work is `quorumlog.certificates`, whose package `cryptography` is an extra of its own: few machines
make certificates.
"""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import typer

from quorumlog.cli.ends import finished
from quorumlog.cli.printing import print_answer, print_object, print_rows
from quorumlog.cli.session import common_options, with_common_options
from quorumlog.errors import NOT_DONE, QuorumLogError

app = typer.Typer(
    no_args_is_help=True,
    help="Keys and certificates with which services know each other (mutual TLS). Asks no server.",
)

_COLUMNS: Final = ("file", "role", "name", "cluster", "hosts", "ends", "days_left")


class NoCryptography(
    QuorumLogError, code="no-cryptography", title="A package is missing", travels=False
):
    """Certificates need the package `cryptography`, which this Python does not have."""

    outcome = NOT_DONE


class CertificateRefused(
    QuorumLogError, code="certificate-refused", title="No such certificate", travels=False
):
    """What was asked for can't be a certificate, or a file is none."""

    outcome = NOT_DONE


FolderOption = Annotated[
    Path, typer.Option("--folder", help="The authority's folder, which has ca.pem and ca-key.pem.")
]
_FOLDER: Final = Path("certificates")


@app.command()
def init(
    cluster: Annotated[
        str, typer.Argument(help="The cluster's name: its processes trust no other cluster's.")
    ] = "quorumlog",
    folder: FolderOption = _FOLDER,
    days: Annotated[int, typer.Option(min=1, help="How long the authority is valid.")] = 3650,
) -> None:
    """Make a certificate authority for a cluster. Its key ca-key.pem makes anybody a member of the cluster:
    keep the key away from the services' hosts.
    """
    with _library() as library:
        file = library.create_authority(folder, cluster, days=days)
    _print_written(file, library)


@app.command()
def issue(
    role: Annotated[
        str,
        typer.Argument(help="gateway, bookie, metadata, autorecovery, operator (people), monitor."),
    ],
    name: Annotated[str, typer.Argument(help="The process's name; a bookie's BOOKIE_NAME.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A DNS name or IP address at which others reach the process; repeat it."),
    ] = None,
    folder: FolderOption = _FOLDER,
    into: Annotated[
        Path | None, typer.Option(help="Where to write, instead of the authority's folder.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificate is valid.")] = 365,
) -> None:
    """Make a key and a certificate for one process. Refuses to replace files."""
    with _library() as library:
        file = library.issue(folder, role, name, host or (), days=days, into=into)
    _print_written(file, library)


@app.command()
def renew(
    certificate: Annotated[Path, typer.Argument(help="The certificate's file.")],
    folder: FolderOption = _FOLDER,
    days: Annotated[int, typer.Option(min=1, help="How long the new one is valid.")] = 365,
) -> None:
    """Replace a certificate and its key by new ones for the same process and hosts. A running service takes
    them within seconds, and its connections go on.
    """
    with _library() as library:
        file = library.renew(folder, certificate, days=days)
    _print_written(file, library)


@app.command()
def revoke(
    role: Annotated[str, typer.Argument(help="The role of the process.")],
    name: Annotated[str, typer.Argument(help="The name of the process.")],
    folder: FolderOption = _FOLDER,
) -> None:
    """Refuse all certificates that were issued to a process so far, those before a renewal too: they stand in
    ca.pem then. Services take a new ca.pem within seconds and cut the process's connections.
    """
    with _library() as library:
        count = library.revoke(folder, role, name)
    told = {"role": role, "name": name, "revoked": count, "file": str(folder / "ca.pem")}
    print_answer(
        told,
        f"{count} certificates of {role} {name} are revoked: copy {told['file']} to the hosts of all processes",
    )


@app.command()
def show(
    files: Annotated[list[Path] | None, typer.Argument(help="Certificates; default: all.")] = None,
    folder: FolderOption = _FOLDER,
) -> None:
    """Print whom certificates are for, and when they end."""
    with _library() as library:
        if not files and not (folder / "ca.pem").exists():
            raise FileNotFoundError(f"{folder} has no ca.pem: `quorumlog certificates init`")
        named = files or sorted(set(folder.glob("*.pem")) - set(folder.glob("*-key.pem")))
        rows = [_row(file, library) for file in named]
    if not common_options().as_json:
        rows = [{**row, "hosts": ", ".join(row["hosts"]), "ends": row["ends"][:10]} for row in rows]
    print_rows(rows, _COLUMNS)


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """The library; an error of the block ends the command with the error's exit status."""
    as_json = common_options().as_json
    library = finished(_import_library, as_json=as_json)
    try:
        yield library
    except library.CertificateRefused as refused:
        error: Exception = CertificateRefused(str(refused))
    except OSError as failed:
        error = failed
    else:
        return

    def fail() -> None:
        raise error

    finished(fail, as_json=as_json)


def _import_library() -> ModuleType:
    try:
        # Late: the package takes a tenth of a second, and the other commands do without.
        from quorumlog import certificates  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "cryptography":
            raise
        raise NoCryptography(
            "certificates need the package cryptography: pip install 'quorumlog[cli,certificates]'"
        ) from None
    return certificates


def _row(file: Path, library: Any) -> dict[str, Any]:
    found = library.describe(file)
    subject = found.subject
    role = "authority" if found.is_authority else "none"
    return {
        "file": str(file),
        "role": subject.role if subject else role,
        "name": subject.name if subject else "",
        "cluster": subject.cluster if subject else "",
        "hosts": list(subject.hosts) if subject else [],
        "issuer": found.issuer,
        "begins": found.begins.isoformat(),
        "ends": found.ends.isoformat(),
        "days_left": found.days_left(datetime.now(UTC)),
    }


def _print_written(file: Path, library: Any) -> None:
    row = {**_row(file, library), "key_file": str(library.key_file(file))}
    if common_options().as_json:
        print_object(row)
    else:
        print_answer(row, f"{file} and {row['key_file']}, valid until {row['ends'][:10]}")


with_common_options(app, is_offline=True)
