"""The shared parts of the metadata service's routes: stores, parameters, bodies and responses.

Most operations only call one method of a store, and need no handler (`StoreRoutes.serve`).
"""

from collections.abc import Awaitable, Callable, Sequence
from inspect import signature
from typing import Any, Final, get_type_hints

import orjson
from aiohttp import web

from quorumlog.errors import InvalidRequest, UnsupportedMediaType
from quorumlog.net import audit, bodies, parameters
from quorumlog.net.bodies import T
from quorumlog.net.identity import Role
from quorumlog.net.operations import Routes
from quorumlog.net.settings import with_password
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.values import BOOKIE_NAME, LOG_NAME
from quorumlog.wire.bodies import SHOWN as SHOWN_PATTERN
from quorumlog.wire.bodies import CookieRow
from services.metadata.changes import ChangeHub
from services.metadata.config import Config
from services.metadata.cookies import CookieStore
from services.metadata.database import Database
from services.metadata.inquiry import Inquiry
from services.metadata.ledgers import LedgerStore
from services.metadata.liveness import Liveness
from services.metadata.logs import LogStore
from services.metadata.losses import KeptStore
from services.metadata.migrate import SealingStore
from services.metadata.rebuild import Rebuilder
from services.metadata.rebuild_store import RebuildStore
from services.metadata.repairs import LeaseStore, RepairSettingsStore, RepairStore
from services.metadata.tokens import AuditStore, TokenStore
from services.metadata.transactions import TransactionStore
from services.metadata.witnesses import WitnessStore


class MetadataParts:
    """The stores of a process, and the objects that query bookies and Redis."""

    def __init__(self, config: Config, database: Database) -> None:
        self.config = config
        self.liveness = Liveness(
            with_password(config.redis_url, config.redis_password),
            prefix=config.redis_prefix,
            deadline_s=config.redis_deadline_s,
        )
        self.cookies = CookieStore(database)
        self.inquiry = Inquiry(database, self.cookies, self.liveness, config.credentials)
        self.rebuild = RebuildStore(database)
        self.rebuilder = Rebuilder(self.rebuild, self.cookies, self.liveness, config.credentials)
        self.witnesses = WitnessStore(database, self.inquiry, self.rebuilder)
        self.audit = AuditStore(database, days=config.audit_days, rows_max=config.audit_rows_max)
        self.changes = ChangeHub(database)
        self.kept = KeptStore(database)
        self.leases = LeaseStore(database)
        self.ledgers = LedgerStore(database)
        self.logs = LogStore(database)
        self.repairs = RepairStore(database)
        self.repair_settings = RepairSettingsStore(database)
        self.sealing = SealingStore(database)
        self.tokens = TokenStore(database)
        self.transactions = TransactionStore(database)
        self.by_class = {type(part).__name__: part for part in vars(self).values()}


PARTS: Final = web.AppKey("parts", MetadataParts)

LEDGER_ID: Final = parameters.path_id("ledger_id", "The ledger.")
BOOKIE: Final = parameters.path_text(
    "name", BOOKIE_NAME, "The bookie's name, without an incarnation.", "bookie-1"
)
LOG: Final = parameters.path_text("name", LOG_NAME, "The log.", "events")
AFTER: Final = parameters.query_integer("after", 0, ID_MAX, "Only ledgers with ids above this id.")
LIMIT: Final = parameters.query_integer(
    "limit", 1, 10_000, "Maximum number of rows in the page.", 100
)
SHOWN: Final = parameters.query_text(
    "shown", SHOWN_PATTERN, "Only rows that these grants allow. Empty: no rows."
)
IF_MATCH: Final = parameters.header_version("The version of the row in the body, in quotes.")

LINES: Final = "application/x-ndjson"


Check = Callable[[web.Request, parameters.Given, Any], None]
"""Checks a body against the caller and the path. Raises: CallerRefused, InvalidRequest."""


class StoreRoutes(Routes):
    """Routes of a store. Most of them call a method of the store and need no handler (`serve`)."""

    def serve(
        self,
        key: str,
        does: Callable[..., Awaitable[object]],
        *given: parameters.Parameter[Any],
        roles: frozenset[Role],
        checks: Check | None = None,
        creates: Callable[[Any], str] | None = None,
        audited_as: str = "",
        is_audited_for_clients: bool = False,
    ) -> None:
        """Add a route that calls a store's method (`does`). The method gets the path's parameters
        by position, the given query parameters by name, and the body as `request`.

        The method's annotations are the types of body and response. The first sentence of the
        method's docstring is the operation's summary. `audited_as` is the operation's name in the
        audit log. Without a name, the operation is not audited. `checks` may reject the body. With
        `creates`, the route responds with 201, and `creates` derives the audit log's target from
        the body. Raises: TypeError if the method takes other arguments.
        """
        hints = get_type_hints(does)
        takes, gives = hints.get("request"), hints["return"]
        status = 204 if gives is type(None) else 200 if creates is None else 201
        called = {one.name: None for one in given if one.place == "query"} | (
            {} if takes is None else {"request": None}
        )
        own = ("self", "connection") if "connection" in hints else ("self",)
        of_path = [one.name for one in given if one.place == "path"]
        signature(does).bind(*own, *of_path, **called)
        store, _, method = does.__qualname__.partition(".")

        async def handle(request: web.Request, values: parameters.Given) -> web.Response:
            path = [values[one] for one in given if one.place == "path"]
            query = {one.name: values[one] for one in given if one.place == "query"}
            asked = {name: value for name, value in query.items() if value is not None}
            if takes is not None:
                body = asked["request"] = await parsed(request, takes)
                if checks is not None:
                    checks(request, values, body)
                if creates is not None:
                    audit.name_target(creates(body))
            do = getattr(request.app[PARTS].by_class[store], method)
            return answer(await do(*path, **asked), status)

        handle.__name__ = audited_as or does.__qualname__
        handle.__doc__ = " ".join((does.__doc__ or "").split()).partition(". ")[0]
        self.add(
            key,
            *given,
            roles=roles,
            takes=takes,
            gives=None if gives is type(None) else gives,
            status=status,
            is_audited=audited_as != "",
            is_audited_for_clients=is_audited_for_clients,
        )(handle)


async def parsed(request: web.Request, model: type[T]) -> T:
    """Parse the request's JSON body. Raises: the errors of `bodies.read`, InvalidRequest,
    UnsupportedMediaType.
    """
    if request.content_type not in {"application/json", "application/octet-stream"}:
        raise UnsupportedMediaType("Content-Type must be application/json: send this header")
    return bodies.parsed(await bodies.read(request), model)


def answer(value: object, status: int = 200) -> web.Response:
    """Create the response for a body, a row (with the version as ETag), or None (204)."""
    if value is None:
        return web.Response(status=204)
    headers = dict[str, str]()
    if isinstance(value, LedgerMetadata | LogMetadata | CookieRow):
        headers["ETag"] = f'"{value.version}"'
    return bodies.answer(value, status, **headers)


def check_changed(
    given: parameters.Given, row: LedgerMetadata | LogMetadata, is_of_path: bool
) -> None:
    """Check that path and `If-Match` match the row in the body. Raises: InvalidRequest."""
    if not is_of_path:
        raise InvalidRequest("/row: the id must be the same as in the path")
    if given[IF_MATCH] not in {None, row.version}:
        raise InvalidRequest("/header/If-Match: must be the same version as in the row")


def page_answer(name: str, page: tuple[Sequence[bytes], int | str | None]) -> web.Response:
    """Create the response for a page of rows in JSON, with the `after` of the next page."""
    rows, following = page
    return web.Response(
        body=b'{"%b":[%b],"next":%b}' % (name.encode(), b",".join(rows), orjson.dumps(following)),
        content_type="application/json",
    )
