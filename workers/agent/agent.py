"""One node's agent: orders in, heartbeats out, attempts watched; stops promptly and leaves
supervisors running.

Knows no database. What it must remember over a restart is in the run directories and the node file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from workers.agent.attempts import Attempts
from workers.agent.inventory import Machine
from workers.agent.orders import Orders
from workers.agent.reports import Reports
from workers.contracts.wire import names
from workers.contracts.wire.node_messages import ControlOrder, ProbeOrder
from workers.launcher.shipping.redis_link import NodeFile

log = logging.getLogger(__name__)
_INVENTORY_EVERY_S = 600.0
# orders waiting for so long while none was taken: the consumer has lost its connection for good
_DEAF_S = 15.0


class Agent:
    def __init__(
        self, *, home: Path, machine: Machine, node_file: Path, heartbeat_s: float
    ) -> None:
        known = NodeFile.read(node_file)
        self.machine, self._heartbeat_s = machine, heartbeat_s
        self.attempts = Attempts(home, known.node, node_file)
        self._reports = Reports(node=known.node, secret=known.secret, redis_url=known.redis_url)
        self._orders = Orders(
            node=known.node, secret=known.secret, redis_url=known.redis_url, agent=self
        )
        self._stopping = threading.Event()
        self._beat_now = threading.Event()
        self._inventory_due = 0.0
        self._heard = time.monotonic()
        self.deaf = False  # stopped because its consumer hung
        self.name = known.node

    def run(self) -> None:
        """Until `stop` is called. Beats from the calling thread."""
        alive = self.attempts.attach()
        log.info("Node %s is up; %d attempts re-attached", self.name, alive)
        self._orders.start()
        while not self._stopping.is_set():
            self._beat()
            self._beat_now.wait(self._heartbeat_s)
            self._beat_now.clear()

    def stop(self) -> None:
        self._stopping.set()
        self._beat_now.set()

    def close(self, *, stop_runs: bool) -> None:
        """Stops consuming, then, in embedded mode, the runs."""
        self._orders.stop()
        if stop_runs:
            self.attempts.stop_all(grace_s=4.0, patience_s=7.0)

    def report_unknown(self, order: ControlOrder) -> None:
        self._reports.unknown(order.attempt_id, order.fence)

    def answer_probe(self, order: ProbeOrder) -> None:
        if order.inventory:
            self._inventory_due = 0.0
        self._beat_now.set()

    def _beat(self) -> None:
        try:
            self.attempts.watch()
            due = time.monotonic() >= self._inventory_due
            inventory = self.machine.inventory() if due else None
            sent = self._reports.heartbeat(
                self.machine.samples(self.attempts.ranks()), self.attempts.seen(), inventory
            )
            if sent and due:
                self._inventory_due = time.monotonic() + _INVENTORY_EVERY_S
            if self._reports.orders_waiting() == 0:
                self._heard = time.monotonic()
            elif time.monotonic() - max(self._heard, self._orders.last_order) > _DEAF_S:
                log.error(
                    "Orders wait and none was taken for %.0f s; starting this agent again", _DEAF_S
                )
                self.deaf = True
                self.stop()
            if not self._orders.alive:
                log.warning("The order consumer ended; starting it again")
                self._orders.start()
        except Exception:
            log.exception("A heartbeat failed; the next one follows")


def heartbeat_seconds() -> float:
    return float(os.environ.get("ORRERY_HEARTBEAT_S", names.HEARTBEAT_S))
