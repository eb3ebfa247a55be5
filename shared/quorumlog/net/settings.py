"""Settings of a process, read from environment variables and, for secrets, from files.

A subclass of `Settings` is the only definition of its settings' names, defaults, bounds and
descriptions. `describe` lists these for the table in the docs (`make docs`) and for `--help`.
"""

import difflib
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, Self, get_args, get_origin
from urllib.parse import quote, urlsplit, urlunsplit

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, PrivateAttr, SecretStr, ValidationError
from pydantic.fields import FieldInfo

_NEAR: Final = 0.9
"""Similarity from which an unknown name counts as a misspelled setting: one letter in ten differs
(chosen by judgement)."""
_OPEN_TO_OTHERS: Final = stat.S_IRWXO | stat.S_IWGRP
_UNITS: Final = {
    r"_bytes_(per_s|s_min|s_max)$": "bytes/s",
    r"_bytes(_min|_max)?$": "bytes",
    r"_ms(_min|_max)?$": "ms",
    r"_s(_min|_max)?$": "s",
    r"_share(_min|_max)?$": "1 is all",
}
"""Units of settings, by patterns for the end of the name."""
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_KINDS: Final[Mapping[Any, str]] = {
    bool: "switch",
    int: "whole number",
    float: "number",
    Path: "path",
    SecretStr: "secret",
    str: "text",
}
_MUST_BE: Final = {
    "switch": "0 or 1",
    "whole number": "a whole number",
    "number": "a number",
    "choice": "one of",
}


class SettingsUnusable(SystemExit):
    """Ends the process with status 2. The message has a sentence for each invalid setting."""

    def __init__(self, faults: Iterable[str]) -> None:
        super().__init__("\n".join(faults))
        self.code = 2


class Settings(BaseModel):
    """The base class of all settings. Each field is the environment variable of the same name in
    capitals; the text below a field is its description.

    The value of a field of type SecretStr may also be in the file that `<NAME>_FILE` names.
    Invariant: neither a settings object nor an error shows a secret as text.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    _doubts: tuple[str, ...] = PrivateAttr(())
    _files: Mapping[str, Path] = PrivateAttr(default_factory=dict)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Warnings about settings, which do not prevent a start."""
        return self._doubts

    def file_of(self, name: str) -> Path | None:
        """The file from which a secret was read; None if the secret is from a variable."""
        return self._files.get(name)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings. Empty variables count as absent; commas separate the items of lists.
        Raises: SettingsUnusable.
        """
        faults: list[str] = []
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            try:
                text = _text_of(name, field, environ)
            except ValueError as error:
                faults.append(str(error))
                continue
            if text:
                is_list = kind_of(field) == "list"
                values[name] = [part.strip() for part in text.split(",")] if is_list else text
        known = {fault.partition(" ")[0] for fault in faults}
        read = None
        try:
            read = cls(**values)
        except ValidationError as error:
            found = (_sentence(cls, fault, environ) for fault in error.errors())
            faults += (fault for fault in found if fault.partition(" ")[0] not in known)
        if read is None or faults:
            sys.stderr.write("".join(f"{fault}\n" for fault in faults))
            raise SettingsUnusable(faults)
        read._doubts = tuple(_doubts_about(cls, environ))
        files = {name: environ.get(f"{name.upper()}_FILE", "") for name in _secrets_of(cls)}
        read._files = {name: Path(file) for name, file in files.items() if file}
        return read

    @classmethod
    def of_process(cls, program: str, environ: Mapping[str, str]) -> Self:
        """Read the settings. With arguments such as `--help`, handle these and end the process."""
        if len(sys.argv) > 1:
            command_line(program, cls)(prog_name=f"python -m {program}")
        return cls.read(environ)


@dataclass(frozen=True, slots=True)
class Described:
    """The description of a setting, for a table."""

    name: str
    kind: str
    """The type of the setting, in words."""
    default: str
    """The default as written in the environment; "required" if the setting must be set."""
    unit: str
    """The unit, or "" for a count, a name or a switch."""
    allowed: str
    """The bounds or the choices that the model declares."""
    what: str


def describe(model: type[BaseModel]) -> Iterator[Described]:
    """Yields the descriptions of all settings of a model, in order."""
    for name, field in model.model_fields.items():
        yield Described(
            name.upper(),
            kind_of(field),
            _default(name, field),
            unit_of(name),
            ", ".join(_bounds(field)) if kind_of(field) == "choice" else " ".join(_bounds(field)),
            field.description or "",
        )


def kind_of(field: FieldInfo) -> str:
    """The type of a setting, in words."""
    annotation = _annotation(field)
    if get_origin(annotation) is Literal:
        return "choice"
    return "list" if get_origin(annotation) is tuple else _KINDS[annotation]


def unit_of(name: str) -> str:
    """The unit of a setting, or "" for a count, a name or a switch."""
    return next((unit for end, unit in _UNITS.items() if re.search(end, name)), "")


def command_line(program: str, model: type[BaseModel], app: Any = None) -> Any:
    """A service's command line (`typer.Typer`), with `--help`, `--version` and `app`'s commands."""
    # Imported late, because most processes print no help, and the imports take 0.1 s.
    import typer  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from typer.core import TyperGroup  # noqa: PLC0415

    class Page(TyperGroup):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            Console(highlight=False).print(_page(model))

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"quorumlog {_installed()}")
            raise typer.Exit

    has_commands = app is not None
    commands: typer.Typer = app or typer.Typer(add_completion=False)

    @commands.callback(
        cls=Page,
        invoke_without_command=True,
        subcommand_metavar=None if has_commands else "",
        help=f"Run {program} with the settings of the environment, listed below."
        f" A secret may also be in a file that NAME_FILE names.\n\n{commands.info.help or ''}",
    )
    def main(
        _version: bool = typer.Option(
            False, "--version", is_eager=True, callback=show_version, help="Print the version."
        ),
    ) -> None:
        pass

    return commands


def _installed() -> str:
    try:
        return version("quorumlog")
    except PackageNotFoundError:
        return "from a folder, not installed"


def _page(model: type[BaseModel]) -> Any:
    """A table (of rich) with the name, type, default and description of each setting."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("setting", "type", "default", "what", title="Settings", title_justify="left")
    for one in describe(model):
        is_number = one.unit and one.default.replace(".", "").isdecimal()
        default = f"{one.default} {one.unit}" if is_number else one.default
        what = f"{one.what} ({one.allowed})" if one.allowed else one.what
        table.add_row(Text(one.name), one.kind, Text(default), Text(what.replace("`", "")))
    table.columns[0].no_wrap = True
    return table


def checked_url(url: SecretStr, schemes: Sequence[str]) -> SecretStr:
    """Return a database's URL, checked so that all parsers agree on its parts. Otherwise a driver
    might take a password for a host, and show it in an error. Raises: ValueError, without parts of
    the URL.
    """
    try:
        parts = urlsplit(url.get_secret_value())
        login, _, servers = parts.netloc.rpartition("@")
        for server in servers.split(","):
            _ = urlsplit(f"//{server}").port
        is_usable = parts.scheme in schemes and "@" not in login + parts.path + parts.query
        is_usable = is_usable and not parts.fragment
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError(
            f"must have the form {schemes[0]}://USER:PASSWORD@HOST:PORT/DATABASE; in a user and a password,"
            " write characters such as @ : / # ? as %40 %3A %2F %23 %3F"
        )
    return url


def with_password(url: SecretStr, password: SecretStr | None) -> str:
    """A database's URL, with `password` inserted if the URL has none."""
    text = url.get_secret_value()
    parts = urlsplit(text)
    login, _, servers = parts.netloc.rpartition("@")
    if password is None or ":" in login:
        return text
    login += f":{quote(password.get_secret_value(), safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{servers}"))


def _annotation(field: FieldInfo) -> Any:
    """The type of a setting; for an optional setting, the type without None."""
    types = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    is_optional = NoneType in get_args(field.annotation)
    return types[0] if is_optional and len(types) == 1 else field.annotation


def _text_of(name: str, field: FieldInfo, environ: Mapping[str, str]) -> str:
    """A setting's text from its variable, or from the file of a secret. Raises: ValueError."""
    text, file = environ.get(name.upper(), ""), environ.get(f"{name.upper()}_FILE", "")
    if kind_of(field) != "secret" or not file:
        return text
    if text:
        raise ValueError(f"{name.upper()} and {name.upper()}_FILE are both set: set one of them")
    try:
        return Path(file).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ValueError(f"{name.upper()}_FILE = {file!r}: {why}") from None


def _doubts_about(model: type[BaseModel], environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings about probably misspelled settings, and secret files that other users can read."""
    fields = {name.upper(): field for name, field in model.model_fields.items()}
    secrets = {f"{name.upper()}_FILE" for name in _secrets_of(model)}
    known = {*fields, *secrets}
    given = [
        name for name, value in environ.items() if value
    ]  # `make` exports names without a value
    for name in given:
        if name in known:
            continue
        if meant := next((other for other in sorted(known) if is_near(name, other)), None):
            yield f"{name} is not a setting: did you mean {meant}?"
    for name in sorted(secrets | {name for name in fields if name.endswith("KEY_FILE")}):
        if (file := environ.get(name)) and Path(file).stat().st_mode & _OPEN_TO_OTHERS:
            yield f"{name} = {file!r}: every user of this machine may read or change the file: chmod 600"


def is_near(name: str, other: str) -> bool:
    """Whether `name` may be a misspelled `other`, such as `PROT`, `PRT` or `PORTT` for `PORT`. A
    plural does not count, because it may be a setting of another service.
    """
    is_one_letter = abs(len(name) - len(other)) == 1 and len(other) < 6
    least = 0.85 if is_one_letter and name.rstrip("S") != other.rstrip("S") else _NEAR
    likeness = difflib.SequenceMatcher(None, other, name).ratio()
    return sorted(name) == sorted(other) or likeness >= least


def _secrets_of(model: type[BaseModel]) -> Iterator[str]:
    return (name for name, field in model.model_fields.items() if kind_of(field) == "secret")


def _sentence(model: type[BaseModel], fault: Any, environ: Mapping[str, str]) -> str:
    why = str(fault.get("ctx", {}).get("error", fault["msg"]))
    if not fault["loc"]:
        return why  # about several settings: their values are not shown, since some are secret
    name, field = fault["loc"][0].upper(), model.model_fields[fault["loc"][0]]
    if fault["type"] == "missing":
        is_secret = kind_of(field) == "secret"
        return f"{name} is not set{f', nor {name}_FILE' if is_secret else ''}: {field.description}"
    shown = f"{name} = {fault.get('input')!r}"
    if kind_of(field) == "secret":
        file = environ.get(f"{name}_FILE")
        shown = f"{name}_FILE = {file!r}" if file else name
    if fault["type"] != "value_error" and (words := _MUST_BE.get(kind_of(field))):
        return " ".join((f"{shown}: must be {words}", *_bounds(field)))
    return f"{shown}: {why}"


def _default(name: str, field: FieldInfo) -> str:
    value: Any = field.default
    if field.is_required():
        return "required"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return f"{value:.15g}{_size(value) if 'bytes' in name else ''}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    # The default of a secret is not shown.
    return "" if value is None or isinstance(value, SecretStr) else str(value)


def _size(value: float) -> str:
    for size, name in _SIZES:
        if value >= size and value % size == 0:
            return f" ({value // size:g} {name})"
    return ""


def _bounds(field: FieldInfo) -> list[str]:
    if kind_of(field) == "choice":
        return [str(value) for value in get_args(_annotation(field))]
    words = {Ge: "from", Gt: "above", Le: "to", Lt: "below"}
    return [
        f"{word} {getattr(bound, kind.__name__.lower()):.15g}"
        for kind, word in words.items()
        for bound in field.metadata
        if isinstance(bound, kind)
    ]
