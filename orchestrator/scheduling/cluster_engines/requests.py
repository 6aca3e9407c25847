"""Requests to attempts in jobs of engines: sealed, one key per supervisor, which polls it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from django.db.models import F, Q, QuerySet
from redis.exceptions import RedisError

from orchestrator.common.redis import client
from orchestrator.fleet.cluster_engines import members
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.models import EngineJob
from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import AttemptState, ControlOrder, RunState

log = logging.getLogger(__name__)
LIVING = (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


def is_unwanted(attempt: Attempt) -> bool:
    """Whether the attempt has ended, or its run was cancelled or paused while it waited."""
    run = attempt.run
    current = run.attempt_number == attempt.number and run.state in LIVING
    return attempt.state == AttemptState.EXITED or not current


def unwanted_jobs() -> QuerySet[EngineJob]:
    """Jobs of runs that were cancelled or paused while they waited, which no pass has marked."""
    wanted = Q(attempt__run__state__in=LIVING, attempt__run__attempt_number=F("attempt__number"))
    jobs = EngineJob.objects.filter(stop=False).exclude(state=EngineJob.State.ENDED)
    return jobs.exclude(wanted).exclude(attempt__state=AttemptState.EXITED)


def send(attempt: Attempt, order: ControlOrder, *, nodes: Collection[str]) -> bool:
    """Publish the request for these supervisors; False if the broker does not answer.

    A kill that a user's request has become also ends the job, because a supervisor may not read
    requests any more. One that follows the exit of another node does not: the engine may be about
    to requeue the job.
    """
    if order.action == "kill" and attempt.requested:
        EngineJob.objects.filter(attempt=attempt).update(stop=True)
    try:
        with client().pipeline(transaction=False) as pipe:
            for name, secret in members.member_secrets(nodes):
                text = envelope.seal(
                    secret,
                    names.KIND_CONTROL,
                    order.to_dict(),
                    ttl_s=names.ORDER_TTL_S,
                    now=time.time(),
                    node=name,
                )
                pipe.set(names.node_key(name, names.ENGINE_REQUEST), text, ex=names.ORDER_TTL_S)
            pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("A request to attempt %s was not published: %s", attempt.pk, error)
        return False
    return True
