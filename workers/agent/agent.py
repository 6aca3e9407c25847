"""One node's agent: receives orders, sends heartbeats, watches attempts.

Stops promptly and leaves supervisors running. State that must survive a restart is in the run
directories and the node file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from workers.agent import order_transport
from workers.agent.attempts import Attempts
from workers.agent.inventory import Machine
from workers.agent.node_counters import NodeCounters
from workers.agent.orders import OrderConsumer
from workers.agent.reports import Reporter
from workers.contracts.wire import names
from workers.contracts.wire.maintenance.node_probe import NodeProbed
from workers.contracts.wire.maintenance.storage import CollectOrder
from workers.contracts.wire.node_messages import ControlOrder, ProbeOrder
from workers.launcher.isolation.run_user import RunAs
from workers.launcher.maintenance import garbage
from workers.launcher.shipping.redis_link import NodeFile
from workers.probe.node import ProbeError, probe_node

log = logging.getLogger(__name__)
_INVENTORY_EVERY_S = 600.0
# orders wait this long and none was consumed: the consumer lost its connection permanently
_HUNG_S = 15.0
_LONGEST_HUNG_S = 240.0
_RESTARTS = "AGENT_CONSUMER_RESTARTS"  # variable: restarts for this reason in a row


class Agent:
    """Connects the order consumer, the attempts and the reporter of one node."""

    def __init__(
        self,
        *,
        home: Path,
        machine: Machine,
        node_file: Path,
        heartbeat_s: float,
        run_as: RunAs | None = None,
    ) -> None:
        known = NodeFile.read(node_file)
        self.machine, self._heartbeat_s = machine, heartbeat_s
        self.attempts = Attempts(home, known.node, node_file, run_as)
        self._reports = Reporter(node=known.node, secret=known.secret, redis_url=known.redis_url)
        self._orders = OrderConsumer(
            node=known.node, secret=known.secret, redis_url=known.redis_url, agent=self
        )
        self._stopping = threading.Event()
        self._beat_now = threading.Event()
        self._counters = NodeCounters()
        self._inventory_due = 0.0
        self._collecting = threading.Lock()
        self._measuring = threading.Lock()
        self._problems: dict[int, str] = {}  # as last sent
        self._last_consumed = time.monotonic()
        self._restarts = int(os.environ.get(_RESTARTS, "0"))
        self._started = time.monotonic()
        self.consumer_hung = False  # whether the agent stopped for that reason
        self.name = known.node

    def run(self) -> None:
        """Send heartbeats from the calling thread until `stop` is called."""
        alive = self.attempts.attach()
        log.info("Node %s is up; %d attempts re-attached", self.name, alive)
        self._orders.start()
        while not self._stopping.is_set():
            self._beat()
            self._beat_now.wait(self._heartbeat_s)
            self._beat_now.clear()

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()
        self._beat_now.set()

    def close(self, *, stop_runs: bool) -> None:
        """Stop consuming orders, then the runs if `stop_runs` (embedded mode)."""
        self._orders.stop()
        if stop_runs:
            self.attempts.stop_all(grace_s=4.0, patience_s=7.0)

    def report_unknown(self, order: ControlOrder) -> None:
        """Report that this node does not have the order's attempt."""
        self._reports.unknown(order.attempt_id, order.fence)

    def answer_probe(self, order: ProbeOrder) -> None:
        """Send a heartbeat now, with the inventory if requested; measure in a thread."""
        if order.measure_s is not None:
            threading.Thread(
                target=self._measure, args=(order.measure_s,), name="probe", daemon=True
            ).start()
        if order.inventory:
            self._inventory_due = 0.0
        self._beat_now.set()

    def collect_garbage(self, order: CollectOrder) -> None:
        """Delete and scan in a thread of its own, because disks may be slow; one at a time."""
        threading.Thread(target=self._collect, args=(order,), name="garbage", daemon=True).start()

    def _measure(self, seconds: float) -> None:
        """Probe the devices unless attempts run; a launch meanwhile ends the probe."""
        if not self._measuring.acquire(blocking=False):
            return  # its result answers this request too
        try:
            if active := self.attempts.active():
                raise ProbeError(f"{len(active)} attempts run on the node; wait until they end")
            devices = self.machine.inventory().devices
            gpu = devices[0].kind == "gpu"
            report = probe_node(
                seconds=seconds,
                ranks=len(devices) if gpu else min(len(devices), os.cpu_count() or 1),
                device=devices[0].catalogue or ("" if gpu else "cpu"),
                gpu=gpu,
                keeps_on=lambda: not self.attempts.active() and not self._stopping.is_set(),
            )
            answer = NodeProbed(report=report)
        except ProbeError as problem:
            answer = NodeProbed(problem=str(problem)[:500])
        except Exception as error:
            log.exception("The probe failed")
            answer = NodeProbed(problem=f"the probe failed: {type(error).__name__}")
        finally:
            self._measuring.release()
        if not self._reports.probed(answer):
            log.warning("The result of a probe was not sent")

    def _collect(self, order: CollectOrder) -> None:
        with self._collecting:
            try:
                for report in garbage.collect(self.attempts.home, order):
                    if not self._reports.collected(report):
                        log.warning("A storage report was not sent; the order will be repeated")
                        return
            except Exception:
                log.exception("Garbage collection failed; the order will be repeated")

    @property
    def hung_s(self) -> float:
        """Seconds after which orders that wait show a lost connection.

        Doubles with each restart in a row: on a busy machine a consumer may need longer to start.
        """
        if self._orders.last_order > self._started:  # an order was consumed since the start
            self._restarts = 0
        return min(_LONGEST_HUNG_S, _HUNG_S * 2.0 ** min(self._restarts, 10))

    def _beat(self) -> None:
        try:
            self.attempts.watch()
            problems = self.machine.problems()
            due = problems != self._problems or time.monotonic() >= self._inventory_due
            inventory = self.machine.inventory() if due else None
            sent = self._reports.heartbeat(
                self.machine.samples(self.attempts.rank_pids()),
                self.attempts.active(),
                inventory,
                dropped_orders=order_transport.dropped.total(),
                machine=self._counters.sample(),
            )
            if sent and due:
                for index in sorted(set(problems) - set(self._problems)):
                    log.error("Device %d cannot be used: %s", index, problems[index])
                self._problems = problems
                self._inventory_due = time.monotonic() + _INVENTORY_EVERY_S
            if self._orders.busy or self._reports.orders_waiting() == 0:
                self._last_consumed = time.monotonic()
            elif time.monotonic() - max(self._last_consumed, self._orders.last_order) > self.hung_s:
                log.error(
                    "Orders wait and none was consumed for %.0f s; restarting this agent",
                    self.hung_s,
                )
                os.environ[_RESTARTS] = str(self._restarts + 1)
                self.consumer_hung = True
                self.stop()
            if not self._orders.alive:
                log.warning("The order consumer ended; restarting it")
                self._orders.start()
        except Exception:
            log.exception("A heartbeat failed; the next one follows")


def heartbeat_seconds() -> float:
    """Seconds between heartbeats."""
    return float(os.environ.get("ORRERY_HEARTBEAT_S", names.HEARTBEAT_S))
