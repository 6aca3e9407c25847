"""Celery producer that puts sealed orders on nodes' queues.

Executes no tasks.
"""

from __future__ import annotations

from functools import lru_cache

from celery import Celery
from django.conf import settings

from workers.contracts.wire import names


@lru_cache(maxsize=2)
def _app(url: str) -> Celery:
    app = Celery("orrery", broker=names.broker_url(url), set_as_current=False)
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


def send(*, task: str, node: str, envelope: str) -> None:
    """Send one message to the node's queue.

    Raises `kombu.exceptions.OperationalError` while Redis is unavailable.
    """
    queue = names.node_queue(node)
    _app(settings.REDIS_URL).send_task(
        task,
        args=[envelope],
        queue=queue,
        routing_key=queue,
        expires=names.ORDER_TTL_S,
        retry=True,
        retry_policy={"max_retries": 1, "interval_start": 0.0, "interval_max": 0.1},
    )
