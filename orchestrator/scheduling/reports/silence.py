"""How long nodes and attempts have been silent, by what was observable at the broker.

Silence counts only while polls of the broker succeed: an outage of the broker, or a pause of this
process, is not silence. Does not depend on the database or on what silence leads to.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from workers.contracts.wire import liveness as wire

log = logging.getLogger(__name__)
POLL_S = 1.0
_MAX_STEP_S = 2 * POLL_S  # what one poll adds to the observed time at most
_CLOCK_TOLERANCE_S = 5.0  # stamps further ahead come from another broker's clock
_NODES = 250  # that one script reads, so that it blocks the broker for about a millisecond
_TEXT_BYTES = 2**20  # a longer heartbeat is ignored
_VALUE_BYTES = 64  # and so is a longer value of a lease
# ARGV: names of nodes, ids of their newest known heartbeats, and the fences of their open attempts
# (separated by spaces), each as one text of lines, which costs less than a list; then the limits.
# Returns `[node, id, text, ...]` of new heartbeats, and one text for all leases, which is read
# faster than a list: for each node with a lease its number and a line per fence, empty without
# lease; zero bytes separate nodes. Nodes are numbered from 1. What a node wrote in another format,
# or for other fences, counts as missing.
_READ: Final = """
local known, fences, beats, leases, i = {}, {}, {}, {}, 0
local longest, largest = tonumber(ARGV[5]), 2 * tonumber(ARGV[4])
for id in string.gmatch(ARGV[2], '([^\\n]*)\\n') do known[#known + 1] = id end
for line in string.gmatch(ARGV[3], '([^\\n]*)\\n') do fences[#fences + 1] = line end
for node in string.gmatch(ARGV[1], '([^\\n]*)\\n') do
  i = i + 1
  local size = redis.call('MEMORY', 'USAGE', HEARTBEAT) or 0
  local entries = size <= largest and redis.pcall('XREVRANGE', HEARTBEAT, '+', '-', 'COUNT', 1)
  local beat = entries and not entries.err and entries[1]
  if beat and beat[1] ~= known[i] and #beat[2][2] <= tonumber(ARGV[4]) then
    beats[#beats + 1] = i
    beats[#beats + 1] = beat[1]
    beats[#beats + 1] = beat[2][2]
  end
  local key, values, any = LEASES, {tostring(i)}, false
  for fence in string.gmatch(fences[i], '%S+') do
    local value, length = '', redis.pcall('HSTRLEN', key, fence)
    if type(length) == 'number' and length > 0 and length <= longest then
      value = string.gsub(redis.call('HGET', key, fence), '[%z\\n]', ' ')
      any = true
    end
    values[#values + 1] = value
  end
  if any then leases[#leases + 1] = table.concat(values, '\\n') end
end
return {beats, table.concat(leases, '\\0')}
"""
_SCRIPT: Final = _READ.replace(
    "HEARTBEAT", f"string.format('{wire.heartbeat_key('%s')}', node)"
).replace("LEASES", f"string.format('{wire.leases_key('%s')}', node)")


class NewHeartbeat(NamedTuple):
    """A new heartbeat of a node: sealed text, and its arrival by the broker's clock."""

    node: str
    stamp: float
    text: bytes


@dataclass
class _Mark:
    """The newest value of a heartbeat or lease, and the observed time when it was first seen."""

    value: Any
    seen_s: float
    stamp: float = -math.inf  # of a heartbeat, by the broker's clock


class Liveness:
    """Call `poll` once per POLL_S; silences are in seconds."""

    def __init__(self) -> None:
        self.observed_s = 0.0  # time during which polls succeeded
        self.broker_now = 0.0  # Unix seconds by the broker's clock
        self.broker_ahead_s = 0.0  # the broker's clock minus this machine's
        self._polled: float | None = None
        self._nodes: dict[str, _Mark] = {}
        self._leases: dict[tuple[str, str], _Mark] = {}
        self._lines: dict[str, _Mark] = {}  # all leases of a node, as read

    def poll(
        self,
        client: redis.Redis,
        nodes: Sequence[str],
        fences: Mapping[str, Sequence[str]] | None = None,
    ) -> list[NewHeartbeat]:
        """Read what these nodes wrote to the broker; the heartbeats that are new.

        `fences` are those of the open attempts by node; other leases are removed unread.
        Empty if the broker does not answer.
        """
        fences = fences or {}
        groups = [nodes[at : at + _NODES] for at in range(0, len(nodes), _NODES)]
        try:
            with client.pipeline(transaction=False) as pipe:
                pipe.time()
                for group in groups:
                    known = b"".join(self._newest(node) + b"\n" for node in group)
                    listed = "".join(f"{node}\n" for node in group)
                    held = "".join(" ".join(fences.get(node, ())) + "\n" for node in group)
                    pipe.eval(_SCRIPT, 0, listed, known, held, _TEXT_BYTES, _VALUE_BYTES)
                (seconds, micros), *answers = pipe.execute()
        except (redis.RedisError, OSError):
            self._polled = None
            return []
        beats, leases = [], []
        for group, (new, values) in zip(groups, answers, strict=True):
            beats += [
                (group[i - 1], id, text)
                for i, id, text in zip(new[::3], new[1::3], new[2::3], strict=True)
            ]
            for text in values.split(b"\0") if values else ():
                i, _, lines = text.partition(b"\n")
                node = group[int(i) - 1]
                leases.append((node, fences[node], lines))
        self._retain(fences)
        return self.update(seconds + micros / 1e6, beats, leases)

    def update(
        self,
        broker_now: float,
        beats: Iterable[tuple[str, bytes, bytes]] = (),
        leases: Iterable[tuple[str, Sequence[str], bytes]] = (),
        *,
        now: float | None = None,
    ) -> list[NewHeartbeat]:
        """Take one reading of the broker; `now` is the monotonic clock, for tests.

        `beats` are `(node, entry, text)` and `leases` `(node, fences, lines of their values)`.
        """
        now = time.monotonic() if now is None else now
        if self._polled is not None:
            self.observed_s += max(0.0, min(now - self._polled, _MAX_STEP_S))
        self._polled, self.broker_now = now, broker_now
        self.broker_ahead_s = broker_now - time.time()
        fresh = []
        for node, entry, text in beats:
            # a node chooses the id of its own entry, but not beyond the broker's clock
            stamp = min(wire.stamp_of(entry), broker_now)
            if self._mark(self._nodes, node, entry, stamp):
                fresh.append(NewHeartbeat(node, stamp, text))
        for node, fences, lines in leases:
            if self._mark(self._lines, node, (fences, lines)):
                for fence, value in zip(fences, lines.split(b"\n"), strict=True):
                    if value:
                        self._mark(self._leases, (fence, node), value)
        return fresh

    def arrived(self, node: str, text: bytes) -> NewHeartbeat:
        """A heartbeat that came another way than by polling; it arrived now."""
        stamp = time.time() + self.broker_ahead_s
        self._mark(self._nodes, node, stamp, stamp)
        return NewHeartbeat(node, stamp, text)

    def node_silence(self, node: str) -> float:
        """Seconds without heartbeat of the node; counts from now on for an unknown node."""
        return self._silence(self._nodes.setdefault(node, _Mark(None, self.observed_s)))

    def lease_silence(self, fence: str, node: str) -> float:
        """Seconds since the lease of an attempt on a node was renewed; inf if it never was."""
        mark = self._leases.get((fence, node))
        return math.inf if mark is None else self._silence(mark)

    def forget(self, fence: str) -> None:
        """Remove the leases of an attempt that has ended."""
        for key in [key for key in list(self._leases) if key[0] == fence]:  # engines have threads
            self._leases.pop(key, None)

    def _retain(self, fences: Mapping[str, Sequence[str]]) -> None:
        """Remove leases of attempts that are not open."""
        if len(self._leases) > sum(map(len, fences.values())):
            held = {(fence, node) for node, listed in fences.items() for fence in listed}
            self._leases = {key: mark for key, mark in list(self._leases.items()) if key in held}
            self._lines = {node: mark for node, mark in self._lines.items() if node in fences}

    def _silence(self, mark: _Mark) -> float:
        observed_s = self.observed_s - mark.seen_s
        if mark.stamp > self.broker_now + _CLOCK_TOLERANCE_S:
            return observed_s
        return max(0.0, min(self.broker_now - mark.stamp, observed_s))

    def _mark(
        self, marks: dict[Any, _Mark], key: Any, value: Any, stamp: float = -math.inf
    ) -> bool:
        """Record a value; True if it is new."""
        mark = marks.get(key)
        if mark is not None and mark.value == value:
            return False
        marks[key] = _Mark(value, self.observed_s, stamp)
        return True

    def _newest(self, node: str) -> bytes:
        """The id of the newest known heartbeat, or an empty text."""
        mark = self._nodes.get(node)
        return mark.value if mark is not None and isinstance(mark.value, bytes) else b""


liveness = Liveness()
