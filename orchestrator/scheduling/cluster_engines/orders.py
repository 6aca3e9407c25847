"""Launch orders of attempts in engines: published sealed in Redis, and as an order to the engine.

Publishing is repeated until the job has started, so a broker that lost its data loses no run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from orchestrator.common.redis import client
from orchestrator.fleet import broker_users
from orchestrator.fleet.cluster_engines import kinds, members
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import EngineMember, Pool
from orchestrator.runs import selectors as runs
from orchestrator.runs.store import access
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.cluster_engines import homes
from orchestrator.scheduling.cluster_engines.interface import Order
from orchestrator.scheduling.models import EngineJob
from workers.contracts.wire import envelope, names
from workers.contracts.wire.broker import access as broker_access
from workers.contracts.wire.cluster_engines.jobs import JobMember, JobTicket
from workers.contracts.wire.node_messages import LaunchOrder, Rendezvous

log = logging.getLogger(__name__)
_LIMITS = ("memory_gb", "cpus", "processes")  # the engine enforces them


class NotPublished(RuntimeError):
    """The broker has no order for the attempt: it does not answer."""


def build(job: EngineJob, pool: Pool) -> Order | None:
    """Publish the launch orders and return the order to the engine.

    None if the attempt ended instead. Raises NotPublished, or ValueError for an unreadable secret.
    """
    attempt = job.attempt
    rows = members.members_create(
        engine=job.engine, attempt_id=attempt.pk, nodes=len(attempt.placement)
    )
    if not publish(job, rows):
        return None
    settings = kinds.settings_of(job.engine)
    url = engines.redis_url(job.engine)
    own_users = broker_users.apply_members([row.name for row in rows])
    listed = []
    for row in rows:
        secret = members.member_secret(row)
        login = broker_access.node_user(row.name), broker_access.node_password(secret)
        listed.append(
            JobMember(
                name=row.name,
                secret=secret.hex(),
                redis=broker_access.url_as(url, *login) if own_users else url,
            )
        )
    ticket = JobTicket(home=settings.home, members=listed, stop_grace_s=settings.stop_grace_s)
    resources = attempt.run.spec.get("resources") or {}
    return Order(
        name=job.name,
        run=attempt.run_id,
        attempt=attempt.number,
        owner=attempt.run.owner.username,
        nodes=len(attempt.placement),
        per_node=len(attempt.placement[0]["devices"]),
        gpu=bool(attempt.placement[0].get("gpu")),
        ticket=ticket.to_text(),
        pool=pool.engine_settings,
        max_seconds=resources.get("max_seconds"),
        memory_gb=resources.get("memory_gb"),
        cpus=resources.get("cpus"),
    )


def publish(job: EngineJob, rows: Sequence[EngineMember]) -> bool:
    """Publish the attempt's launch orders; False if the attempt ended instead.

    Raises NotPublished.
    """
    attempt = job.attempt
    secrets = runs.script_secrets_of([attempt.run]).get(attempt.run_id, {})
    variables = dispatch.variables_of(attempt, secrets)
    if variables is None:
        return False
    by_name = {share["node"]: share for share in attempt.placement}
    try:
        with client().pipeline(transaction=False) as pipe:
            for row in rows:
                order, secret = (
                    _launch_order(job, by_name[row.name]),
                    members.member_secret(row),
                )
                order = access.with_store(order, secret)
                if variables:
                    order = dispatch.with_secrets(order, secret, variables)
                text = envelope.seal(
                    secret,
                    names.KIND_LAUNCH,
                    order.to_dict(),
                    ttl_s=names.ENGINE_ORDER_TTL_S,
                    now=time.time(),
                    node=row.name,
                )
                key = names.node_key(row.name, names.ENGINE_ORDER)
                pipe.set(key, text, ex=names.ENGINE_ORDER_TTL_S)
            pipe.execute()
    except (RedisError, OSError) as error:
        raise NotPublished(f"the broker does not answer: {error}") from None
    return True


def publish_missing(jobs: Sequence[EngineJob]) -> None:
    """Publish again what the broker has lost of jobs that have not started."""
    names_ = {job.pk: [share["node"] for share in job.attempt.placement] for job in jobs}
    if not names_:
        return
    try:
        with client().pipeline(transaction=False) as pipe:
            for listed in names_.values():
                pipe.exists(*[names.node_key(name, names.ENGINE_ORDER) for name in listed])
            counts = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("The orders of engines' jobs are checked later: %s", error)
        return
    for job, count in zip(jobs, counts, strict=True):
        if count == len(names_[job.pk]):
            continue
        rows = members.members_create(
            engine=job.engine, attempt_id=job.attempt_id, nodes=len(names_[job.pk])
        )
        try:
            publish(job, rows)
            broker_users.apply_members([row.name for row in rows])
        except NotPublished as error:
            log.warning("The order of %s is published later: %s", job.name, error)


def _launch_order(job: EngineJob, share: dict[str, Any]) -> LaunchOrder:
    """The order for one node; the engine decides host and devices, the job fills them in."""
    attempt = job.attempt
    order = dispatch.launch_order(attempt, share, gpu=bool(share.get("gpu")))
    spec = dict(order.spec)
    if resources := spec.get("resources"):
        spec["resources"] = {k: v for k, v in resources.items() if k not in _LIMITS}
    folder = f"runs/{attempt.run_id}"
    first = min(attempt.placement, key=lambda item: item["node_rank"])
    return order.model_copy(
        update={
            "spec": spec,
            "run_dir": homes.run_dir(attempt, share["node_rank"]),
            "shared_dir": folder,
            "rendezvous": Rendezvous(node=first["node"]),
            **(homes.tasks(job.engine, attempt) if share is first else {}),
        }
    )
