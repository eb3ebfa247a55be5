"""`python -m tests.support.settings`: the tables of settings, read off the models that read them.

Each service's `config.py` is the only place that knows its settings: names, defaults, bounds, and why. The
tables of README.md and docs/guides/settings.md are written from there, so that no setting can lack in them.
Without an argument the program prints the tables, `--write` puts them into the pages.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quorumlog.net.service import ServiceSettings
from services.autorecovery.config import Config as AutorecoverySettings
from services.bookie.config import Config as BookieSettings
from services.gateway.config import GatewaySettings
from services.local.config import LocalSettings
from services.metadata.config import Config as MetadataSettings

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "docs" / "guides" / "settings.md"
PAGES: Final = (ROOT / "README.md", GUIDE)
MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "local": LocalSettings,
    "all services": ServiceSettings,
    "gateway": GatewaySettings,
    "bookie": BookieSettings,
    "metadata": MetadataSettings,
    "autorecovery": AutorecoverySettings,
}
"""By the name that stands in the marks around a table."""

_TABLE: Final = re.compile(
    r"(<!-- settings: ([a-z ]+); `make settings` writes them -->\n).*?(<!-- end of the settings -->)",
    re.DOTALL,
)
_UNITS: Final = {
    r"_bytes_(per_s|s_min|s_max)$": "bytes/s",
    r"_bytes(_min|_max)?$": "bytes",
    r"_ms(_min|_max)?$": "ms",
    r"_s(_min|_max)?$": "s",
    r"_share(_min|_max)?$": "1 is all",
}
"""What the end of a name says (style: numbers carry their unit in the name)."""
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The settings of a service without those of all services."""
    shared = ServiceSettings.model_fields if model is not ServiceSettings else {}
    is_service = issubclass(model, ServiceSettings)
    return {
        name: field
        for name, field in model.model_fields.items()
        if not (is_service and name in shared)
    }


def unit(name: str) -> str:
    """The unit of a setting, or "" for a count, a name or a switch."""
    return next((unit for end, unit in _UNITS.items() if re.search(end, name)), "")


def default(name: str, field: FieldInfo) -> str:
    """What holds where the setting is absent, as one would write it."""
    value: Any = field.default
    if field.is_required():
        return "required"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return f"{value:.15g}{_size(value) if 'bytes' in name else ''}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{value}`" if str(value) else ""


def _size(value: float) -> str:
    for size, name in _SIZES:
        if value >= size and value % size == 0:
            return f" ({value // size:g} {name})"
    return ""


def allowed(field: FieldInfo) -> str:
    """The values that a setting takes, as far as the model bounds them."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    if field.annotation is bool:
        return "0, 1"
    words = {Ge: "from", Gt: "above", Le: "to", Lt: "below"}
    bounds = [
        f"{word} {getattr(bound, kind.__name__.lower()):.15g}"
        for kind, word in words.items()
        for bound in field.metadata
        if isinstance(bound, kind)
    ]
    if str(field.annotation).startswith("tuple"):
        return "a list with commas"
    return " ".join(bounds)


def table(model: type[BaseModel]) -> str:
    """A row for each setting."""
    rows = [
        (f"`{name.upper()}`", default(name, field), unit(name), allowed(field), field.description)
        for name, field in own_fields(model).items()
    ]
    head = "| setting | default | unit | allowed | what |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(str(cell or '') for cell in row)} |\n" for row in rows)


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(MODELS[found[2]])}\n{found[3]}", page)


def tables_in(page: str) -> Iterator[str]:
    """The names of a page's tables."""
    for found in _TABLE.finditer(page):
        yield found[2]


def main() -> int:
    """Print the tables, or write the pages."""
    if sys.argv[1:] == ["--write"]:
        for page in PAGES:
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for name, model in MODELS.items():
            sys.stdout.write(f"{name}\n\n{table(model)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
