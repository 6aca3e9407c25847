"""A Redis transport for the jobs' Celery worker: an unreadable message becomes a dead letter.

Without it, one message whose body cannot be decoded ends the worker. Does not depend on what
messages request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from queue import Empty
from typing import Any, Final

from django.db import DatabaseError, InterfaceError, close_old_connections
from kombu import transport
from kombu.transport import redis

from orchestrator.dead_letters.services import dead_letter_add

log = logging.getLogger(__name__)
SOURCE: Final = "jobs"
# what reading and decoding a message can raise; errors of connections are not among them
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Channel(redis.Channel):
    """Drops messages that are not JSON, lack fields or have an undecodable body."""

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


class Transport(redis.Transport):
    """The Redis transport with our channel."""

    Channel = Channel


def install() -> None:
    """Make Celery use this transport for `redis` and `rediss` URLs in this process."""
    path = f"{__name__}:Transport"
    transport.TRANSPORT_ALIASES.update({"redis": path, "rediss": path})


def _drop(error: Exception) -> None:
    """Record the message as a dead letter; of some only the error is known, not the text."""
    reason = f"{type(error).__name__}: {error}"
    log.warning("An unreadable message in the jobs' queue was dropped: %s", reason)
    text = getattr(error, "doc", None) or getattr(error, "object", None) or reason
    message = text if isinstance(text, bytes) else str(text).encode("utf-8", "replace")
    close_old_connections()
    try:
        dead_letter_add(source=SOURCE, node="", code="malformed", reason=reason, message=message)
    except (DatabaseError, InterfaceError) as failure:
        log.error("The dropped message was not recorded: %s", failure)
    finally:
        close_old_connections()
