"""Who may come in, and when: keys, a queue that is full, a server that is about to end.

Knows headers and counts; knows no bodies.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from workers.contracts.specs.api_key_hash import checker
from workers.contracts.wire.serving_reports import CLIENT_HEADER, KEY_HEADER
from workers.inference.server.errors import ApiError


class Gate:
    """`capacity` answers may be on their way, those that wait included. `house_key` is the control
    plane's.

    Without an `api_key` everybody may ask where `open` says so: on an address that only this
    machine reaches. The key
    may be written as it is or hidden (`contracts.secret`).
    """

    def __init__(
        self, *, api_key: str | None, house_key: str | None, open: bool, capacity: int
    ) -> None:
        self.draining = False
        self.capacity, self.inside = capacity, 0
        self._is_key = None if api_key is None else checker(api_key)
        self._house_key, self._open = house_key, open
        self._left: deque[tuple[float, int]] = deque(maxlen=64)  # when the newest answers ended

    def check_key(self, headers: Mapping[str, str], *, house_only: bool = False) -> None:
        """Raises ApiError.

        `house_only`: what is no client's business, unless there is no control plane.
        """
        if self._is_house(headers):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else None
        if not (house_only and self._house_key is not None):
            if self._is_key is None and self._open:
                return
            if self._is_key is not None and bearer and self._is_key(bearer):
                return
        message = "Incorrect API key provided" if bearer else "You didn't provide an API key"
        raise ApiError(
            f"{message}; send it as Authorization: Bearer KEY", status=401, code="invalid_api_key"
        )

    def client(self, headers: Mapping[str, str], address: str) -> str:
        """Who asks, for a fair share: as the control plane says, else the address that the call
        comes from.
        """
        return headers.get(CLIENT_HEADER, "") if self._is_house(headers) else f"address:{address}"

    @contextmanager
    def room(self, answers: int) -> Iterator[None]:
        """Holds places for so many answers.

        Raises ApiError 429 with a time to come back, and 503 at the end.
        """
        if self.draining:
            raise self.refusal()
        if self.inside and self.inside + answers > self.capacity:
            message = (
                f"{self.inside} answers are on their way and there is room for {self.capacity}"
            )
            raise ApiError(
                f"{message}; ask again later",
                status=429,
                code="queue_full",
                retry_after_s=self._wait_s(answers),
            )
        self.inside += answers
        try:
            yield
        finally:
            self.inside -= answers
            self._left.append((time.monotonic(), answers))

    def refusal(self) -> ApiError:
        return ApiError(
            "the server is about to end and takes no new requests", status=503, code="draining"
        )

    def _wait_s(self, answers: int) -> float:
        """Until so many have left, as fast as the newest ones did."""
        if len(self._left) < 2:
            return 1.0
        seconds = time.monotonic() - self._left[0][0]
        rate = sum(count for _, count in self._left) / max(seconds, 0.01)
        return min(60.0, max(1.0, answers / rate))

    def _is_house(self, headers: Mapping[str, str]) -> bool:
        return self._house_key is not None and _same(headers.get(KEY_HEADER), self._house_key)


def _same(given: str | None, wanted: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), wanted.encode())
