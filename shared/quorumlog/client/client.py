"""The client of a cluster: creates, finds, lists and deletes ledgers, logs and tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast
from urllib.parse import quote

from quorumlog.client import checks
from quorumlog.client.batching import Batching
from quorumlog.client.ledger import Ledger, created, with_password
from quorumlog.client.log import Log
from quorumlog.client.records import Paged
from quorumlog.client.shown import ClusterInfo
from quorumlog.client.transaction import Transaction
from quorumlog.client.transport import Transport

Shown = dict[str, Any]
"""A JSON object as the API returned it, including members that a newer server adds."""


class Client:
    """The client of one cluster's gateways. Use a client in `async with`: the end of the block
    waits for appends that are under way, or cancels them if the block raised an exception.
    """

    def __init__(
        self,
        *urls: str,
        token: str | Callable[[], str] | None = None,
        deadline_s: float = 60.0,
        batching: Batching | None = None,
        compression: str | None = None,
    ) -> None:
        """`urls`: one or more gateways, as http://host:port. When a gateway fails, the client uses
        the next gateway.

        `token`: an access token, if the gateways require tokens. For tokens that expire soon, pass
        a function that returns the current token: it is called for each request, and must not
        block. `deadline_s`: seconds for one call with all its retries. `batching`: how appends are
        batched. `compression`: `gzip` or `zstd` (which needs the extra `zstd`) compresses requests
        and responses, which pays off on a slow network.
        """
        self._transport = Transport(
            urls, deadline_s=deadline_s, token=token, compression=compression
        )
        self._batching = Batching() if batching is None else batching
        if not isinstance(self._batching, Batching):
            raise TypeError(f"batching must be a Batching, not {type(batching).__name__}")
        if self._batching.linger_ms >= deadline_s * 1000:
            raise ValueError("linger_ms must be shorter than deadline_s")

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self._transport.__aexit__(kind, *rest)

    async def create_ledger(
        self,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        digest: str | None = None,
        password: str | None = None,
        metadata: Mapping[str, str] | None = None,
        ledger_id: int | None = None,
        allow_degraded: bool | None = None,
    ) -> Ledger:
        """Create a ledger. The server chooses the values of arguments that are None. A retry of the
        request creates no second ledger. `ledger_id`: 2^52 or above; the cluster assigns lower ids.
        """
        with_password(password)  # raises for a password that could not be sent with later requests
        options = {
            "ensemble_size": ensemble_size,
            "write_quorum": write_quorum,
            "ack_quorum": ack_quorum,
            "digest": digest,
            "password": password,
            "metadata": metadata,
            "ledger_id": ledger_id,
            "allow_degraded": allow_degraded,
        }
        return self.ledger(await created(self._transport, options), password=password)

    def ledger(self, ledger_id: int, *, password: str | None = None) -> Ledger:
        """A handle of an existing ledger. Sends no request."""
        return Ledger(self._transport, ledger_id, password, self._batching)

    async def delete_ledger(self, ledger_id: int, *, password: str | None = None) -> None:
        """Delete a ledger with its entries. An open ledger is recovered first."""
        await self._transport.request(
            "DELETE",
            f"/v1/ledgers/{checks.offset('ledger_id', ledger_id)}",
            headers=with_password(password),
            # If a retry got 404, it would be unclear whether this call or another client deleted the ledger.
            is_repeatable=False,
        )

    def ledgers(
        self,
        *,
        state: str | None = None,
        bookie: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Paged[Shown]:
        """All ledgers that match the given filters, ordered by id."""
        named = {} if metadata is None else checks.texts("metadata", metadata)
        return self._paged(
            "ledgers",
            state=state,
            bookie=bookie,
            **{f"metadata[{key}]": named[key] for key in named},
        )

    async def create_log(
        self,
        name: str,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        digest: str | None = None,
        metadata: Mapping[str, str] | None = None,
        roll_bytes: int | None = None,
        roll_entries: int | None = None,
        roll_seconds: int | None = None,
        retention_bytes: int | None = None,
        retention_seconds: int | None = None,
        merge_below_bytes: int | None = None,
        cleanup_policy: str | None = None,
        min_compaction_lag_s: int | None = None,
        delete_retention_s: int | None = None,
        max_dirty_percent: int | None = None,
        batch_compression: str | None = None,
        deletion_protection: bool | None = None,
    ) -> Log:
        """Create a log, or return an existing log with the same settings. The server chooses the
        values of arguments that are None. `batch_compression`: `zstd` stores record batches
        compressed. `cleanup_policy`: `compact` keeps the newest record of each key.

        Raises: LogExists if the log exists with other settings.
        """
        settings = {
            "ensemble_size": ensemble_size,
            "write_quorum": write_quorum,
            "ack_quorum": ack_quorum,
            "digest": digest,
            "metadata": metadata,
            "roll_bytes": roll_bytes,
            "roll_entries": roll_entries,
            "roll_seconds": roll_seconds,
            "retention_bytes": retention_bytes,
            "retention_seconds": retention_seconds,
            "merge_below_bytes": merge_below_bytes,
            "cleanup_policy": cleanup_policy,
            "min_compaction_lag_s": min_compaction_lag_s,
            "delete_retention_s": delete_retention_s,
            "max_dirty_percent": max_dirty_percent,
            "batch_compression": batch_compression,
            "deletion_protection": deletion_protection,
        }
        path = f"/v1/logs/{quote(checks.text('name', name), safe='')}"
        await self._transport.call("PUT", path, settings)
        return self.log(name)

    def log(self, name: str, *, writer_token: int | None = None) -> Log:
        """A handle of an existing log. Sends no request. `writer_token`: from `Log.open`."""
        return Log(self._transport, name, writer_token, self._batching)

    async def begin(
        self,
        log: str,
        *,
        app: str | None = None,
        version: int | None = None,
        expires_in_s: int | None = None,
    ) -> Transaction:
        """Begin a transaction on a log. With `app` and `version`, all processes of that version
        share one transaction. If the shared transaction is COMMITTED (`info`), nothing is left to
        do.
        """
        wanted = {"log": log, "app": app, "version": version, "expires_in_s": expires_in_s}
        # Without an app, a retry may begin a second transaction. The first transaction then expires.
        shown = await self._transport.call("POST", "/v1/transactions", wanted)
        return self.transaction(str(shown["transaction"]))

    def transaction(self, transaction_id: str) -> Transaction:
        """A handle of an existing transaction. Sends no request."""
        return Transaction(self._transport, transaction_id)

    def logs(self, *, prefix: str | None = None) -> Paged[Shown]:
        """All logs, ordered by name. `prefix`: return only names that begin with this text."""
        return self._paged("logs", prefix=prefix)

    async def bookies(self) -> Sequence[Shown]:
        """All registered bookies with their state."""
        bookies: list[Shown] = (await self._transport.call("GET", "/v1/bookies"))["bookies"]
        return bookies

    async def cluster(self) -> ClusterInfo:
        """The state of every service, and the under-replicated ledgers."""
        return cast("ClusterInfo", await self._transport.call("GET", "/v1/cluster"))

    async def create_token(
        self,
        name: str,
        grants: Sequence[str],
        *,
        expires_in_s: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> Shown:
        """Create an access token. The secret is the member `token` of the result, and is never
        shown again.

        `quotas`: limits of the token at each gateway: `requests_per_s`, `bytes_per_s`,
        `connections`, `open_ledgers`.
        """
        wanted = {
            "name": checks.text("name", name),
            "grants": checks.names("grants", grants),
            "expires_in_s": expires_in_s,
            "quotas": quotas,
        }
        # If the response is lost, the token exists, but is useless because its secret is lost.
        return await self._transport.call("POST", "/v1/tokens", wanted)

    async def tokens(self) -> Sequence[Shown]:
        """All access tokens, without their secrets."""
        tokens: list[Shown] = (await self._transport.call("GET", "/v1/tokens"))["tokens"]
        return tokens

    async def revoke_token(self, token_id: str) -> None:
        """Revoke an access token. Raises: NoSuchToken."""
        path = f"/v1/tokens/{quote(checks.text('token_id', token_id), safe='')}"
        await self._transport.request("DELETE", path, is_repeatable=False)

    def audit(self, *, since: str | None = None, target: str | None = None) -> Paged[Shown]:
        """The audit trail, in order. `since`: a time in RFC 3339; `target`: for example `logs/events`."""
        return self._paged("audit", since=since, target=target)

    def consumers(self, *, log: str | None = None, prefix: str | None = None) -> Paged[Shown]:
        """The consumers of all logs, ordered by log and name, without their lags. `log`: return
        only this log's consumers, even if the log was deleted. `prefix`: return only names that
        begin with this text.
        """
        return self._paged("consumers", log=log, prefix=prefix)

    def _paged(self, kind: str, **only: str | None) -> Paged[Shown]:
        """Read a list of the API page by page. `only`: filters, as query parameters."""
        for name, value in only.items():
            checks.maybe_text(name, value)
        return Paged(self._transport.pages(f"/v1/{kind}", kind, {"limit": 1000, **only}))
