"""The preflight probe of an attempt on this node: one process per rank, before the ranks start.

Does not measure; the processes of `workers.probe` do. Without torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from workers.contracts.wire.maintenance.preflight import Preflight, PreflightReport
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command, rendezvous
from workers.launcher.exits.classification import Verdict
from workers.launcher.isolation import wrap
from workers.launcher.isolation.acting import before_program
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.rundir import RunDir, open_to_append, read_json
from workers.launcher.shipping.redis_link import Link
from workers.probe import judge, report

_POLL_S = 0.05


def check(
    order: LaunchOrder,
    run_dir: RunDir,
    link: Link,
    *,
    keep_waiting: Callable[[], bool],
    user: RunUser | None = None,
) -> Verdict | None:
    """Probe the devices if the order requests it, and report the result.

    Returns a verdict if a device is below its record. Raises OSError for an unwritable folder, and
    NoRendezvous.
    """
    if order.preflight is None:
        return None
    host, port = rendezvous.meet(order, link, keep_waiting=keep_waiting, purpose="preflight")
    loopback = (order.rendezvous.host or "").startswith(command.LOOPBACK)
    measured = run(
        order,
        order.preflight,
        run_dir,
        host=host,
        port=port,
        address="127.0.0.1" if loopback else link.node.address,
        keep_waiting=keep_waiting,
        user=user,
    )
    if measured is None:
        return None
    link.report("event", {"type": "preflight", "data": measured.to_dict()})
    if not measured.shortfalls:
        return None
    reason = "; ".join(item.message for item in measured.shortfalls)
    return Verdict(
        "infrastructure",
        f"The preflight probe failed: {reason}.",
        time=time.time(),
        cause="preflight",
    )


def run(
    order: LaunchOrder,
    wanted: Preflight,
    run_dir: RunDir,
    *,
    host: str,
    port: int,
    address: str,
    keep_waiting: Callable[[], bool],
    user: RunUser | None = None,
) -> PreflightReport | None:
    """Probe the granted devices as the run's user; None if a stop was requested meanwhile.

    Raises OSError for an unwritable folder.
    """
    folder = run_dir.path / "preflight"
    folder.mkdir(exist_ok=True)
    begin = time.monotonic()
    started = _start(order, run_dir, host=host, port=port, address=address, user=user)
    try:
        while any(process.poll() is None for process in started):
            if not keep_waiting():
                return None
            failed = any(process.poll() not in (None, 0) for process in started)
            # the others wait for a rank that failed until their collective times out
            if failed or time.monotonic() - begin > wanted.timeout_s:
                break
            time.sleep(_POLL_S)
    finally:
        exits = [process.poll() for process in started]
        for process in started:
            process.kill()
        for process in started:
            process.wait()
    ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
    results = [read_json(folder / f"rank-{rank}.json") for rank in ranks]
    gpu = order.device_kind == "gpu"
    values = report.values_of(results, order.local_devices, world=order.world_size, gpu=gpu)
    failures = report.failures_of(results, order.local_devices, exits)
    low = judge.shortfalls(values, wanted.references, least_share=wanted.least_share)
    return PreflightReport(
        values=values,
        shortfalls=[*failures, *low],
        seconds=time.monotonic() - begin,
        ranks=order.world_size,
    )


def _start(
    order: LaunchOrder,
    run_dir: RunDir,
    *,
    host: str,
    port: int,
    address: str,
    user: RunUser | None,
) -> list[subprocess.Popen[bytes]]:
    # nothing of the user's environment: the probe is not the user's program
    plain = order.model_copy(update={"env": {}, "spec": {}})
    common = command.environment(plain, run_dir, host=host, address=address)
    if user is not None:
        common |= wrap.user_environment(command.node_home(run_dir, order), user)
    common["PYTHONPATH"] = str(command.ROOT)
    started = []
    folder = run_dir.path / "preflight"
    for local in range(order.local_ranks):
        env = {
            **common,
            "RANK": str(order.rank_offset + local),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(order.local_ranks),
            "WORLD_SIZE": str(order.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        probe = [sys.executable, "-m", "workers.probe.rank", "--out", str(folder)]
        with open_to_append(folder / f"rank-{order.rank_offset + local}.log") as log:
            started.append(
                subprocess.Popen(
                    probe if user is None else wrap.as_user(probe, user),
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(before_program, user),
                )
            )
    return started
