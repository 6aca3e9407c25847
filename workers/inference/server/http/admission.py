"""Admission of requests: API keys, a full queue, a draining server.

Does not depend on request bodies.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from workers.contracts.specs.api_key_hash import key_checker
from workers.contracts.wire.serving_reports import CLIENT_HEADER, KEY_HEADER
from workers.inference.server.http.errors import ApiError


class Admission:
    """Up to `capacity` answers may be in progress, waiting ones included.

    `control_key` is the control plane's. Without an `api_key` clients are admitted only if
    `allow_anonymous` (on a loopback address). The key may be plain or hashed (`api_key_hash`).
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        control_key: str | None,
        allow_anonymous: bool,
        capacity: int,
    ) -> None:
        self.draining = False
        self.capacity, self.in_progress = capacity, 0
        self._is_key = None if api_key is None else key_checker(api_key)
        self._control_key, self._allow_anonymous = control_key, allow_anonymous
        self._finished: deque[tuple[float, int]] = deque(maxlen=64)  # time and answers

    def check_key(self, headers: Mapping[str, str], *, control_plane_only: bool = False) -> None:
        """Raises ApiError 401.

        `control_plane_only`: refuse clients, unless there is no control plane.
        """
        if self._is_control_plane(headers):
            return
        scheme, _, value = headers.get("authorization", "").partition(" ")
        bearer = value.strip() if scheme.lower() == "bearer" else None
        if not (control_plane_only and self._control_key is not None):
            if self._is_key is None and self._allow_anonymous:
                return
            if self._is_key is not None and bearer and self._is_key(bearer):
                return
        message = "Incorrect API key provided" if bearer else "You didn't provide an API key"
        raise ApiError(
            f"{message}; send it as Authorization: Bearer KEY", status=401, code="invalid_api_key"
        )

    def client(self, headers: Mapping[str, str], address: str) -> str:
        """The client for fair shares: as the control plane says, else the peer's address."""
        if self._is_control_plane(headers):
            return headers.get(CLIENT_HEADER, "")
        return f"address:{address}"

    @contextmanager
    def reserve(self, answers: int) -> Iterator[None]:
        """Reserve capacity for this many answers.

        Raises ApiError 429 with Retry-After if the queue is full, 503 while draining.
        """
        if self.draining:
            raise self.draining_error()
        if self.in_progress and self.in_progress + answers > self.capacity:
            raise ApiError(
                f"{self.in_progress} answers are in progress and the limit is {self.capacity}. "
                "Try again later.",
                status=429,
                code="queue_full",
                retry_after_s=self._wait_s(answers),
            )
        self.in_progress += answers
        try:
            yield
        finally:
            self.in_progress -= answers
            self._finished.append((time.monotonic(), answers))

    def draining_error(self) -> ApiError:
        """The response to new requests while draining."""
        return ApiError(
            "the server is shutting down and accepts no new requests", status=503, code="draining"
        )

    def _wait_s(self, answers: int) -> float:
        """Seconds until so many are finished, at the rate of the newest ones."""
        if len(self._finished) < 2:
            return 1.0
        seconds = time.monotonic() - self._finished[0][0]
        rate = sum(count for _, count in self._finished) / max(seconds, 0.01)
        return min(60.0, max(1.0, answers / rate))

    def _is_control_plane(self, headers: Mapping[str, str]) -> bool:
        key = headers.get(KEY_HEADER)
        if key is None or self._control_key is None:
            return False
        return hmac.compare_digest(key.encode(), self._control_key.encode())
