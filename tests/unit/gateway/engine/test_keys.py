"""Passwords of ledgers whose keys nobody knows any more: rows made again from bookies' copies (rule 18d)."""

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quorumlog.errors import InvalidRequest, WrongPassword
from quorumlog.protocol.access_key import is_same, is_sealed, salt_and_digest, sealed
from quorumlog.protocol.changes import check_ledger
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire import row_copies
from services.gateway.engine import Engine
from services.gateway.engine.keys import Gatekeeper, LedgerKeys, new_keys, with_password

ROW = LedgerMetadata(7, Quorum(1, 1, 1), DigestKind.HMAC_SHA256, (Fragment(0, ("b1@1",)),))


def with_keys(digest: DigestKind) -> tuple[LedgerMetadata, LedgerKeys]:
    keys = new_keys("secret", digest)
    row = replace(ROW, digest=digest, mac_key=keys.mac_key, access_key=keys.access_key)
    return row, keys


@pytest.mark.parametrize("digest", [DigestKind.CRC32C, DigestKind.HMAC_SHA256])
def test_a_row_made_of_a_copy_opens_with_its_password_only(digest: DigestKind) -> None:
    row, keys = with_keys(digest)
    rebuilt = row_copies.decode(row_copies.encode(row))

    assert is_sealed(rebuilt.access_key)
    assert Gatekeeper().check(rebuilt, "secret").mac_key == keys.mac_key
    for wrong in (None, "other"):
        with pytest.raises(WrongPassword):
            Gatekeeper().check(rebuilt, wrong)


def test_a_row_learns_its_keys_once_and_from_its_password_only() -> None:
    row, _ = with_keys(DigestKind.HMAC_SHA256)
    rebuilt = row_copies.decode(row_copies.encode(row))
    learned = Gatekeeper().check(rebuilt, "secret")

    check_ledger(rebuilt, learned)
    for wrong in (
        replace(rebuilt, mac_key=b"m" * 32),
        replace(rebuilt, access_key=b""),
        replace(learned, access_key=b"s" * 48),
    ):
        with pytest.raises(InvalidRequest, match="can't be changed"):
            check_ledger(rebuilt, wrong)
    with pytest.raises(InvalidRequest, match="can't be changed"):
        check_ledger(learned, replace(learned, mac_key=b"m" * 32))


def test_a_copy_of_a_rebuilt_row_says_what_the_first_copy_said() -> None:
    row, _ = with_keys(DigestKind.HMAC_SHA256)
    copy = row_copies.encode(row)

    assert row_copies.encode(row_copies.decode(copy)) == copy


def test_a_copy_of_a_ledger_without_a_password_opens_to_everybody() -> None:
    rebuilt = row_copies.decode(row_copies.encode(ROW))

    assert rebuilt.access_key == b""
    assert Gatekeeper().check(rebuilt, None) == rebuilt


def test_only_the_very_access_key_is_the_same() -> None:
    known = b"s" * 16 + b"k" * 32
    unknown = sealed(*salt_and_digest(known))

    assert is_same(known, known)
    assert is_same(known, unknown)
    assert not is_same(b"s" * 16 + b"x" * 32, unknown)
    assert not is_same(b"t" * 16 + b"k" * 32, unknown)
    assert not is_sealed(known)
    assert salt_and_digest(b"") == (b"", b"")


def test_a_row_that_was_made_again_learns_the_mac_key_from_a_later_password() -> None:
    keys = new_keys("old", DigestKind.HMAC_SHA256)
    known = replace(ROW, digest=DigestKind.HMAC_SHA256, **asdict(keys))
    changed = with_password(with_password(known, "middle"), "new")

    made_again = row_copies.decode(row_copies.encode(changed))

    assert not made_again.mac_key
    assert Gatekeeper().check(made_again, "new").mac_key == keys.mac_key
    for wrong in ("old", "middle"):
        with pytest.raises(WrongPassword):
            Gatekeeper().check(made_again, wrong)


def test_a_row_made_again_is_opened_by_its_own_password_not_by_a_later_lost_one() -> None:
    """A rebuild found a copy from before the password was changed, and this gateway remembers the change."""
    keys = new_keys("old", DigestKind.HMAC_SHA256)
    known = replace(ROW, digest=DigestKind.HMAC_SHA256, **asdict(keys))
    lost = replace(with_password(known, "new"), version=known.version + 1)
    made_again = row_copies.decode(row_copies.encode(known))
    gatekeeper = Gatekeeper({known.ledger_id: lost}.get)

    assert gatekeeper.check(made_again, "old").mac_key == keys.mac_key
    with pytest.raises(WrongPassword):
        gatekeeper.check(made_again, "new")


class Changing:
    """A store whose row becomes another one before the first compare-and-swap."""

    def __init__(self, row: LedgerMetadata, other: LedgerMetadata) -> None:
        self.row, self._other = row, other

    async def fresh(self, _ledger_id: int) -> LedgerMetadata:
        return self.row

    async def cas(self, row: LedgerMetadata) -> tuple[CasStatus, LedgerMetadata]:
        self.row = self._other
        if row.version != self.row.version:
            return CasStatus.CONFLICT, self.row
        return CasStatus.OK, replace(row, version=row.version + 1)


async def allowed(store: Changing, password: str) -> LedgerMetadata:
    """The row for whoever has the ledger's password, by the shipped code."""
    engine = SimpleNamespace(rows=store, metadata=store, _gatekeeper=Gatekeeper())
    return await Engine._allowed(cast(Any, engine), ROW.ledger_id, password)


async def test_a_row_that_changes_while_it_learns_its_keys_is_judged_again() -> None:
    known, keys = with_keys(DigestKind.HMAC_SHA256)
    made_again = row_copies.decode(row_copies.encode(known))
    repaired = replace(made_again, version=made_again.version + 1)
    changed = replace(with_password(known, "new"), version=made_again.version + 1)

    learned = await allowed(Changing(made_again, repaired), "secret")
    assert (learned.mac_key, is_sealed(learned.access_key)) == (keys.mac_key, False)
    with pytest.raises(WrongPassword):
        await allowed(Changing(made_again, changed), "secret")
