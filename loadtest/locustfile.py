"""Users for locust: each appends to its own ledger, and reads the acknowledged entries back.

`make load` (loadtest/load.py) starts locust with this file. An acknowledged entry that is missing
or has different bytes counts as a failure of the request `verify`, and locust ends with status 1.
"""

import base64
import hashlib
import random
from typing import Any

from locust import FastHttpUser, constant_throughput, task


class LedgerUser(FastHttpUser):
    """A writer with its own ledger, which sends at most ten requests per second."""

    wait_time = constant_throughput(10)

    def on_start(self) -> None:
        """Create the ledger."""
        self.digests: dict[int, bytes] = {}
        self.path = ""
        self._create()

    def on_stop(self) -> None:
        """Read the whole ledger back."""
        if self.digests:
            self._verify(0, max(self.digests))

    @task(10)
    def append(self) -> None:
        """Append one entry."""
        payload = random.randbytes(random.randrange(1, 4096))
        answer = self._post({"data": base64.b64encode(payload).decode()}, "append")
        if answer is not None:
            self.digests[answer["entry_id"]] = _digest(payload)

    @task(3)
    def append_batch(self) -> None:
        """Append a hundred entries in one request."""
        payloads = [random.randbytes(512) for _ in range(100)]
        entries = [{"data": base64.b64encode(payload).decode()} for payload in payloads]
        answer = self._post({"entries": entries}, "append 100")
        if answer is not None:
            for number, payload in enumerate(payloads):
                self.digests[answer["first_entry"] + number] = _digest(payload)

    @task(3)
    def read_some(self) -> None:
        """Read up to 101 entries from a random one on."""
        if self.digests:
            first = random.randrange(max(self.digests) + 1)
            self._verify(first, min(first + 100, max(self.digests)))

    def _create(self) -> None:
        with self.client.post("/v1/ledgers", json={}, name="create", catch_response=True) as answer:
            if answer.status_code == 201:
                self.path = f"/v1/ledgers/{answer.json()['ledger_id']}/entries"
                self.digests = {}
            else:
                answer.failure(answer.text)

    def _post(self, body: dict[str, Any], name: str) -> Any:
        """Append. After an error, read the ledger back and continue with a new ledger."""
        with self.client.post(self.path, json=body, name=name, catch_response=True) as answer:
            if answer.status_code == 201:
                return answer.json()
            answer.failure(f"{answer.status_code}: {answer.text}")
        if self.digests:
            self._verify(0, max(self.digests))
        self._create()
        return None

    def _verify(self, first: int, last: int) -> None:
        """Read entries first..last and compare them with the acknowledged ones."""
        while first <= last:
            params = f"?from={first}&to={last}&limit=1000"
            with self.client.get(self.path + params, name="verify", catch_response=True) as answer:
                if answer.status_code != 200:
                    answer.failure(f"{answer.status_code}: {answer.text}")
                    return
                page = answer.json()
                for entry in page["entries"]:
                    wanted = self.digests.get(entry["entry_id"])
                    if wanted and wanted != _digest(base64.b64decode(entry["data"])):
                        answer.failure(
                            f"entry {entry['entry_id']} differs from the acknowledged entry"
                        )
                        return
                if page["next"] <= first:
                    answer.failure(f"acknowledged entries from {first} on are missing")
                    return
                first = page["next"]


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
