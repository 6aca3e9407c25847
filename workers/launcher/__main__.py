"""`python -m workers.launcher --dir RUNDIR`: one detached supervisor for one attempt on this node.

Detaches from its caller at once; `supervisor.json` then names the living supervisor.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from workers.contracts.wire import versions
from workers.launcher import processes
from workers.launcher.isolation.acting import become
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.rundir import RunDir, read_json, write_json


def main() -> int:
    """Supervise the attempt to its end; always 0."""
    parser = argparse.ArgumentParser(
        prog="workers.launcher", description="Supervise one attempt on this node."
    )
    parser.add_argument(
        "--dir", required=True, type=Path, help="the attempt's run directory, claimed by the agent"
    )
    parser.add_argument(
        "--foreground", action="store_true", help="stay with the caller instead of detaching"
    )
    parser.add_argument("--node-file", type=Path, help="default: the one that agent.json names")
    parser.add_argument("--run-as", help="the Unix user of the run; default: the agent's")
    args = parser.parse_args()
    run_dir = RunDir(args.dir.absolute())
    user = RunUser.from_argument(args.run_as) if args.run_as else None
    if user is not None:
        become(user)  # before it opens any file that the user could replace
    if not args.foreground:
        _detach(run_dir)
    order_data, agent = read_json(run_dir.order), read_json(run_dir.agent)
    started = processes.start_time(os.getpid())
    facts = {
        "pid": os.getpid(),
        "start_time": started,
        "state": "launching",
        "fence": order_data.get("fence"),
        "release": versions.RELEASE,
        "wire": str(versions.WIRE),
    }
    write_json(run_dir.supervisor, {**facts, "node": agent.get("node"), "up": time.time()})

    # after supervisor.json: pydantic and redis take 0.25 s to import
    from workers.contracts.wire.node_messages import LaunchOrder
    from workers.launcher.shipping.redis_link import Link
    from workers.launcher.supervisor import Supervisor

    processes.adopt_orphans()
    order = LaunchOrder.from_dict(order_data)
    link = Link(args.node_file or Path(agent["node_file"]), order)
    # for the children; the agent identifies this process by supervisor.json
    os.environ |= {"ORRERY_FENCE": order.fence, "ORRERY_NODE": link.node.node}
    verdict = Supervisor(run_dir, order, link, user).run()
    print(
        f"attempt {order.run}.{order.attempt} ended: {verdict.exit_class}, {verdict.reason}",
        flush=True,
    )
    return 0


def _detach(run_dir: RunDir) -> None:
    """Fork into a new session whose parent exits; output goes into the run directory."""
    if os.fork():
        os._exit(0)
    os.setsid()
    log = os.open(run_dir.path / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
