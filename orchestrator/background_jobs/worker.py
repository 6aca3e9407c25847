"""The control plane's Celery worker and beat: one process with a few threads.

Beat sends one message every few seconds; it starts what is due in the database. Does not depend on
what the jobs do.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from functools import lru_cache
from types import FrameType
from typing import Any, Final

from celery import Celery
from celery.beat import EmbeddedService, Scheduler
from celery.worker import state
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections
from kombu.entity import Queue

from orchestrator.background_jobs import message_transport, running
from orchestrator.background_jobs.notifications import deliver
from orchestrator.common import clock
from workers.contracts.wire import names
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)

QUEUE: Final = "control.jobs"  # queues of nodes are `node.<name>`
_TASK_DELIVER: Final = "jobs.deliver"
TICK_S: Final = 5.0
THREADS: Final = 4
_TASK_TICK, _TASK_JOB, _TASK_REQUEST = "jobs.tick", "jobs.run", "jobs.run_requested"


def run() -> None:
    """Consume until SIGINT or SIGTERM. Several processes may run; each run starts once."""
    message_transport.install()
    app = celery_app(settings.REDIS_URL)
    worker = app.WorkController(
        hostname=f"jobs@{socket.gethostname()}-{os.getpid()}",
        pool="threads",
        concurrency=THREADS,
        loglevel="WARNING",
        queues=[QUEUE],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    beat = EmbeddedService(app, thread=True, scheduler_cls=Scheduler)
    beat.daemon = True

    def stop(number: int, frame: FrameType | None) -> None:
        state.should_stop = 0

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    beat.start()
    log.info("Jobs start on the queue %s", QUEUE)
    try:
        worker.start()
    finally:
        threading.Thread(target=beat.stop, daemon=True).start()


def tick() -> list[tuple[str, list[Any]]]:
    """The messages of one tick: what is due, claimed. Also closes abandoned runs."""
    now = clock.now()
    running.close_abandoned(now=now)
    messages: list[tuple[str, list[Any]]] = [
        (_TASK_JOB, [name]) for name in running.due_jobs(now=now)
    ]
    messages += [(_TASK_REQUEST, [id]) for id in running.due_requests(now=now)]
    messages += [(_TASK_DELIVER, [id]) for id in deliver.due(now=now)]
    return messages


@lru_cache(maxsize=2)
def celery_app(url: str) -> Celery:
    """The Celery app with its tasks and beat schedule."""
    app = Celery("orrery-jobs", broker=names.broker_url(url), set_as_current=False)
    app.conf.broker_use_ssl = tls_options(url) or None
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        task_queues=[Queue(QUEUE, routing_key=QUEUE)],  # type: ignore[no-untyped-call]
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": 3600,
            "socket_keepalive": not url.startswith("unix"),
        },
        beat_schedule={
            "tick": {"task": _TASK_TICK, "schedule": TICK_S, "options": {"expires": TICK_S}}
        },
    )
    tasks = {
        _TASK_JOB: running.run_scheduled,
        _TASK_REQUEST: running.run_requested,
        _TASK_DELIVER: deliver.deliver,
    }

    def ticked() -> None:
        for task, arguments in _guarded(tick) or []:
            app.send_task(task, args=arguments, queue=QUEUE)

    app.task(name=_TASK_TICK)(ticked)
    for name, work in tasks.items():
        app.task(name=name)(_task(work))
    return app


def _task(work: Any) -> Any:
    def run_one(key: Any) -> None:
        _guarded(work, key)

    return run_one


def _guarded(work: Any, *arguments: Any) -> Any:
    """Run with fresh database connections; a database that is down delays the work."""
    close_old_connections()
    try:
        return work(*arguments)
    except (DatabaseError, InterfaceError) as error:
        log.warning("The database is not available; the next tick tries again: %s", error)
        return None
    finally:
        close_old_connections()
