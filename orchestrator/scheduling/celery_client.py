"""Celery producer that puts sealed orders on nodes' queues.

Executes no tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

from celery import Celery
from celery.utils import uuid
from django.conf import settings
from kombu.entity import Queue

from workers.contracts.wire import names
from workers.contracts.wire.broker.tls import tls_options


@lru_cache(maxsize=2)
def _app(url: str) -> Celery:
    app = Celery("orrery", broker=names.broker_url(url), set_as_current=False)
    app.conf.broker_use_ssl = tls_options(url) or None
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        broker_connection_timeout=2,
        broker_transport_options={
            "visibility_timeout": 300,
            "socket_connect_timeout": 2,
            "socket_timeout": 5,
        },
    )
    return app


class Order(NamedTuple):
    """A sealed message for the queue of a node."""

    task: str
    node: str
    envelope: str


def send(orders: Sequence[Order]) -> None:
    """Send the messages to their nodes' queues, in few round trips.

    Raises a KombuError while Redis is unavailable: OperationalError, or BatchPublishError if some
    may be sent.
    """
    amqp, producers = _app(settings.REDIS_URL).amqp, _app(settings.REDIS_URL).producer_pool
    with producers.acquire(block=True) as producer:
        # kombu before 5.7 sends one message per round trip
        together = getattr(producer, "batch", nullcontext)
        with together():
            for task, node, envelope in orders:
                message = amqp.as_task_v2(
                    uuid(),
                    task,
                    args=[envelope],
                    kwargs={},
                    expires=names.ORDER_TTL_S,
                    ignore_result=True,
                )
                # without `declare`, the order goes directly to the queue, which the node declares
                amqp.send_task_message(
                    producer,
                    task,
                    message,
                    queue=Queue(names.node_queue(node)),  # type: ignore[no-untyped-call]
                    declare=[],
                    retry=True,
                    retry_policy={"max_retries": 1, "interval_start": 0.0, "interval_max": 0.1},
                )
