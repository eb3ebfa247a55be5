"""`quorumlog bookie cookie …`: which data a bookie's name stands for, in the operator's hands.

A bookie whose directory does not match its cookie refuses to start, since it may have lost what it
acknowledged. These commands ask the metadata service, which keeps the cookies: the bookie they are
about does not run.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote
from uuid import uuid4

import orjson
import typer
from rich.console import Console

from quorumlog.cli.common import JsonOption, failed, print_json, print_object
from quorumlog.cli.operator import asked, bare
from quorumlog.errors import QuorumLogError

app = typer.Typer(
    no_args_is_help=True, help="Which data a bookie's name stands for. Asks the metadata service."
)

NameArgument = Annotated[str, typer.Argument(help="Its name, as bookie-1.")]
MetadataOption = Annotated[
    str,
    typer.Option(
        "--metadata", envvar="METADATA_URLS", help="URL of a metadata service, as bookies have it."
    ),
]
DirectoryOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Compare with what lies in this directory.")
]


@app.command()
def show(
    name: NameArgument,
    metadata: MetadataOption,
    data_dir: DirectoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the registered cookie, and the one in a directory beside it."""
    row = _ask("GET", name, metadata)
    found = {"name": row["name"], "version": row["version"], **row["cookie"]}
    if data_dir is not None:
        local = _local(data_dir)
        found["directory"] = local
        found["matches"] = (
            local is not None
            and all(local[field] == row["cookie"][field] for field in ("incarnation", "instance"))
            and _is_own_marker(data_dir, local)
        )
    print_object(found, as_json=as_json)


@app.command()
def fix(name: NameArgument, metadata: MetadataOption, as_json: JsonOption = False) -> None:
    """Let the next start of a bookie go on without what it lost: it comes back as a new
    incarnation, which denies nothing and is filled from its peers. For one start.
    """
    row = _ask("GET", name, metadata)
    if not row["cookie"]["may_fix"]:
        cookie = row["cookie"] | {"may_fix": True}
        body = {"cookie": cookie, "version": row["version"], "attempt": str(uuid4())}
        row = _ask("PUT", name, metadata, body)
    if as_json:
        print_json(row)
    else:
        Console(highlight=False).print(
            f"{bare(name)} may start without what it lost, once, as incarnation"
            f" {row['cookie']['incarnation'] + 1} or later",
            markup=False,
        )


@app.command()
def delete(name: NameArgument, metadata: MetadataOption, as_json: JsonOption = False) -> None:
    """List a bookie no more; refused while it lives or any ledger names it. An empty directory
    may then come under its name, as a later incarnation.
    """
    _ask("DELETE", name, metadata)
    if as_json:
        print_json({"deleted": bare(name)})
    else:
        Console(highlight=False).print(f"{bare(name)} is listed no more", markup=False)


def _ask(method: str, name: str, metadata: str, body: dict[str, Any] | None = None) -> Any:
    url = metadata.split(",", maxsplit=1)[0].rstrip("/")
    try:
        return asyncio.run(asked(method, f"{url}/v1/bookies/{quote(bare(name))}/cookie", body))
    except QuorumLogError as error:
        raise failed(error) from None


def _is_own_marker(directory: Path, local: Any) -> bool:
    """Whether the directory is the one that its cookie was written for, and no copy (rule 15a)."""
    identity = local.get("identity")
    try:
        return identity is None or bool((directory / "marker").stat().st_ino == identity["inode"])
    except OSError:
        return False


def _local(directory: Path) -> Any:
    """The directory's own cookie, or None where there is none that can be read."""
    try:
        return orjson.loads((directory / "cookie.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
