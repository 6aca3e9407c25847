"""A Redis transport for Celery: drops unreadable messages, and uses only keys of its node.

Without it, one message whose body is not base64 ends the consumer's loop, and the node's user of
the broker, which may not write shared keys or run scripts, could not consume. Does not open orders.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty
from typing import Any, Final

from celery.app import amqp
from kombu import connection, transport
from kombu.transport import redis

from workers.contracts.wire import names

log = logging.getLogger(__name__)
# seconds between attempts to reach the broker
RETRY: Final = {"interval_start": 1.0, "interval_step": 1.0, "interval_max": 5.0}
dropped: Counter[str] = Counter()  # by kind of error, since this process started
# what reading and decoding a message can raise; errors of connections are not among them
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Unacknowledged(redis.QoS):
    """Orders that were taken and not finished; a later agent of the node takes them again."""

    def restore_visible(self, start: int = 0, num: int = 10, interval: int = 10) -> None:
        """Return overdue orders to the queue; without a lock, as a node has one consumer."""
        self._vrestore_count += 1
        if (self._vrestore_count - 1) % (interval or 1):
            return
        before = time.time() - self.visibility_timeout
        with self.channel.conn_or_acquire() as client:
            # ZRANGE ... BYSCORE needs Redis 6.2
            for tag in client.zrevrangebyscore(
                self.unacked_index_key, before, 0, start=0, num=num or 10
            ):
                self.restore_by_tag(tag, client)  # type: ignore[no-untyped-call]


class Channel(redis.Channel):
    """Counts and drops messages that are not JSON, lack fields or have an undecodable body."""

    QoS = Unacknowledged

    def _queue_bind(self, *args: Any) -> None:
        """Do nothing: orders are sent to the queue directly, not through an exchange."""

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Consume from the queue; a message that `callback` cannot read is dropped."""

        def guarded(message: Any) -> Any:
            try:
                return callback(message)
            except _UNREADABLE as error:
                _drop(error)
                # while it is not acknowledged, the limit of prefetched messages blocks the others
                with contextlib.suppress(KeyError):
                    self.basic_reject(message.delivery_tag, requeue=False)  # type: ignore[no-untyped-call]

        return super().basic_consume(queue, no_ack, guarded, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except _UNREADABLE as error:
            _drop(error)
            raise Empty from None


def _drop(error: Exception) -> None:
    dropped[type(error).__name__] += 1
    log.warning(
        "An unreadable message in this node's queue was dropped (%d so far): %s: %s",
        dropped.total(),
        type(error).__name__,
        error,
    )


class Transport(redis.Transport):
    """The Redis transport with our channel."""

    Channel = Channel


class Connection(connection.Connection):
    """Tries to reach the broker again every few seconds, also after a long outage."""

    def ensure_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Wait until the broker answers; Celery's default waits up to 30 s between attempts."""
        return super().ensure_connection(*args, **{**kwargs, **RETRY})  # type: ignore[no-untyped-call]


class Amqp(amqp.AMQP):  # type: ignore[misc]
    """Celery's messaging with our connections."""

    Connection = Connection


def install() -> None:
    """Make Celery use this transport for `redis` and `rediss` URLs in this process."""
    path = f"{__name__}:Transport"
    transport.TRANSPORT_ALIASES.update({"redis": path, "rediss": path})


def options(node: str) -> dict[str, Any]:
    """Transport options: the keys of this node, and one list per queue, without priorities."""
    return {
        "unacked_key": names.node_key(node, names.UNACKED),
        "unacked_index_key": names.node_key(node, names.UNACKED_INDEX),
        "priority_steps": [0],
    }
