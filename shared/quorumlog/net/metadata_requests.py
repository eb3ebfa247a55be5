"""Sends requests to the metadata service, with fail-over, deadlines, and certain outcomes.

Each call tries the services in turn until one answers or the call's deadline passes. A change
carries an attempt token, so the client can repeat a try whose answer was lost, and gets the outcome
of the first try (rule 6).

The client also remembers witnesses (proofs of acknowledged changes). The client presents these
witnesses with each change, and with each read before a deletion (rule 18a).
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from http.client import NO_CONTENT
from typing import Final, Never, TypeVar
from uuid import uuid4

import aiohttp
import orjson
from pydantic import ValidationError

from quorumlog import errors, header
from quorumlog.net import audit
from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.timers import awake, awake_timeout
from quorumlog.wire import bodies
from quorumlog.wire.outgoing import outgoing
from quorumlog.wire.problems import from_answer

T = TypeVar("T")

_TRY_S: Final = 3.0
"""Timeout of one try. The service answers within 2 s, even if its databases do not respond."""
_TRY_S_MIN: Final = 0.05
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None)
"""aiohttp's timeout is off, since its timers continue while this process is suspended."""
_DEADLINE_S: Final = 10.0
_PAUSE_S: Final = (0.02, 1.0)
"""Shortest and longest pause between rounds over the services; the pause doubles, with jitter."""
_SILENCE_S: Final = 15.0
"""Silence of three heartbeats, after which a stream of changes counts as broken."""
_WITNESSES_MAX: Final = 10 * bodies.WITNESSES_MAX
"""Maximum number of remembered witnesses, above the number of changes in flight (by judgement)."""
_LINE_BYTES_MAX: Final = 1 << 16
_SERVER: Final = ExpectedServer(Role.METADATA)

_jitter = random.SystemRandom()


def new_attempt() -> str:
    """A new token for one change (rule 6)."""
    return str(uuid4())


class _Unsettled(Exception):
    """A try ended without a decision. `outcome`: whether the change may have been made."""

    def __init__(self, outcome: errors.Outcome, why: str, *, is_busy: bool = False) -> None:
        super().__init__(why)
        self.outcome, self.is_busy = outcome, is_busy


class MetadataRequests:
    """Sends requests to one of several interchangeable metadata services.

    Invariant: the client never abandons a change that may have reached a service. A caller that
    cancels a call must treat the outcome as unknown.
    """

    def __init__(
        self,
        urls: Sequence[str],
        session: aiohttp.ClientSession | None = None,
        *,
        credentials: Credentials = ANONYMOUS,
        deadline_s: float = _DEADLINE_S,
        try_s: float = _TRY_S,
    ) -> None:
        """If no `session` is given, the client opens one with `credentials`."""
        if not urls:
            raise ValueError("`urls` must contain the URL of at least one metadata service")
        self.urls = [url.rstrip("/") for url in urls]
        self._current = 0
        self._given, self._credentials = session, credentials
        self._own: aiohttp.ClientSession | None = None
        self._deadline_s = deadline_s
        self._try_s = try_s
        self.witnesses: tuple[str, ...] = ()
        """The witnesses that the database must contain, by the latest answers (rule 18a). A
        service's answer replaces the witnesses that the request presented."""

    async def close(self) -> None:
        """Close the session, unless the caller provided it."""
        if self._own is not None:
            await self._own.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = service_session(self._credentials)
        return self._own

    def _turn(self, failed: int) -> None:
        """Switch to the next service, unless another call has switched already."""
        if self._current == failed:
            self._current = (failed + 1) % len(self.urls)

    def _remember(self, witnesses: Iterable[str]) -> None:
        """Add `witnesses` to the remembered witnesses. Above the maximum, drop the oldest witnesses."""
        self.witnesses = tuple(dict.fromkeys((*self.witnesses, *witnesses)))[-_WITNESSES_MAX:]

    async def ask(
        self,
        method: str,
        path: str,
        body: bodies.Body | None = None,
        *,
        gives: type[T],
        query: Mapping[str, str] | None = None,
        settles: bool = False,
        proof: bool = False,
    ) -> T:
        """Retry until a service decides; return the parsed answer, or raise the service's error.

        With `settles`, the deadline no longer applies once a try may have arrived; then only a
        decision ends the call. With `proof`, an answer counts only if the snapshot that it was read
        from contained the remembered witnesses (rule 18a).
        """
        if proof and not self.witnesses:
            await self.confirm()
        clock = awake()
        end = clock.time() + self._deadline_s
        data = None if body is None else bodies.json_of(body)
        outcome: errors.Outcome = errors.NOT_DONE
        pause_s = _PAUSE_S[0]
        tries = 0
        while True:
            current = self._current
            left_s = max(end - clock.time(), _TRY_S_MIN)
            # Don't shorten a change's timeout, which would only make the outcome unknown.
            limit_s = min(self._try_s, left_s) if method == "GET" else self._try_s
            try:
                url = self.urls[current] + path
                return await self._try(url, method, data, gives, query, limit_s, proof=proof)
            except errors.DatabaseWentBack as error:
                # Present the lost changes to the next service: it may not have noticed the loss (rule 18a).
                named = error.members.get("witnesses")
                self._remember(bodies.witnesses_from_header(",".join(named or ())))
                self._turn(current)
                # If an earlier try may have made the change, continue until it is settled (rule 6).
                if not (settles and outcome == errors.UNKNOWN):
                    raise error.with_outcome(outcome) from error
                why, is_busy = error.detail, False
            except _Unsettled as error:
                why, is_busy = str(error), error.is_busy
                if error.outcome == errors.UNKNOWN:
                    outcome = errors.UNKNOWN
            self._turn(current)
            tries += 1
            if clock.time() >= end and not (settles and outcome == errors.UNKNOWN):
                away = errors.MetadataBusy if is_busy else errors.MetadataUnavailable
                raise away(why, outcome=errors.NOT_DONE if method == "GET" else outcome)
            if tries % len(self.urls) == 0:
                await asyncio.sleep(_jitter.uniform(pause_s / 2, pause_s))
                pause_s = min(pause_s * 2, _PAUSE_S[1])

    async def _try(
        self,
        url: str,
        method: str,
        data: bytes | None,
        gives: type[T],
        query: Mapping[str, str] | None,
        limit_s: float,
        *,
        proof: bool,
    ) -> T:
        headers = dict[str, str]()
        if data is not None:
            headers["Content-Type"] = "application/json"
        presented = self.witnesses[-bodies.WITNESSES_MAX :] if proof or method != "GET" else ()
        if method != "GET" and (audited := audit.current()) is not None:
            headers[header.AUDITED] = audited.body.to_header()
        if presented:
            headers[header.WITNESSES] = bodies.witnesses_to_header(presented)
        try:
            async with (
                awake_timeout(limit_s),
                self._session.request(
                    method,
                    url,
                    data=outgoing(data),
                    params=query,
                    headers=headers,
                    timeout=_NO_TIMEOUT,
                    ssl=_SERVER,
                ) as response,
            ):
                answered = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _Unsettled(errors.NOT_DONE, f"{url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Unsettled(errors.UNKNOWN, f"{url}: {error!r}") from error
        witnesses = bodies.witnesses_from_header(response.headers.get(header.WITNESSES, ""))
        is_proven = bool(presented and witnesses)
        if witnesses:
            kept = (witness for witness in self.witnesses if witness not in presented)
            self.witnesses = tuple(kept)
            self._remember(witnesses)
        found, problem = None, None
        if response.status < 400:
            found = _parsed(gives, response.status, answered)
            if found is None:
                # A program between this process and the service has answered instead (rule 4).
                raise _Unsettled(errors.UNKNOWN, f"{url}: another program answered: check the URL")
        else:
            problem = from_answer(response.status, answered, response.headers)
            if isinstance(problem, errors.DatabaseWentBack):
                raise problem
            if not _is_verdict(problem):
                raise _Unsettled(
                    problem.outcome,
                    f"{url}: {problem.code}: {problem.detail}",
                    is_busy=isinstance(problem, errors.MetadataBusy),
                )
        if proof and not is_proven:
            raise _Unsettled(errors.NOT_DONE, f"{url}: no proof that the database did not go back")
        if found is not None:
            return found
        assert problem is not None
        raise problem

    async def confirm(self) -> None:
        """Make a service check the witnesses. Raises: DatabaseWentBack, MetadataUnavailable."""
        await self.ask("POST", "/v1/witnesses", gives=bodies.WitnessState)

    async def confirm_copies(self, witnesses: Sequence[str], holder: str) -> None:
        """Make a service check the witnesses of a bookie's copies of metadata. The client remembers
        only witnesses that the database lacks (rule 18c).
        """
        body = bodies.CopyWitnesses(witnesses=tuple(witnesses), holder=holder)
        await self.ask("POST", "/v1/witnesses/copies", body, gives=bodies.WitnessState)

    async def keep_confirmed(self, every_s: float) -> Never:
        """Call `confirm` every `every_s` seconds for ever, so that all services receive the witnesses."""
        while True:
            # If the database went back, the service itself reports it.
            with contextlib.suppress(errors.QuorumLogError):
                await self.confirm()
            await asyncio.sleep(every_s)

    async def changes(self) -> AsyncGenerator[bodies.Change]:
        """Yield changes as they are committed, for ever, without the heartbeats.

        The first change is a `gap`. Another `gap` follows if changes may have been missed: metadata
        read before a `gap` may be outdated.
        """
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, OSError):
                async with contextlib.aclosing(self._stream(self.urls[self._current])) as stream:
                    async for change in stream:
                        yield change
            self._turn(self._current)
            await asyncio.sleep(_jitter.uniform(0.1, 1.0))

    async def own_services(self) -> Sequence[bodies.ServiceInfo]:
        """The configured metadata services, each `ready`, `not-ready`, or `lost` (silent)."""

        async def asked(url: str) -> bodies.ServiceInfo:
            state = "lost"
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    asyncio.timeout(self._try_s),
                    self._session.get(f"{url}/health/ready", ssl=_SERVER) as answer,
                ):
                    state = "ready" if answer.status == 200 else "not-ready"
            return bodies.ServiceInfo(
                kind="metadata", id=url.partition("://")[2], url=url, state=state
            )

        return await asyncio.gather(*map(asked, self.urls))

    async def _stream(self, url: str) -> AsyncGenerator[bodies.Change]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TRY_S, sock_read=_SILENCE_S)
        async with self._session.get(
            f"{url}/v1/changes", timeout=timeout, read_bufsize=_LINE_BYTES_MAX, ssl=_SERVER
        ) as response:
            if response.status != 200:
                return
            async for line in response.content:
                change = _change_of(line)
                if change.kind == "hello":
                    change = bodies.Change(kind="gap")
                if change.kind != "heartbeat":
                    yield change


def _change_of(line: bytes) -> bodies.Change:
    """Parse a line of the stream of changes. A line with a kind or a state of a later release
    becomes a `gap`. Raises: ValueError if the line is not a JSON object.
    """
    try:
        return bodies.received(bodies.Change, line)
    except ValidationError:
        if not isinstance(orjson.loads(line), dict):
            raise
        return bodies.Change(kind="gap")


def query_of(**parameters: str | int | None) -> dict[str, str]:
    """A query with the parameters that are not None."""
    return {name: str(value) for name, value in parameters.items() if value is not None}


def shown_in(shown: Sequence[str] | None) -> dict[str, str]:
    """A query with the names that a list may contain (`wire/bodies.py`, SHOWN)."""
    return {} if shown is None else {"shown": ",".join(shown)}


def current_of(error: errors.QuorumLogError, model: type[T]) -> T:
    """The current metadata, from the error of a failed compare-and-swap."""
    return bodies.received(model, orjson.dumps(error.members["current"]))


def _parsed(gives: type[T], status: int, answered: bytes) -> T | None:
    """The parsed answer, or None if the service did not send it. An empty body, which may be a
    proxy's, counts only with a 204.
    """
    if gives is bodies.Body:
        return gives() if status == NO_CONTENT and not answered else None
    try:
        return bodies.received(gives, answered)
    except ValidationError:
        return None


def _is_verdict(error: errors.QuorumLogError) -> bool:
    """Whether an error is a decision about the request. Other errors lead to a retry."""
    if isinstance(
        error, errors.RouteNotFound | errors.ForeignHost | errors.Unauthenticated | errors.Forbidden
    ):
        # Another service answers at this address, or the service rejects this process's own
        # credentials. Neither is a decision about the request of this process's caller.
        return False
    return type(error) is not errors.QuorumLogError and error.status < 500 and not error.retryable
