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

from workers.agent import identity


def main() -> int:
    """The exit code; 1 if the node cannot join."""
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

    machine = Machine(
        name=args.name, address=args.address or _own_address(args.redis), slots=args.devices
    )
    try:
        folder = identity.node_folder(home, args.name)
        lock = identity.acquire_lock(folder)
        token = args.join or os.environ.get("ORRERY_JOIN") or None
        node_file = identity.identify(
            folder, machine.inventory(), redis_url=args.redis, token=token, patience_s=args.patience
        )
    except (identity.NotJoined, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    agent = Agent(home=home, machine=machine, node_file=node_file, heartbeat_s=heartbeat_seconds())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, frame: agent.stop())
    agent.run()
    if agent.consumer_hung:  # supervisors are detached: the new process re-attaches
        os.execv(sys.executable, [sys.executable, "-m", "workers.agent", *sys.argv[1:]])
    agent.close(stop_runs=args.stop_runs)
    lock.close()
    logging.shutdown()
    os._exit(0)  # do not wait for threads that wait for Redis


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
        "--address", help="where other nodes reach this one (default: the address towards Redis)"
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


def _own_address(redis_url: str) -> str:
    """The address this machine uses to reach Redis; loopback if Redis runs on this machine."""
    from urllib.parse import urlsplit

    parts = urlsplit(redis_url)
    if parts.scheme == "unix" or parts.hostname in (None, "localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port or 6379))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


if __name__ == "__main__":
    sys.exit(main())
