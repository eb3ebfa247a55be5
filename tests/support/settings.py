"""`python -m tests.support.settings`: the tables of settings, read off the models that read them.

Each service's `config.py` is the only place that knows its settings: names, defaults, bounds, and why. The
tables of docs/reference/settings.md are written from there, so that no setting can lack in them.
Without an argument the program prints the tables, `--write` puts them into the pages.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quorumlog.net.service import ServiceSettings
from quorumlog.net.settings import Described, describe
from services.autorecovery.config import Config as AutorecoverySettings
from services.bookie.config import Config as BookieSettings
from services.gateway.config import GatewaySettings
from services.local.config import LocalSettings
from services.metadata.config import Config as MetadataSettings

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "docs" / "reference" / "settings.md"
PAGES: Final = (GUIDE,)
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
    r"(<!-- settings: ([a-z ]+); `make docs` writes them -->\n).*?(<!-- end of the settings -->)",
    re.DOTALL,
)


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The settings of a service without those of all services."""
    shared = ServiceSettings.model_fields if model is not ServiceSettings else {}
    is_service = issubclass(model, ServiceSettings)
    return {
        name: field
        for name, field in model.model_fields.items()
        if not (is_service and name in shared)
    }


def table(model: type[BaseModel]) -> str:
    """A row for each setting."""
    own = {name.upper() for name in own_fields(model)}
    head = "| setting | type | default | unit | allowed | what |\n|---|---|---|---|---|---|\n"
    return head + "".join(_row(setting) for setting in describe(model) if setting.name in own)


def _row(setting: Described) -> str:
    default = setting.default
    if setting.kind not in ("number", "whole number", "switch") and default not in ("", "required"):
        default = f"`{default}`"
    cells = (
        f"`{setting.name}`",
        setting.kind,
        default,
        setting.unit,
        setting.allowed,
        setting.what,
    )
    return f"| {' | '.join(cells)} |\n"


def with_tables(page: str) -> str:
    """The page with the current tables."""
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
