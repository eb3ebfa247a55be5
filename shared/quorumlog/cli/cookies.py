"""`quorumlog bookie cookie …`: commands for cookies, which bind a bookie's name to its data.

A bookie whose directory does not match its cookie refuses to start, since it may have lost acknowledged
entries. These commands ask the metadata service, which stores the cookies: the bookie in question does
not run.
"""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote
from uuid import uuid4

import orjson
import typer

from quorumlog.cli.operator import ask, bare
from quorumlog.cli.printing import print_answer, print_object
from quorumlog.cli.session import parse_urls, run_async

app = typer.Typer(
    no_args_is_help=True,
    help="The data that a bookie's name stands for. Asks the metadata service.",
)

BookieArgument = Annotated[str, typer.Argument(help="The bookie's name, such as bookie-1.")]
MetadataOption = Annotated[
    str,
    typer.Option(
        "--metadata",
        envvar="METADATA_URLS",
        help="URLs of metadata services, separated by commas, as in the bookies' settings.",
    ),
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Compare with the cookie in this directory.")
]


@app.command()
def show(
    name: BookieArgument,
    metadata: MetadataOption,
    data_dir: DirectoryOption = None,
) -> None:
    """Print the registered cookie, and beside it the cookie in a directory."""
    row = _ask_metadata("GET", name, metadata)
    found = {"name": row["name"], "version": row["version"], **row["cookie"]}
    if data_dir is not None:
        local = _cookie_in(data_dir)
        found["directory"] = local
        found["matches"] = (
            local is not None
            and all(local[field] == row["cookie"][field] for field in ("incarnation", "instance"))
            and _is_own_marker(data_dir, local)
        )
    print_object(found)


@app.command()
def fix(name: BookieArgument, metadata: MetadataOption) -> None:
    """Permit a bookie's next start to continue without the entries that it lost: the bookie comes back
    as a new incarnation, which denies no entry until it is refilled from its peers. For one start only.
    """
    row = _ask_metadata("GET", name, metadata)
    if not row["cookie"]["may_fix"]:
        cookie = row["cookie"] | {"may_fix": True}
        body = {"cookie": cookie, "version": row["version"], "attempt": str(uuid4())}
        row = _ask_metadata("PUT", name, metadata, body)
    print_answer(
        row,
        f"{bare(name)} may start once without the entries that it lost, as incarnation"
        f" {row['cookie']['incarnation'] + 1} or later",
    )


@app.command()
def delete(name: BookieArgument, metadata: MetadataOption) -> None:
    """Remove a bookie from the list; refused while the bookie lives or any ledger names it. An empty
    directory may then register under the name, as a later incarnation.
    """
    _ask_metadata("DELETE", name, metadata)
    print_answer({"deleted": bare(name)}, f"{bare(name)} is removed from the list")


def _ask_metadata(method: str, name: str, metadata: str, body: dict[str, Any] | None = None) -> Any:
    urls = ",".join(parse_urls(metadata))
    path = f"/v1/bookies/{quote(bare(name))}/cookie"
    return run_async(lambda: ask(method, f"{urls}{path}", body))


def _is_own_marker(directory: Path, local: Any) -> bool:
    """Whether the cookie was written for this very directory, which is no copy (rule 15a)."""
    identity = local.get("identity")
    try:
        return identity is None or bool((directory / "marker").stat().st_ino == identity["inode"])
    except OSError:
        return False


def _cookie_in(directory: Path) -> Any:
    """The directory's own cookie, or None where no cookie can be read."""
    try:
        return orjson.loads((directory / "cookie.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
