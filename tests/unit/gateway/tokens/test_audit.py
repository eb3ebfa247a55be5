"""The audit log of gateways: who changed what is kept with the change, and each answer is a line."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loadtest.stores import StoreServers
from tests.support.scopes import PAGE, operations
from tests.unit.gateway.tokens.support import Guarded, guarded

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh()) as found:
        yield found


async def audit(gateways: Guarded, target: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await gateways.done("GET", f"/v1/audit?target={target}"))["audit"]
    return rows


def lines(caplog: pytest.LogCaptureFixture, **wanted: object) -> list[Any]:
    """Lines of the audit log with these fields."""
    return [
        record
        for record in caplog.records
        if record.name == "audit" and wanted.items() <= record.__dict__.items()
    ]


async def test_who_changed_a_log_is_kept_with_each_change(gateways: Guarded) -> None:
    secret, token_id = await gateways.token("admin:logs/kept")
    elsewhere = {
        "X-Forwarded-For": "192.0.2.7",
        "Forwarded": "for=192.0.2.7",
        "X-Real-IP": "192.0.2.7",
    }
    for method, path, body in (
        ("PUT", "/v1/logs/kept", {}),
        ("POST", "/v1/logs/kept/records", {"text": "a record"}),
        ("POST", "/v1/logs/kept/roll", None),
        ("POST", "/v1/logs/kept/truncate", {"before": 1}),
        ("DELETE", "/v1/logs/kept", None),
    ):
        answer = await gateways.ask(secret, method, path, body, headers={**elsewhere})
        assert answer.status < 300

    rows = await audit(gateways, "logs/kept")

    assert [row["operation"] for row in rows] == ["putLog", "truncateLog", "deleteLog"]
    assert {row["who"] for row in rows} == {f"the token a test ({token_id})"}
    assert {row["remote"] for row in rows} == {"127.0.0.1"}, "whatever the client says"
    assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)


async def test_a_refused_change_is_a_line_and_no_row(
    gateways: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    secret, token_id = await gateways.token("read:*")
    await gateways.log("refused")

    assert (await gateways.ask(secret, "DELETE", "/v1/logs/refused")).status == 403
    assert (await gateways.ask(None, "DELETE", "/v1/logs/refused")).status == 401
    assert (await gateways.ask(gateways.admin, "DELETE", "/v1/logs/none")).status == 404

    rows = await audit(gateways, "logs/refused")
    assert [row["operation"] for row in rows] == ["putLog"]
    assert await audit(gateways, "logs/none") == []
    [forbidden] = lines(caplog, target="logs/refused", status=403)
    assert (forbidden.msg, forbidden.code) == ("deleteLog", "forbidden")
    assert forbidden.who == f"the token a test ({token_id})"
    assert len(lines(caplog, target="logs/refused", status=401, who="anonymous")) == 1
    assert len(lines(caplog, target="logs/none", status=404, code="no-such-log")) >= 1


async def test_tokens_are_named_and_their_secrets_are_not(
    gateways: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    made = await gateways.done("POST", "/v1/tokens", {"name": "new", "grants": ["read:*"]})
    await gateways.done("DELETE", f"/v1/tokens/{made['id']}")

    rows = await audit(gateways, f"tokens/{made['id']}")

    assert [row["operation"] for row in rows] == ["createToken", "revokeToken"]
    assert len(lines(caplog, target=f"tokens/{made['id']}", status=201)) >= 1
    assert made["token"] not in str(rows)
    assert made["token"] not in caplog.text


async def test_the_first_use_of_a_password_and_each_wrong_one_are_lines(
    gateways: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    made = await gateways.done("POST", "/v1/ledgers", {"password": "right-4711"})
    entries, target = f"/v1/ledgers/{made['ledger_id']}/entries", f"ledgers/{made['ledger_id']}"

    for password in ("right-4711", "right-4711", "wrong-4711"):
        headers = {"Ledger-Password": password}
        await gateways.ask(gateways.admin, "POST", entries, {"text": "a"}, headers=headers)

    opened = lines(caplog, target=target)
    assert [(line.msg, line.status, line.code) for line in opened] == [
        ("openLedger", 200, ""),
        ("openLedger", 403, "wrong-password"),
    ]
    assert all("the token" in line.who for line in opened)
    assert "4711" not in caplog.text
    assert await audit(gateways, target) == []


async def test_the_audit_log_is_for_admins_of_everything(gateways: Guarded) -> None:
    secret, _ = await gateways.token("admin:logs/*", "read:*")

    assert (await gateways.ask(secret, "GET", "/v1/audit")).status == 403
    assert (await gateways.ask(gateways.admin, "GET", "/v1/audit?since=yesterday")).status == 422


async def test_a_target_that_is_too_long_is_cut(
    gateways: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await gateways.ask(gateways.admin, "DELETE", f"/v1/logs/{'x' * 1000}")

    assert answer.status == 422
    assert len(lines(caplog, target=f"logs/{'x' * 295}", status=422)) == 1


async def test_the_whole_name_of_a_stream_is_kept(gateways: Guarded) -> None:
    html = {"Content-Type": "text/plain"}
    for path in ("chat/42", "chat/43", "x%00y", "xy", "%63hat/44"):
        answer = await gateways.ask(
            gateways.admin, "PUT", f"/v1/stream/{path}", headers={**html}, body=b"a"
        )
        assert answer.status == 201
    await gateways.done("DELETE", "/v1/stream/chat/42")

    async def operations(target: str) -> list[str]:
        return [row["operation"] for row in await audit(gateways, target)]

    assert await operations("stream/chat/42") == ["createStream", "deleteStream"]
    for target in ("stream/chat/43", "stream/x%2500y", "stream/xy", "stream/chat/44"):
        assert await operations(target) == ["createStream"], target


async def test_a_commit_that_overwrites_is_kept_and_no_other_one(
    gateways: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    await gateways.log("overwritten")
    for overwrite in (False, True):
        body: dict[str, Any] = {"ledgers": [], "overwrite": overwrite}
        begun = await gateways.done("POST", "/v1/transactions", {"log": "overwritten"})
        path = f"/v1/transactions/{begun['transaction']}"
        await gateways.done("POST", f"{path}/commit", body)
    begun = await gateways.done("POST", "/v1/transactions", {"log": "overwritten"})
    await gateways.done("POST", f"/v1/transactions/{begun['transaction']}/abort")

    rows = await audit(gateways, "logs/overwritten")
    aborted = await audit(gateways, f"transactions/{begun['transaction']}")

    assert [row["operation"] for row in rows] == ["putLog", "commitTransaction"]
    assert [row["operation"] for row in aborted] == ["abortTransaction"]
    assert len([one for one in lines(caplog) if one.msg == "commitTransaction"]) == 1


async def test_the_guide_lists_the_operations_that_are_audited() -> None:
    guide = (PAGE.parents[1] / "guides" / "audit.md").read_text()
    row = next(line for line in guide.splitlines() if line.startswith("| a gateway |"))

    reported = set(re.findall(r"`(\w+)`", row))

    assert reported == {one.name for one in operations() if one.is_audited} | {"openLedger"}
