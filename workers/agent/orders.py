"""The node's Celery worker: its own queue, JSON only, short tasks that open sealed orders.

An order that is forged, expired, replayed or addressed to another node is logged and dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.worker import state
from kombu.entity import Queue

from workers.agent import order_transport
from workers.contracts.wire import envelope, names
from workers.contracts.wire.broker.tls import tls_options
from workers.contracts.wire.maintenance.storage import CollectOrder
from workers.contracts.wire.node_messages import ControlOrder, KeepOrder, LaunchOrder, ProbeOrder

log = logging.getLogger(__name__)


class OrderConsumer:
    """Consumes orders in a thread; `stop` takes a second or two."""

    def __init__(self, *, node: str, secret: bytes, redis_url: str, agent: Any) -> None:
        self._node, self._secret, self._agent = node, secret, agent
        self._seen = envelope.NonceCache()
        self.app = _celery(node, redis_url)
        for name, act in (
            (names.TASK_LAUNCH, self._launch),
            (names.TASK_CONTROL, self._control),
            (names.TASK_PROBE, self._probe),
            (names.TASK_KEEP, self._keep),
            (names.TASK_COLLECT, self._collect),
        ):
            self.app.task(name=name, ignore_result=True, shared=False)(self._task(act))
        self._thread: threading.Thread | None = None
        self.last_order = time.monotonic()
        self.busy = False  # an order is being carried out; a pin may copy a large checkpoint

    def start(self) -> None:
        """Start the consumer thread."""
        state.should_stop = state.should_terminate = None
        self._thread = threading.Thread(target=self._consume, name="orders", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float = 2.0) -> bool:
        """Stop consuming; False if the loop did not end in time."""
        state.should_stop = 0
        if self._thread is not None:
            self._thread.join(patience_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the consumer thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _consume(self) -> None:
        self.app.set_current()  # of this thread: Celery runs the tasks of its current app
        worker = self.app.WorkController(
            hostname=f"orrery@{self._node}",
            pool="solo",
            concurrency=1,
            loglevel="WARNING",
            without_heartbeat=True,
            without_gossip=True,
            without_mingle=True,
            queues=[names.node_queue(self._node)],
        )
        worker.start()

    def _task(self, act: Callable[[str], None]) -> Callable[..., None]:
        def run(envelope_text: str, *_: object, **__: object) -> None:  # newer senders may add more
            self.busy = True
            try:
                act(envelope_text)
            except Exception:
                log.exception("An order failed")
            finally:
                self.busy = False

        return run

    def _open(self, kind: str, text: str) -> dict[str, Any] | None:
        self.last_order = time.monotonic()
        try:
            return envelope.open_envelope(
                self._secret, text, kind=kind, now=time.time(), seen=self._seen
            )
        except envelope.EnvelopeError as error:
            log.warning("A %s order was refused (%s): %s", kind, error.code, error)
            return None

    def _launch(self, text: str) -> None:
        if body := self._open(names.KIND_LAUNCH, text):
            done = self._agent.attempts.launch(LaunchOrder.from_dict(body))
            log.info("Attempt %s of run %s: %s", body["attempt"], body["run"], done)

    def _control(self, text: str) -> None:
        if body := self._open(names.KIND_CONTROL, text):
            order = ControlOrder.from_dict(body)
            done = self._agent.attempts.control(order)
            if done == "unknown":
                self._agent.report_unknown(order)
            log.info("%s of attempt %s: %s", order.action, order.attempt_id, done)

    def _probe(self, text: str) -> None:
        if body := self._open(names.KIND_PROBE, text):
            self._agent.answer_probe(ProbeOrder.from_dict(body))

    def _keep(self, text: str) -> None:
        if body := self._open(names.KIND_KEEP, text):
            order = KeepOrder.from_dict(body)
            done = self._agent.attempts.pin(order)
            log.info(
                "%s %s as %s",
                order.source,
                "is pinned" if done else "is not on this node and cannot be pinned",
                order.target,
            )

    def _collect(self, text: str) -> None:
        if body := self._open(names.KIND_COLLECT, text):
            self._agent.collect_garbage(CollectOrder.from_dict(body))


def _celery(node: str, redis_url: str) -> Celery:
    order_transport.install()
    app = Celery(
        "orrery-agent",
        broker=names.broker_url(redis_url),
        amqp=order_transport.Amqp,
        set_as_current=False,
    )
    app.conf.broker_use_ssl = tls_options(redis_url) or None
    queue = Queue(names.node_queue(node), routing_key=names.node_queue(node))  # type: ignore[no-untyped-call]
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        task_queues=[queue],
        task_default_queue=names.node_queue(node),
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": 300,
            "socket_keepalive": not redis_url.startswith("unix"),
            **order_transport.options(node),
        },
    )
    return app
