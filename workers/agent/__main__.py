"""`python -m workers.agent --redis URL --join TOKEN`: runs a node's agent in the foreground.

The token is needed once; afterwards the node has its own secret under its home.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path

from workers.agent import identity, isolation
from workers.contracts import topology_path
from workers.contracts.wire.node_messages import Isolation
from workers.launcher.cluster_engines.own_address import own_address

INCOMPATIBLE = 76  # EX_PROTOCOL of sysexits.h: a restart does not help


def main() -> int:
    """The exit code; 1 if the node cannot join, 76 if its version is refused."""
    args = _arguments()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for chatty in ("celery", "kombu", "celery.worker"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    home = args.home.expanduser().resolve()

    from workers.agent.agent import Agent, heartbeat_seconds
    from workers.agent.inventory import Machine

    try:
        folder = identity.node_folder(home, args.name)
        lock = identity.acquire_lock(folder)
        runs = isolation.choose(home, os.environ.get("ORRERY_RUN_AS", ""))
        machine = Machine(
            name=args.name,
            address=args.address or own_address(args.redis),
            slots=args.devices,
            isolation=runs.report,
            topology=topology_path.path(args.topology) if args.topology else None,
        )
        token = args.join or os.environ.get("ORRERY_JOIN") or None
        node_file = identity.identify(
            folder, machine.inventory(), redis_url=args.redis, token=token, patience_s=args.patience
        )
        machine.broker_user = identity.broker_user(node_file)
    except identity.Incompatible as error:
        print(error, file=sys.stderr)
        return INCOMPATIBLE
    except (identity.NotJoined, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    agent = Agent(
        home=home,
        machine=machine,
        node_file=node_file,
        heartbeat_s=heartbeat_seconds(),
        run_as=runs.run_as,
    )
    _log_isolation(runs.report)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, frame: agent.stop())
    agent.run()
    if agent.consumer_hung:  # supervisors are detached: the new process re-attaches
        os.execv(sys.executable, [sys.executable, "-m", "workers.agent", *sys.argv[1:]])
    agent.close(stop_runs=args.stop_runs)
    lock.close()
    logging.shutdown()
    os._exit(0)  # do not wait for threads that wait for Redis


def _log_isolation(report: Isolation) -> None:
    log = logging.getLogger(__name__)
    if report.method == "agent":
        log.warning(
            "Runs execute as this agent's user, so submitters can read and change everything it "
            "can: %s",
            report.detail,
        )
    else:
        log.info("Runs execute under %s", report.detail)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="workers.agent", description="Offer this machine to an Orrery control plane."
    )
    default_redis = os.environ.get("REDIS_URL")
    parser.add_argument(
        "--redis",
        default=default_redis,
        required=default_redis is None,
        help="redis://, rediss:// or unix://",
    )
    parser.add_argument("--join", help="join token, needed once (or ORRERY_JOIN)")
    parser.add_argument(
        "--name", default=_default_name(), help="the node's name (default: this host's)"
    )
    parser.add_argument(
        "--devices", type=int, help="CPU slots to offer if there is no GPU (default 4)"
    )
    parser.add_argument(
        "--home",
        type=Path,
        default=Path(os.environ.get("ORRERY_HOME", "var")),
        help="data directory",
    )
    parser.add_argument(
        "--address", help="where other nodes reach this one (default: the address toward Redis)"
    )
    parser.add_argument(
        "--topology",
        default=os.environ.get("ORRERY_TOPOLOGY"),
        help="this node's path in the tree of switches, such as row-1/rack-3 (or ORRERY_TOPOLOGY)",
    )
    parser.add_argument(
        "--stop-runs",
        action="store_true",
        help="on SIGTERM also stop this node's runs (embedded mode)",
    )
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds to wait for the answer to a join"
    )
    return parser.parse_args()


def _default_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:63] or "node"


if __name__ == "__main__":
    sys.exit(main())
