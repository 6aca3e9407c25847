"""The faults: each injects one and returns when and how it ends. Chosen by seed.

Does not check anything; `invariants` does.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from tests.chaos.cluster import AgentNode, Cluster, Part
from tests.chaos.proxy import Proxy

End = Callable[[], None]
SHORT_S = 8.0  # longer than a node may be silent, shorter than until it is lost
OUTAGE_S = (15.0, 25.0)  # longer than until a node is lost


@dataclass
class Injector:
    """Injects faults into a cluster; equal seeds give equal sequences of faults and durations."""

    cluster: Cluster
    random: random.Random
    only: str = ""  # inject only faults whose name contains this text
    counts: Counter[str] = field(default_factory=Counter)
    partitioned: set[str] = field(default_factory=set)  # names of nodes that were cut off
    _ends: list[tuple[float, End]] = field(default_factory=list)

    def inject(self) -> str:
        """Inject one fault; its name. `tick` ends it later."""
        faults = [name for name in FAULTS if self.only in name]
        name = self.random.choices(faults, [FAULTS[fault][0] for fault in faults])[0]
        if FAULTS[name][1](self):
            self.counts[name] += 1
            return name
        return ""

    def tick(self) -> None:
        """End the faults that are due."""
        now = time.monotonic()
        due = [end for at, end in self._ends if at <= now]
        self._ends = [(at, end) for at, end in self._ends if at > now]
        for end in due:
            end()

    def heal(self) -> None:
        """End all faults now."""
        for _, end in self._ends:
            end()
        self._ends.clear()
        self.cluster.heal()

    def after(self, seconds: float, end: End) -> None:
        """Call `end` in that many seconds."""
        self._ends.append((time.monotonic() + seconds, end))

    def node(self) -> AgentNode:
        """A random node."""
        return self.random.choice(self.cluster.agents)

    def proxy(self) -> Proxy:
        """A random proxy: a node's or the control plane's."""
        return self.random.choice(self.cluster.proxies())

    def process(self, kind: str) -> psutil.Process | None:
        """A random process of a kind; None without one."""
        processes = sorted(self.cluster.processes(kind), key=lambda process: process.pid)
        return self.random.choice(processes) if processes else None


def _kill_process(kind: str) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        process = injector.process(kind)
        if process is None:
            return False
        with suppress(psutil.Error):
            process.kill()
        return True

    return fault


def _pause_process(kind: str) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        process = injector.process(kind)
        if process is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)

        def end() -> None:
            with suppress(psutil.Error):
                process.resume()

        injector.after(injector.random.uniform(0.2, SHORT_S), end)
        return True

    return fault


def _kill_part(
    choose: Callable[[Injector], Part], seconds: tuple[float, float] = (0.0, SHORT_S)
) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        part = choose(injector)
        part.kill()
        injector.after(injector.random.uniform(*seconds), part.start)
        return True

    return fault


def _pause_part(
    choose: Callable[[Injector], Part], seconds: tuple[float, float] = (0.2, SHORT_S)
) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        part = choose(injector)
        part.pause()
        injector.after(injector.random.uniform(*seconds), part.resume)
        return True

    return fault


def _cut(injector: Injector) -> bool:
    injector.proxy().cut()
    return True


def _refuse(injector: Injector) -> bool:
    proxy = injector.proxy()
    proxy.refuse()
    injector.after(injector.random.uniform(0.2, SHORT_S), proxy.accept)
    return True


def _set(
    attribute: str, values: tuple[float, float] | None, seconds: tuple[float, float]
) -> Callable[[Injector], bool]:
    """Set a proxy's attribute to a random value, or to True, for some time."""

    def fault(injector: Injector) -> bool:
        proxy, off = injector.proxy(), 0.0 if values else False
        setattr(proxy, attribute, injector.random.uniform(*values) if values else True)
        injector.after(injector.random.uniform(*seconds), lambda: setattr(proxy, attribute, off))
        return True

    return fault


def _full_disk(name: str) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        disk = injector.cluster.disks.get(name)
        if disk is None:
            return False
        disk.fill()
        injector.after(injector.random.uniform(0.2, SHORT_S), disk.free)
        return True

    return fault


def _partition(seconds: tuple[float, float]) -> Callable[[Injector], bool]:
    def fault(injector: Injector) -> bool:
        node = injector.node()
        if node.network is None:
            return False
        node.network.partition()
        injector.partitioned.add(node.name)
        injector.after(injector.random.uniform(*seconds), node.network.join)
        return True

    return fault


def _scheduler(injector: Injector) -> Part:
    return injector.cluster.scheduler


def _ingest(injector: Injector) -> Part:
    return injector.cluster.ingest


def _broker(injector: Injector) -> Part:
    return injector.cluster.broker


def _agent(injector: Injector) -> Part:
    return injector.node().agent


# name -> (weight, fault); a fault returns False if there was nothing to break
FAULTS: dict[str, tuple[int, Callable[[Injector], bool]]] = {
    "kill rank": (20, _kill_process("rank")),
    "kill torchrun": (8, _kill_process("torchrun")),
    "kill supervisor": (16, _kill_process("supervisor")),
    "pause rank": (16, _pause_process("rank")),
    "pause supervisor": (16, _pause_process("supervisor")),
    "kill agent": (8, _kill_part(_agent)),
    "pause agent": (8, _pause_part(_agent)),
    "kill scheduler": (4, _kill_part(_scheduler)),
    "pause scheduler": (6, _pause_part(_scheduler)),
    "kill ingest": (4, _kill_part(_ingest)),
    "pause ingest": (6, _pause_part(_ingest)),
    "kill broker": (2, _kill_part(_broker)),
    "pause broker": (2, _pause_part(_broker)),
    "long outage of the broker": (1, _kill_part(_broker, OUTAGE_S)),
    "long silence of the broker": (1, _pause_part(_broker, OUTAGE_S)),
    "long outage of the scheduler": (1, _kill_part(_scheduler, OUTAGE_S)),
    "long outage of ingest": (1, _kill_part(_ingest, OUTAGE_S)),
    "long outage of an agent": (1, _kill_part(_agent, OUTAGE_S)),
    "long silence of an agent": (1, _pause_part(_agent, OUTAGE_S)),
    "short partition of a node": (8, _partition((0.5, 4.0))),
    "long partition of a node": (1, _partition(OUTAGE_S)),
    "cut connections": (40, _cut),
    "refuse connections": (10, _refuse),
    "delay messages": (16, _set("delay_s", (0.01, 0.5), (0.5, 4.0))),
    "double and reorder messages": (24, _set("double_s", (0.1, 5.0), (0.5, 4.0))),
    "drop replies": (16, _set("drop_replies", None, (0.2, 2.0))),
    "drop requests": (12, _set("drop_requests", None, (0.2, 6.0))),
    "full disk of the nodes": (3, _full_disk("nodes")),
    "full disk of the database": (2, _full_disk("database")),
    "full disk of the broker": (2, _full_disk("broker")),
}
