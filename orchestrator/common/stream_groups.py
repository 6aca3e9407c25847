"""Reads many Redis streams as one consumer group, in fair turns, with one call for all of them.

Each node writes to streams of its own. A script visits those with entries, takes an equal share
of bytes from each, and creates missing groups; a stream that cannot be read delays no other.
Readers delete each entry with its acknowledgement, so the length of a stream is what waits.
Does not depend on the content of entries.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis

from orchestrator.common.streams import FORGET_S, milliseconds_of

# hash: `<group> <consumer>` → Unix seconds of its newest read, by the broker's clock
READERS: Final = "orrery:readers"
DEAD_S: Final = 3.0  # a live reader reads at least every second
_SHARE_BYTES: Final = 65_536  # a stream's turn, unless there is space for more

_SEEN: Final = f"""
local group, me, now = ARGV[1], ARGV[2], redis.call('TIME')
local seconds = now[1] + now[2] / 1e6
redis.call('HSET', '{READERS}', group .. ' ' .. me, string.format('%.3f', seconds))
"""
# ARGV: group, consumer, streams and positions as lines, entries per stream, bytes in all.
# Returns entries as `[stream, id, fields, …]` and the streams that may have more; streams are
# numbered from 1. Entries that were deleted while they were pending are acknowledged.
_READ: Final = (
    _SEEN
    + """
local count, limit, size = tonumber(ARGV[5]), tonumber(ARGV[6]), 0
local positions, waiting, found, cut = {}, {}, {}, {}
for position in string.gmatch(ARGV[4], '([^\\n]*)\\n') do positions[#positions + 1] = position end
local i = 0
for stream in string.gmatch(ARGV[3], '([^\\n]*)\\n') do
  i = i + 1
  local length = redis.pcall('XLEN', stream)
  if type(length) == 'number' and length > 0 then waiting[#waiting + 1] = {i, stream} end
end
local share = math.max(SHARE, limit / math.max(1, #waiting))
local function read(stream, position)
  local function once()
    return redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', 1, 'STREAMS', stream, position)
  end
  local answer = once()
  if answer and answer.err and string.find(answer.err, 'NOGROUP') then
    redis.pcall('XGROUP', 'CREATE', stream, group, '0')
    answer = once()
  end
  return answer and not answer.err and answer[1][2][1]
end
local rows, taken = waiting, {}
while #rows > 0 and size < limit do
  local following = {}
  for _, pair in ipairs(rows) do
    local index, stream = pair[1], pair[2]
    local mine, entry = 0, true
    taken[index] = taken[index] or 0
    while size < limit and mine < share and taken[index] < count do
      entry = read(stream, positions[index])
      if not entry then break end
      taken[index] = taken[index] + 1
      if positions[index] ~= '>' then positions[index] = entry[1] end
      if entry[2] then
        local bytes = 0
        for _, text in ipairs(entry[2]) do bytes = bytes + #text end
        size, mine = size + bytes, mine + bytes
        found[#found + 1] = index
        found[#found + 1] = entry[1]
        found[#found + 1] = entry[2]
      else
        redis.call('XACK', stream, group, entry[1])
      end
    end
    if entry and taken[index] < count then following[#following + 1] = pair
    elseif entry then cut[#cut + 1] = index end
  end
  rows = following
end
for _, pair in ipairs(rows) do cut[#cut + 1] = pair[1] end
return {found, cut}
""".replace("SHARE", str(_SHARE_BYTES))
)
# ARGV: group, consumer, streams as lines, entries in all, bytes in all, seconds until a consumer
# counts as dead. Returns entries of dead consumers, as above, and whether there may be more.
_CLAIM: Final = (
    _SEEN
    + """
local count, limit, dead_s, size, i = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), 0, 0
local found, seen = {}, {}
local readers = redis.call('HGETALL', 'READERS')
for at = 1, #readers, 2 do
  local age = seconds - (tonumber(readers[at + 1]) or 0)
  seen[readers[at]] = age
  if age > FORGET then redis.call('HDEL', 'READERS', readers[at]) end
end
for stream in string.gmatch(ARGV[3], '([^\\n]*)\\n') do
  i = i + 1
  local length = redis.pcall('XLEN', stream)
  local summary = type(length) == 'number' and length > 0
    and redis.pcall('XPENDING', stream, group)
  for _, row in ipairs(summary and not summary.err and summary[4] or {}) do
    local name = row[1]
    local age = seen[group .. ' ' .. name]
    if name ~= me and (not age or age >= dead_s) then
      local range = redis.call('XPENDING', stream, group, '-', '+', count, name)
      for _, pending in ipairs(range) do
        if #found / 3 >= count or size >= limit then return {found, 1} end
        local entry = redis.call('XCLAIM', stream, group, me, 0, pending[1])[1]
        if entry and entry[2] then
          for _, text in ipairs(entry[2]) do size = size + #text end
          found[#found + 1] = i
          found[#found + 1] = entry[1]
          found[#found + 1] = entry[2]
        else
          redis.call('XACK', stream, group, pending[1])
        end
      end
      if #range >= count then return {found, 1} end
    end
  end
end
return {found, 0}
""".replace("READERS", READERS).replace("FORGET", str(FORGET_S))
)
# ARGV: group, streams as lines. Returns the number of entries, the id of the oldest, and how long
# ago a reader read, in seconds as text; empty texts for none.
_WAITING: Final = f"""
local total, oldest, oldest_ms, newest = 0, '', nil, nil
for stream in string.gmatch(ARGV[2], '([^\\n]*)\\n') do
  local length = redis.pcall('XLEN', stream)
  if type(length) == 'number' and length > 0 then
    total = total + length
    local id = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][1]
    local ms = tonumber(string.match(id, '^%d+'))
    if not oldest_ms or ms < oldest_ms then oldest, oldest_ms = id, ms end
  end
end
local readers = redis.call('HGETALL', '{READERS}')
for at = 1, #readers, 2 do
  local stamp = tonumber(readers[at + 1])
  if stamp and string.sub(readers[at], 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then
    newest = math.max(newest or 0, stamp)
  end
end
local now = redis.call('TIME')
local idle = newest and string.format('%.3f', now[1] + now[2] / 1e6 - newest) or ''
return {{total, oldest, idle}}
"""


class StreamEntry(NamedTuple):
    """An entry of one of the streams; `key` is unique among all of them."""

    stream: str
    id: bytes
    fields: dict[bytes, bytes]

    @property
    def key(self) -> bytes:
        """Stream and id as one text."""
        return b"%s %s" % (self.stream.encode(), self.id)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one call returned; `cut` names the streams that may have more."""

    entries: list[StreamEntry]
    cut: list[str]


@dataclass(slots=True)
class GroupReader:
    """One consumer of a group that exists on every stream. Methods raise errors of Redis."""

    group: str
    consumer: str
    _first: str = ""  # the stream whose turn is first, after one that was cut

    def read(
        self, client: redis.Redis, streams: Sequence[str], *, count: int, limit_bytes: int
    ) -> Reading:
        """New entries: about `limit_bytes` in all, at most `count` of each stream."""
        at = streams.index(self._first) if self._first in streams else 0
        turns = [*streams[at:], *streams[:at]]
        reading = self.read_pending(
            client, dict.fromkeys(turns, ">"), count=count, limit_bytes=limit_bytes
        )
        # a stream that got nothing is first next time
        read = {entry.stream for entry in reading.entries}
        self._first = next((name for name in reading.cut if name not in read), "")
        return reading

    def read_pending(
        self, client: redis.Redis, positions: Mapping[str, str], *, count: int, limit_bytes: int
    ) -> Reading:
        """Entries behind a position in each stream, that this consumer was given before.

        The position `>` stands for new entries.
        """
        if not positions:
            return Reading([], [])
        names = list(positions)
        arguments = [_lines(names), _lines(positions.values()), count, limit_bytes]
        answer, cut = self._call(client, _READ, *arguments)
        return Reading(_entries(names, answer), [names[index - 1] for index in cut])

    def claim(
        self,
        client: redis.Redis,
        streams: Sequence[str],
        *,
        count: int,
        limit_bytes: int,
        dead_s: float | None = None,
    ) -> tuple[list[StreamEntry], bool]:
        """Take over entries of dead consumers; those entries, and whether there may be more.

        A consumer is dead if it has not read any stream for `dead_s`, by default DEAD_S.
        """
        dead_s = DEAD_S if dead_s is None else dead_s
        answer, more = self._call(client, _CLAIM, _lines(streams), count, limit_bytes, dead_s)
        return _entries(streams, answer), bool(more)

    def acknowledge(self, client: redis.Redis, entries: Iterable[StreamEntry]) -> None:
        """Acknowledge and delete entries whose effect is committed."""
        by_stream: dict[str, list[bytes]] = {}
        for entry in entries:
            by_stream.setdefault(entry.stream, []).append(entry.id)
        with client.pipeline(transaction=True) as pipe:
            for stream, ids in by_stream.items():
                pipe.xack(stream, self.group, *ids)
                pipe.xdel(stream, *ids)
            pipe.execute()

    def _call(self, client: redis.Redis, script: str, *arguments: Any) -> Any:
        return client.register_script(script)(args=[self.group, self.consumer, *arguments])


def waiting(client: redis.Redis, group: str, streams: Iterable[str]) -> dict[str, Any]:
    """`{waiting, lag_s, idle_s}` of all streams together.

    `waiting` are entries that the group has not acknowledged, `lag_s` is the age of the oldest,
    `idle_s` the time since a reader last read, None before the first.
    """
    answer: Any = client.register_script(_WAITING)(args=[group, _lines(streams)])
    number, oldest, idle = answer
    age_s = time.time() - milliseconds_of(oldest) / 1000 if oldest else 0.0
    return {
        "waiting": int(number),
        "lag_s": round(max(0.0, age_s), 1),
        "idle_s": float(idle) if idle else None,
    }


def _entries(streams: Sequence[str], answer: Sequence[Any]) -> list[StreamEntry]:
    """From `[stream, id, fields, …]`."""
    return [
        StreamEntry(streams[index - 1], id, dict(zip(fields[::2], fields[1::2], strict=True)))
        for index, id, fields in zip(answer[::3], answer[1::3], answer[2::3], strict=True)
    ]


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)
