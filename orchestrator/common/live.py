"""Numbered live frames: written in the transaction of their data, published after its commit.

Subscribers that missed frames replay them from the database. Frames of a run are numbered at once,
under the lock of its topic. Nearly every transaction writes to `fleet`, so its frames wait in a
table of their own and are numbered after the commit, by one process at a time: no transaction
waits for another. Does not depend on the content of
frames or on the subscribers.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import redis
from django.db import connection, transaction

from orchestrator.common.models import Frame, Topic, WaitingFrame, new_epoch
from orchestrator.common.redis import quick_client
from workers.contracts.wire.names import live_channel

log = logging.getLogger(__name__)

Body = Mapping[str, Any] | str  # a mapping, or the text of a JSON object

REPLAY_LIMIT = 2000  # frames; for a longer gap a fresh snapshot is cheaper
# after a failed publish, because each further attempt can block for a connection timeout
_PAUSE_S = 1.0
_BATCH = 5000

_NEXT = (
    "INSERT INTO common_topic (name, epoch, head) VALUES {rows}"
    " ON CONFLICT (name) DO UPDATE SET head = common_topic.head + excluded.head"
    " RETURNING name, epoch, head"
)
_TOPICS_AT_ONCE = 200

SHARED = frozenset({"fleet"})  # topics that are numbered after the commit
_NUMBERED_AT_ONCE = 500

_OWNER = re.compile(r'\{(?:"epoch":"[^"]*","seq":\d+,)?"type":"\w+","owner":(\d+)[,}]')

_silent_until = 0.0


class TopicHead(NamedTuple):
    """A topic's epoch, the number of its newest frame, and of the oldest retained one (0: none)."""

    epoch: str
    seq: int
    oldest: int


def owned_by(owner_id: int) -> dict[str, int]:
    """The first entry of a `fleet` frame about a run: only those who see its owner's runs get it.

    Every `fleet` frame about a run starts with it; frames that name a run without it reach only
    users who see all runs.
    """
    return {"owner": owner_id}


def owner_of(text: str) -> int | None:
    """The owner of the run that a frame is about; None if every user may see the frame.

    0, which is not a user, for a frame that names a run but not its owner.
    """
    if match := _OWNER.match(text):
        return int(match[1])
    return 0 if '"run":' in text else None


class NewFrame(NamedTuple):
    """A frame to append."""

    topic: str
    type: str
    body: Body


def append(topic: str, type: str, body: Body) -> int:
    """Write the topic's next frame in the caller's transaction, publish it after commit.

    Returns the frame's number; 0 for a shared topic, which is numbered after the commit. The row of
    another topic stays locked until the commit, so frames become visible in the order of their
    numbers. To avoid deadlocks, append to runs by ascending id. An unreachable Redis is not an
    error: web processes read the frame from the database.
    """
    return append_many([NewFrame(topic, type, body)])[0]


def append_many(frames: Sequence[NewFrame]) -> list[int]:
    """`append` for several frames with one publish pipeline; returns numbers in input order."""
    if not frames:
        return []
    shared = [frame for frame in frames if frame.topic in SHARED]
    own = [frame for frame in frames if frame.topic not in SHARED]
    with transaction.atomic(savepoint=False):  # an error ends the caller's transaction
        numbers = iter(_append_own(own))
        if shared:
            WaitingFrame.objects.bulk_create(
                WaitingFrame(topic=frame.topic, type=frame.type, body=_text(frame.body))
                for frame in shared
            )
            topics = sorted({frame.topic for frame in shared})
            transaction.on_commit(lambda: [number_waiting(topic) for topic in topics], robust=True)
    return [0 if frame.topic in SHARED else next(numbers) for frame in frames]


def number_waiting(topic: str) -> int:
    """Number and publish the topic's waiting frames; returns how many.

    Returns at once while another process does so: that process looks again after its commit, so it
    also numbers what is committed meanwhile.
    """
    count = 0
    while WaitingFrame.objects.filter(topic=topic).exists():
        with transaction.atomic():
            row = _lock_topic(topic)
            if row is None:
                return count
            rows = WaitingFrame.objects.filter(topic=topic).order_by("pk")[:_NUMBERED_AT_ONCE]
            waiting = list(rows)
            frames = [
                Frame(topic_id=topic, seq=seq, text=frame_text(row.epoch, seq, new.type, new.body))
                for seq, new in enumerate(waiting, row.head + 1)
            ]
            Frame.objects.bulk_create(frames)
            WaitingFrame.objects.filter(pk__in=[item.pk for item in waiting]).delete()
            Topic.objects.filter(name=topic).update(head=row.head + len(frames))
            sent = [(topic, frame.text) for frame in frames]
            transaction.on_commit(partial(_publish, sent), robust=True)
        count += len(frames)
    return count


def announce(topic: str, type: str, body: Body) -> None:
    """Publish a frame without number or storage, for readings that the next ones replace.

    Nothing is written to the database, and a subscriber that is not connected misses the frame.
    """
    _publish([(topic, unnumbered_text(type, body))])


def unnumbered_text(type: str, body: Body) -> str:
    """The text of a frame without a number."""
    return f'{{"type":"{type}",{_text(body).lstrip()[1:]}'


def frame_text(epoch: str, seq: int, type: str, body: Body) -> str:
    """The text of a frame as stored, published and sent; non-finite numbers are strings."""
    body = _text(body)
    head = f'{{"epoch":"{epoch}","seq":{seq},"type":"{type}"'
    rest = body.lstrip()[1:]
    return head + rest if rest.lstrip().startswith("}") else f"{head},{rest}"


def dumps(value: Any) -> str:
    """Compact JSON; NaN and infinities become the strings "NaN", "Infinity" and "-Infinity"."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(
            _encode_non_finite(value), separators=(",", ":"), allow_nan=False, default=str
        )


def head(topic: str) -> TopicHead:
    """The topic's newest number; a topic without frames has an empty epoch and number 0."""
    if topic in SHARED:
        number_waiting(topic)  # if a process ended between its commit and the numbering
    row = Topic.objects.filter(name=topic).values_list("epoch", "head").first()
    if row is None:
        return TopicHead("", 0, 0)
    oldest = (
        Frame.objects.filter(topic_id=topic).order_by("seq").values_list("seq", flat=True).first()
    )
    return TopicHead(row[0], row[1], oldest or 0)


def heads(topics: Iterable[str]) -> dict[str, tuple[str, int]]:
    """`{topic: (epoch, number of its newest frame)}` of the existing topics, in one query."""
    rows = Topic.objects.filter(name__in=list(topics)).values_list("name", "epoch", "head")
    return {name: (epoch, newest) for name, epoch, newest in rows}


def frames_after(topic: str, after: int, limit: int = REPLAY_LIMIT) -> list[tuple[int, str]]:
    """Up to `limit` frames `(seq, text)` numbered above `after`, ascending, without pruned ones."""
    if topic in SHARED:
        number_waiting(topic)
    rows = (
        Frame.objects.filter(topic_id=topic, seq__gt=after)
        .order_by("seq")
        .values_list("seq", "text")
    )
    return list(rows[:limit])


def prune(*, before: datetime) -> int:
    """Delete frames created before that time in batches; returns how many. Topics stay."""
    deleted = 0
    while True:
        ids = list(
            Frame.objects.filter(created__lt=before)
            .order_by("created")
            .values_list("id", flat=True)[:_BATCH]
        )
        if not ids:
            return deleted
        deleted += Frame.objects.filter(
            id__gte=min(ids), id__lte=max(ids), created__lt=before
        ).delete()[0]


def _append_own(frames: Sequence[NewFrame]) -> list[int]:
    """Number the frames under the locks of their topics, until the caller commits."""
    counts: dict[str, int] = {}
    for frame in frames:
        counts[frame.topic] = counts.get(frame.topic, 0) + 1
    heads = _advance(counts)
    following = {topic: head - counts[topic] for topic, (_, head) in heads.items()}
    rows = []
    for frame in frames:
        following[frame.topic] += 1
        seq = following[frame.topic]
        text = frame_text(heads[frame.topic][0], seq, frame.type, frame.body)
        rows.append(Frame(topic_id=frame.topic, seq=seq, text=text))
    Frame.objects.bulk_create(rows, batch_size=500)
    if rows:
        sent = [(row.topic_id, row.text) for row in rows]
        transaction.on_commit(lambda: _publish(sent), robust=True)
    return [row.seq for row in rows]


def _lock_topic(name: str) -> Topic | None:
    """The topic's row, locked; None while another transaction numbers its frames."""
    skip = connection.features.has_select_for_update_skip_locked
    row = Topic.objects.select_for_update(skip_locked=skip).filter(name=name).first()
    if row is None:
        Topic.objects.bulk_create([Topic(name=name)], ignore_conflicts=True)
        row = Topic.objects.select_for_update(skip_locked=skip).filter(name=name).first()
    return row


def _text(body: Body) -> str:
    return body if isinstance(body, str) else dumps(body)


def _advance(counts: Mapping[str, int]) -> dict[str, tuple[str, int]]:
    """Add each count to its topic's head under row locks; returns `{topic: (epoch, new head)}`.

    Locks the topics in the order of `counts` and creates missing ones.
    """
    heads, topics = {}, list(counts)
    for start in range(0, len(topics), _TOPICS_AT_ONCE):
        some = topics[start : start + _TOPICS_AT_ONCE]
        values = [item for topic in some for item in (topic, new_epoch(), counts[topic])]
        with connection.cursor() as cursor:
            cursor.execute(_NEXT.format(rows=", ".join(["(%s, %s, %s)"] * len(some))), values)
            for topic, epoch, newest in cursor.fetchall():
                heads[topic] = epoch, newest
    return heads


def _publish(frames: list[tuple[str, str]]) -> None:
    """Publish, best effort.

    Subscribers detect a missing number by the next one, or when they poll the heads.
    """
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    try:
        with quick_client().pipeline(transaction=False) as pipeline:
            for topic, text in frames:
                pipeline.publish(live_channel(topic), text)
            pipeline.execute()
    except (redis.RedisError, OSError) as error:
        _silent_until = time.monotonic() + _PAUSE_S
        log.warning(
            "%d live frames not published; pages will read them from the database: %s",
            len(frames),
            error,
        )


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_non_finite(item) for item in value]
    return value
