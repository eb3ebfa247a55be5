"""The sync SDK is generated from the async one, name for name."""

import inspect

import pytest

from quorumlog import client
from quorumlog.client import shown, sync
from services.gateway.edge import consumer_models, log_models, models
from setup import SYNC, generated


def test_the_sync_sdk_is_generated_from_the_async_one_as_it_is_now() -> None:
    assert SYNC.read_text() == generated(), "run `make setup`"


@pytest.mark.parametrize(
    "name", ["Client", "Ledger", "Log", "Producer", "Transaction", "TransactionLedger"]
)
def test_both_have_the_same_names_with_the_same_parameters(name: str) -> None:
    of_async, of_sync = getattr(client, name), getattr(sync, name)
    names = [n for n, _ in inspect.getmembers(of_async, inspect.isfunction) if n[0] != "_"]

    assert names
    for method in names:
        parameters = inspect.signature(getattr(of_async, method)).parameters
        assert inspect.signature(getattr(of_sync, method)).parameters == parameters, method
    assert set(sync.__all__) == set(client.__all__) - {"Paged"}


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        (shown.LogInfo, log_models.Log),
        (shown.LogSettingsInfo, log_models.LogSettingsModel),
        (shown.LogLedgerInfo, log_models.LogLedger),
        (shown.LedgerInfo, models.Ledger),
        (shown.FragmentInfo, models.FragmentModel),
        (shown.WriterInfo, models.WriterModel),
        (shown.ConsumerInfo, consumer_models.ConsumerModel),
        (shown.LeaseInfo, consumer_models.LeaseModel),
        (shown.LagInfo, consumer_models.LagModel),
        (shown.BookieInfo, models.Bookie),
    ],
)
def test_the_types_of_answers_are_those_of_the_api(typed: type, model: type[models.Model]) -> None:
    required = {name for name, field in model.model_fields.items() if field.is_required()}

    assert set(typed.__annotations__) == set(model.model_fields)
    assert typed.__required_keys__ >= required  # type: ignore[attr-defined]
