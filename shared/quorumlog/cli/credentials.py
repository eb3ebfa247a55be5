"""The commands `quorumlog token …`, for access tokens of gateways, and `quorumlog certificates …`,
a small certificate authority for the services of a cluster. The authority sends no requests to
servers.

`quorumlog.certificates` implements the authority. The authority needs the package `cryptography`,
which only the extra `certificates` installs, since few machines issue certificates.
"""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, TypeVar
from uuid import uuid4

import typer

from quorumlog.cli.operator import ask_metadata
from quorumlog.cli.output import common_options, print_answer, print_rows
from quorumlog.cli.session import offline_options, run, with_common_options
from quorumlog.errors import NOT_DONE, QuorumLogError
from quorumlog.wire.secret import draw_token

T = TypeVar("T")

token_app = typer.Typer(no_args_is_help=True, help="Access tokens: create, list, revoke.")


@token_app.command(name="create")
def create_token(
    name: Annotated[
        str, typer.Argument(help="A descriptive name: who uses the token, or for what.")
    ],
    grants: Annotated[
        list[str],
        typer.Argument(
            help="A right (read, append, manage or admin), a colon and the object: logs/NAME or ledgers/NAMESPACE (both"
            " may end with * for any rest), cluster, or * for everything."
        ),
    ],
    days: Annotated[
        int | None,
        typer.Option(min=1, max=3650, help="Days until the token expires; default: never."),
    ] = None,
    requests_per_s: Annotated[
        int | None, typer.Option(min=1, help="Requests per second, at each gateway.")
    ] = None,
    bytes_per_s: Annotated[
        int | None,
        typer.Option(min=1, help="Request and response bytes per second, at each gateway."),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(min=1, help="Connections with requests under way, at each gateway."),
    ] = None,
    open_ledgers: Annotated[
        int | None, typer.Option(min=1, help="Open ledgers, at each gateway.")
    ] = None,
    metadata_urls: Annotated[
        str | None,
        typer.Option(
            "--metadata",
            help="URLs of metadata services that create the token: a gateway can't create a cluster's first token.",
        ),
    ] = None,
) -> None:
    """Create an access token and print it. The secret can't be printed again."""
    expires_in_s = None if days is None else days * 24 * 3600
    asked = {
        "requests_per_s": requests_per_s,
        "bytes_per_s": bytes_per_s,
        "connections": connections,
        "open_ledgers": open_ledgers,
    }
    quotas = {quota: most for quota, most in asked.items() if most is not None}
    if metadata_urls is None:
        limits: dict[str, Any] = {"expires_in_s": expires_in_s, "quotas": quotas}
        made = run(lambda client: client.create_token(name, grants, **limits))
    else:
        made = _create_at(metadata_urls, name, grants, expires_in_s, quotas)
    print_answer(made, made["token"])


def _create_at(
    urls: str, name: str, grants: list[str], expires_in_s: int | None, quotas: dict[str, int]
) -> dict[str, Any]:
    """Create a token at the metadata service, which gets only the secret's hash."""
    drawn = draw_token()
    body = {
        "token": {
            "id": drawn.id,
            "hash": base64.b64encode(drawn.hash).decode(),
            "name": name,
            "grants": grants,
            "quotas": quotas,
        },
        "expires_in_s": expires_in_s,
        "attempt": str(uuid4()),
    }
    row = ask_metadata("POST", urls, "/v1/tokens", body)
    return {**{key: value for key, value in row.items() if key != "hash"}, "token": drawn.secret}


@token_app.command("list")
def list_tokens() -> None:
    """Print all tokens, without their secrets."""
    found = run(lambda client: client.tokens())
    for token in found if not common_options().as_json else ():
        token["grants"] = " ".join(token["grants"])
        token["expires_at"] = token["expires_at"] or "never"
    print_rows(found, ("id", "name", "grants", "created_at", "expires_at"))


@token_app.command(name="revoke")
def revoke_token(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="The token's id, from `token list`.")
    ],
) -> None:
    """Revoke a token. Within seconds all gateways reject it and close its connections."""
    run(lambda client: client.revoke_token(token_id))
    print_answer({"id": token_id, "revoked": True})


# --- certificates ---------------------------------------------------------------------------------

certificates_app = typer.Typer(
    no_args_is_help=True,
    help="Keys and certificates with which services authenticate each other (mutual TLS). Sends no requests.",
)

_COLUMNS: Final = ("file", "role", "name", "cluster", "hosts", "ends", "days_left")


class NoCryptography(QuorumLogError, title="A package is missing", outcome=NOT_DONE, travels=False):
    """Certificates need the package `cryptography`, which this Python does not have."""


class CertificateRefused(
    QuorumLogError, title="No such certificate", outcome=NOT_DONE, travels=False
):
    """A certificate can't be made as requested, or a file is not a certificate."""


FolderOption = Annotated[
    Path, typer.Option(help="The authority's folder, which has ca.pem and ca-key.pem.")
]
_FOLDER: Final = Path("certificates")


@certificates_app.command()
def init(
    cluster: Annotated[
        str, typer.Argument(help="The cluster's name. Its processes trust no other cluster.")
    ] = "quorumlog",
    folder: FolderOption = _FOLDER,
    days: Annotated[int, typer.Option(min=1, help="How many days the authority is valid.")] = 3650,
) -> None:
    """Create a certificate authority for a cluster. Any process with the authority's key, ca-key.pem,
    can join the cluster, so keep the key away from the services' hosts.
    """
    _print_written(lambda library: library.create_authority(folder, cluster, days=days))


@certificates_app.command()
def issue(
    role: Annotated[
        str,
        typer.Argument(help="gateway, bookie, metadata, autorecovery, operator (people), monitor."),
    ],
    name: Annotated[str, typer.Argument(help="The process's name; a bookie's BOOKIE_NAME.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A DNS name or IP address at which others reach the process; repeatable."
        ),
    ] = None,
    folder: FolderOption = _FOLDER,
    into: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: the authority's folder.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How many days the certificate is valid.")] = 365,
) -> None:
    """Make a key and a certificate for one process. Existing files are not replaced."""
    more: dict[str, Any] = {"days": days, "into": into}
    _print_written(lambda library: library.issue(folder, role, name, host or (), **more))


@certificates_app.command()
def renew(
    certificate: Annotated[Path, typer.Argument(help="The certificate's file.")],
    folder: FolderOption = _FOLDER,
    days: Annotated[
        int, typer.Option(min=1, help="How many days the new certificate is valid.")
    ] = 365,
) -> None:
    """Replace a certificate and its key with a new pair for the same process and hosts. A running
    service uses the new files within seconds, and keeps its connections.
    """
    _print_written(lambda library: library.renew(folder, certificate, days=days))


@certificates_app.command()
def revoke(
    role: Annotated[str, typer.Argument(help="The role of the process.")],
    name: Annotated[str, typer.Argument(help="The name of the process.")],
    folder: FolderOption = _FOLDER,
) -> None:
    """Revoke all certificates that were issued to a process so far, including certificates that
    were renewed since. The revocations are written to ca.pem. Services read a new ca.pem within
    seconds and close the process's connections.
    """
    count = _run(lambda library: library.revoke(folder, role, name))
    reported = {"role": role, "name": name, "revoked": count, "file": str(folder / "ca.pem")}
    print_answer(
        reported,
        f"{count} certificates of {role} {name} are revoked: copy {reported['file']} to the hosts of all processes",
    )


@certificates_app.command()
def show(
    files: Annotated[list[Path] | None, typer.Argument(help="Certificates; default: all.")] = None,
    folder: FolderOption = _FOLDER,
) -> None:
    """Print the process that each certificate is for, and when the certificate expires."""

    def described(library: Any) -> list[dict[str, Any]]:
        if not files and not (folder / "ca.pem").exists():
            raise FileNotFoundError(f"{folder} has no ca.pem: run `quorumlog certificates init`")
        named = files or sorted(set(folder.glob("*.pem")) - set(folder.glob("*-key.pem")))
        return [_row(file, library) for file in named]

    rows = _run(described)
    if not common_options().as_json:
        rows = [{**row, "hosts": ", ".join(row["hosts"]), "ends": row["ends"][:10]} for row in rows]
    print_rows(rows, _COLUMNS)


def _run(work: Callable[[Any], T]) -> T:
    """Run `work` with the certificate library. Raises: CertificateRefused."""
    library: Any = _import_library()
    try:
        return work(library)
    except library.CertificateRefused as refused:
        raise CertificateRefused(str(refused)) from None


def _import_library() -> ModuleType:
    try:
        # Imported here, because the import takes 0.1 s, and the other commands do not need it.
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


def _print_written(work: Callable[[Any], Path]) -> None:
    """Run `work`, which makes a certificate, and print the files of the certificate and its key."""

    def made(library: Any) -> dict[str, Any]:
        file = work(library)
        return {**_row(file, library), "key_file": str(library.key_file(file))}

    row = _run(made)
    print_answer(row, f"{row['file']} and {row['key_file']}, valid until {row['ends'][:10]}")


with_common_options(certificates_app, offline_options)
