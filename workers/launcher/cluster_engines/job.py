"""`python -m workers.launcher.cluster_engines.job`: a node's supervisor in a job of an engine.

In Slurm srun starts it on each node; in Kubernetes it is the program of each pod of a JobSet.

Takes the place of the agent: reads the sealed launch order from Redis, claims the attempt, and runs
the supervisor in the foreground. Passes requests of the control plane on. Never starts an attempt
twice: neither in a job that the engine has requeued, nor in a second job for the same attempt.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import redis

from workers.contracts.wire import envelope, names, versions
from workers.contracts.wire.broker.tls import tls_options
from workers.contracts.wire.cluster_engines.jobs import JobMember, JobTicket
from workers.contracts.wire.maintenance.storage import StorageReport
from workers.contracts.wire.node_messages import ControlOrder, LaunchOrder, Rendezvous
from workers.launcher import processes
from workers.launcher.cluster_engines.job_environment import NotInJob, job_environment
from workers.launcher.cluster_engines.own_address import own_address
from workers.launcher.maintenance import engine_home
from workers.launcher.recovery import is_reported
from workers.launcher.rundir import RunDir, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.supervisor import Supervisor

ORDER_WAIT_S = 300.0  # an order lost with the broker is published again within a minute
STORE_PATIENCE_S = 600.0  # the job holds its devices while it waits for the store
MAINTENANCE_S = 60.0  # after the attempt, for what is still done in the home
_REQUEST_POLL_S = 1.0


class NotStarted(RuntimeError):
    """The job does not start its attempt; the message says why."""


def main() -> int:
    """Supervise this node's part of the attempt to its end; 0 also if there is nothing to do.

    Prints the reason if the attempt must not start here.
    """
    # the first process of a container ignores SIGTERM unless it handles it
    signal.signal(signal.SIGTERM, _stop_waiting)
    try:
        ticket = _ticket(os.environ)
        here = job_environment(os.environ)
        if here.requeued:
            raise NotStarted(
                "The engine has requeued this job. Its run continues in a new job, from its "
                "newest checkpoint."
            )
        if here.node_rank >= len(ticket.members):
            raise NotStarted(
                f"This job has {len(ticket.members)} nodes; this is node {here.node_rank}."
            )
        member, home = ticket.members[here.node_rank], home_folder(ticket.home)
        client = _connect(member.redis)
        order = launch_order(client, member)
        _claim(client, member, here.job)
        run_dir = RunDir(home / order.run_dir)
        if not run_dir.claim(order.to_dict()):
            raise NotStarted(f"{run_dir} was claimed before; the attempt runs or has ended there.")
    except (NotStarted, NotInJob) as reason:
        print(reason, flush=True)
        return 0
    order = placed(order, os.environ, here.first_host)
    node_file = _write_node_file(home, member, own_address(member.redis))
    _supervise(home, run_dir, order, node_file, member, client, ticket.stop_grace_s)
    if is_reported(run_dir):  # otherwise a later job sends the rest under this identity
        node_file.unlink(missing_ok=True)
    return 0


def _stop_waiting(number: int, frame: FrameType | None) -> None:
    raise NotStarted("The engine stopped this job before its attempt started.")


def home_folder(text: str) -> Path:
    """The engine's home folder on this node. Raises NotStarted for a path that is not absolute."""
    path = Path(os.path.expandvars(os.path.expanduser(text)))
    if not path.is_absolute() or "$" in str(path):
        raise NotStarted(f"The engine's home {text} is not an absolute path on this node.")
    return path


def launch_order(
    client: redis.Redis, member: JobMember, *, wait_s: float = ORDER_WAIT_S
) -> LaunchOrder:
    """The member's order. Raises NotStarted if it is revoked or does not arrive in time."""
    deadline = time.monotonic() + wait_s
    problem = "the control plane published no order for it"
    while time.monotonic() < deadline:
        try:
            text: Any = client.get(names.node_key(member.name, names.ENGINE_ORDER))
            if text:
                body = envelope.open_envelope(
                    bytes.fromhex(member.secret), text, kind=names.KIND_LAUNCH, now=time.time()
                )
                return LaunchOrder.from_dict(body)
        except envelope.EnvelopeError as error:
            problem = str(error)
        except redis.AuthenticationError as error:
            problem = f"the broker refuses its user ({error}); the attempt may have ended"
        except (redis.RedisError, OSError) as error:
            problem = f"the broker does not answer: {error}"
        time.sleep(1.0)
    raise NotStarted(f"Nothing was started within {wait_s:.0f} s: {problem}.")


def placed(order: LaunchOrder, variables: Mapping[str, str], first_host: str | None) -> LaunchOrder:
    """The order with what only the engine's allocation decides: devices and meeting address.

    Raises ValueError if the engine gave fewer devices than the order needs.
    """
    host = first_host if order.node_rank else variables.get(names.JOB_ADDRESS) or first_host
    if host and order.nodes > 1:
        await_name(host)
    changes: dict[str, Any] = {
        "rendezvous": Rendezvous(host=host if order.nodes > 1 else None, node=order.rendezvous.node)
    }
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    if order.device_kind == "gpu" and visible and all(v.isdigit() for v in visible.split(",")):
        changes["local_devices"] = [int(v) for v in visible.split(",")][: order.local_ranks]
    return order.model_copy(update=changes)


def await_name(host: str, *, wait_s: float = ORDER_WAIT_S) -> None:
    """Wait until the name of the first node resolves, for at most `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError:
            time.sleep(1.0)


def _supervise(
    home: Path,
    run_dir: RunDir,
    order: LaunchOrder,
    node_file: Path,
    member: JobMember,
    client: redis.Redis,
    stop_grace_s: float,
) -> None:
    write_json(run_dir.agent, {"node": member.name, "node_file": str(node_file)})
    facts = {
        "pid": os.getpid(),
        "start_time": processes.start_time(os.getpid()),
        "state": "launching",
        "fence": order.fence,
        "release": versions.RELEASE,
        "wire": str(versions.WIRE),
        "node": member.name,
        "up": time.time(),
    }
    write_json(run_dir.supervisor, facts)
    processes.adopt_orphans()
    os.environ |= {"ORRERY_FENCE": order.fence, "ORRERY_NODE": member.name}
    stopped = threading.Event()
    requests = threading.Thread(
        target=_pass_requests, args=(client, member, run_dir, stopped.is_set), daemon=True
    )
    requests.start()
    maintenance = threading.Thread(
        target=engine_home.maintain,
        args=(home, order, partial(_collected, client, member)),
        daemon=True,
    )
    maintenance.start()
    link = Link(node_file, order)
    try:
        verdict = Supervisor(
            run_dir,
            order,
            link,
            term_grace_s=stop_grace_s,
            store_patience_s=STORE_PATIENCE_S,
        ).run()
    finally:
        stopped.set()
    maintenance.join(MAINTENANCE_S)
    print(
        f"Attempt {order.run}.{order.attempt}: {verdict.exit_class}, {verdict.reason}", flush=True
    )


def _pass_requests(
    client: redis.Redis, member: JobMember, run_dir: RunDir, stopped: Callable[[], bool]
) -> None:
    """Write the control plane's newest request where the supervisor reads it.

    Also marks the attempt as active, which the folder's age alone does not show if nothing new is
    written for days.
    """
    last, mark_due = "", 0.0
    while not stopped():
        if time.monotonic() >= mark_due:
            mark_due = time.monotonic() + engine_home.MARK_EVERY_S
            engine_home.mark_active(run_dir)
        try:
            text: Any = client.get(names.node_key(member.name, names.ENGINE_REQUEST))
            if text and text != last:
                body = envelope.open_envelope(
                    bytes.fromhex(member.secret), text, kind=names.KIND_CONTROL, now=time.time()
                )
                write_json(run_dir.request, ControlOrder.from_dict(body).to_dict())
                last = text
        except envelope.EnvelopeError as error:
            print(f"A request is ignored: {error}", flush=True)
            last = text
        except (redis.RedisError, OSError):
            pass  # the next poll tries again
        time.sleep(_REQUEST_POLL_S)


def _collected(client: redis.Redis, member: JobMember, report: StorageReport) -> bool:
    """Report what was deleted in the home; whether the broker has it."""
    text = envelope.seal(
        bytes.fromhex(member.secret),
        names.KIND_COLLECTED,
        report.to_dict(),
        ttl_s=names.REPORT_TTL_S,
        now=time.time(),
        node=member.name,
    )
    try:
        client.xadd(names.reports_stream(member.name), {names.FIELD_MESSAGE: text})
    except (redis.RedisError, OSError):
        return False
    return True


def _ticket(variables: Mapping[str, str]) -> JobTicket:
    text = os.environ.pop(names.ENGINE_TICKET, "") or variables.get(names.ENGINE_TICKET, "")
    try:
        return JobTicket.from_text(text)
    except ValueError:
        raise NotStarted(
            f"{names.ENGINE_TICKET} is missing or cannot be read; only jobs that Orrery submits "
            "have it."
        ) from None


def _claim(client: redis.Redis, member: JobMember, job: str) -> None:
    """Claim this part of the attempt for this job. Raises NotStarted if another one has it."""
    key = names.node_key(member.name, names.ENGINE_CLAIM)
    while True:
        try:
            client.set(key, job, nx=True, ex=names.ENGINE_ORDER_TTL_S)
            holder: Any = client.get(key)
        except (redis.RedisError, OSError):
            time.sleep(1.0)
            continue
        if holder != job:
            raise NotStarted(f"Job {holder} has started this attempt; this is job {job}.")
        return


def _write_node_file(home: Path, member: JobMember, address: str) -> Path:
    path = engine_home.node_file(home, member.name)
    before = os.umask(0o077)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"node": member.name, "secret": member.secret, "redis": member.redis}
        write_json(path, {**content, "address": address})
    finally:
        os.umask(before)
    return path


def _connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=5,
        socket_connect_timeout=5,
        client_name="orrery-engine-job",
        **tls_options(url),
    )


if __name__ == "__main__":
    sys.exit(main())
