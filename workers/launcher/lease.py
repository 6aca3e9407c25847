"""The attempt's lease: renewed through the broker; without contact its ranks stop in time.

A lost connection has two causes. If the broker's host refuses connections, or accepts them and the
broker stays silent, the broker is down: nothing can be reassigned, and the lease is extended for as
long as this is observed. If the host does not answer at all, this node is presumed to be cut off:
the fleet may start the run elsewhere, so the ranks stop before the lease ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import redis

from workers.contracts.wire import liveness
from workers.contracts.wire.broker.tls import tls_options

STOP_SHARE = 0.6  # of the lease: without contact for this share, the ranks checkpoint and stop
_TIMEOUT_S = 2.0


class StopRequest(NamedTuple):
    """Why the ranks must stop: `action` is preempt or kill."""

    action: str
    reason: str


def broker_is_down(redis_url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Whether the broker's host answers although the broker does not.

    Call it only after the broker failed to answer. A broker behind a Unix socket is on this host.
    """
    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or parts.hostname is None:
        return True
    try:
        with socket.create_connection((parts.hostname, parts.port or 6379), timeout_s):
            return True  # the kernel accepted the connection, nothing answered the request
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


class Lease:
    """Renews one attempt's lease in a thread; `stop_request` is what the supervisor must do.

    `lease_s` None: the control plane grants no lease, so nothing ever stops the ranks.
    """

    def __init__(
        self,
        *,
        fence: str,
        node: str,
        lease_s: float | None,
        redis_url: Callable[[], str],
        renew_s: float = liveness.RENEW_S,
        host_answers: Callable[[str], bool] = broker_is_down,
    ) -> None:
        self._fence, self._node, self._lease_s = fence, node, lease_s
        self._redis_url, self._renew_s, self._host_answers = redis_url, renew_s, host_answers
        if lease_s is not None:
            self._renew_s = min(renew_s, lease_s / 8)
        self._client: redis.Redis | None = None
        self._url = ""
        self._contact = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.stop_request: StopRequest | None = None
        # whether the broker has it; an attempt whose launch came too late is revoked instead
        self.granted = lease_s is None

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    def close(self) -> None:
        """Stop renewing; the control plane removes the lease."""
        self._closing.set()

    @property
    def silence_s(self) -> float:
        """Seconds for which this node had neither contact nor evidence of the broker's outage."""
        return time.monotonic() - self._contact

    def _run(self) -> None:
        while not self._closing.is_set():
            self.renew()
            self._closing.wait(self._renew_s)

    def renew(self) -> None:
        """Renew once, and decide what a failure means."""
        began = time.monotonic()
        revoked = self._renewed()
        if revoked:
            self.stop_request = StopRequest(
                "kill", "The control plane has ended this attempt; its ranks were stopped."
            )
        elif revoked is False or self._host_answers(self._url):
            self._contact = began
        if self._lease_s is None or revoked:
            return
        silence_s = self.silence_s
        reason = (
            f"This node had no contact with the cluster for {silence_s:.0f} s; its ranks stopped "
            "before the run may start elsewhere."
        )
        if silence_s >= self._lease_s * 0.9:
            self.stop_request = StopRequest("kill", reason)
        elif silence_s >= self._lease_s * STOP_SHARE and self.stop_request is None:
            self.stop_request = StopRequest("preempt", reason)

    def _renewed(self) -> bool | None:
        """Whether the attempt is revoked; None if the broker did not answer."""
        try:
            url = self._redis_url()
            if self._client is None or url != self._url:
                self._url = url
                self._client = redis.Redis.from_url(
                    url,
                    socket_timeout=_TIMEOUT_S,
                    socket_connect_timeout=_TIMEOUT_S,
                    retry=None,
                    client_name="orrery-lease",
                    **tls_options(url),
                )
            key = liveness.leases_key(self._node)
            with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(key, self._fence, str(time.time_ns()))
                pipe.hexists(liveness.REVOKED, self._fence)
                revoked = bool(pipe.execute()[1])
            if revoked:
                self._client.hdel(key, self._fence)
            self.granted = self.granted or not revoked
            return revoked
        except redis.ResponseError:
            return False  # the broker answers, for example while it loads its data
        except (redis.RedisError, OSError):
            if self._client is not None:
                self._client.close()
            self._client = None
            return None
