"""Numbered live frames: written in the transaction of their data, published after its commit.

Subscribers that missed frames replay them from the database. Does not depend on the content of
frames or on the subscribers.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import redis
from django.db import connection, transaction

from orchestrator.common.models import Frame, Topic, new_epoch
from orchestrator.common.redis import quick_client
from workers.contracts.wire.names import live_channel

log = logging.getLogger(__name__)

Body = Mapping[str, Any] | str  # a mapping, or the text of a JSON object

REPLAY_LIMIT = 2000  # frames; for a longer gap a fresh snapshot is cheaper
# after a failed publish, because each further attempt can block for a connection timeout
_PAUSE_S = 1.0
_BATCH = 5000

_NEXT = (
    "INSERT INTO common_topic (name, epoch, head) VALUES (%s, %s, %s)"
    " ON CONFLICT (name) DO UPDATE SET head = common_topic.head + excluded.head RETURNING epoch, "
    "head"
)

_silent_until = 0.0


class Head(NamedTuple):
    """A topic's epoch, the number of its newest frame, and of the oldest retained one (0: none)."""

    epoch: str
    seq: int
    oldest: int


class NewFrame(NamedTuple):
    """A frame to append."""

    topic: str
    type: str
    body: Body


def append(topic: str, type: str, body: Body) -> int:
    """Write the topic's next frame in the caller's transaction, publish it after commit.

    Returns the frame's number. The topic's row stays locked until the commit, so frames become
    visible in the order of their numbers. To avoid deadlocks, append to a run's topic before
    `fleet`, and to runs by ascending id. An unreachable Redis is not an error: web processes read
    the frame from the database.
    """
    return append_many([NewFrame(topic, type, body)])[0]


def append_many(frames: Sequence[NewFrame]) -> list[int]:
    """`append` for several frames with one publish pipeline; returns numbers in input order."""
    if not frames:
        return []
    counts: dict[str, int] = {}
    for frame in frames:
        counts[frame.topic] = counts.get(frame.topic, 0) + 1
    with transaction.atomic():
        heads = {topic: _advance(topic, count) for topic, count in counts.items()}
        following = {topic: head - counts[topic] for topic, (_, head) in heads.items()}
        rows = []
        for frame in frames:
            following[frame.topic] += 1
            seq = following[frame.topic]
            text = frame_text(heads[frame.topic][0], seq, frame.type, frame.body)
            rows.append(Frame(topic_id=frame.topic, seq=seq, text=text))
        Frame.objects.bulk_create(rows, batch_size=500)
        sent = [(row.topic_id, row.text) for row in rows]
        transaction.on_commit(lambda: _publish(sent), robust=True)
    return [row.seq for row in rows]


def frame_text(epoch: str, seq: int, type: str, body: Body) -> str:
    """The text of a frame as stored, published and sent; non-finite numbers are strings."""
    if not isinstance(body, str):
        body = dumps(body)
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


def head(topic: str) -> Head:
    """The topic's newest number; a topic without frames has an empty epoch and number 0."""
    row = Topic.objects.filter(name=topic).values_list("epoch", "head").first()
    if row is None:
        return Head("", 0, 0)
    oldest = (
        Frame.objects.filter(topic_id=topic).order_by("seq").values_list("seq", flat=True).first()
    )
    return Head(row[0], row[1], oldest or 0)


def heads(topics: Iterable[str]) -> dict[str, tuple[str, int]]:
    """`{topic: (epoch, number of its newest frame)}` of the existing topics, in one query."""
    rows = Topic.objects.filter(name__in=list(topics)).values_list("name", "epoch", "head")
    return {name: (epoch, newest) for name, epoch, newest in rows}


def frames_after(topic: str, after: int, limit: int = REPLAY_LIMIT) -> list[tuple[int, str]]:
    """Up to `limit` frames `(seq, text)` numbered above `after`, ascending, without pruned ones."""
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


def _advance(topic: str, count: int) -> tuple[str, int]:
    """Add `count` to the topic's head under its row lock; returns `(epoch, new head)`.

    Creates a missing topic.
    """
    with connection.cursor() as cursor:
        cursor.execute(_NEXT, [topic, new_epoch(), count])
        row = cursor.fetchone()
    return row[0], row[1]


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
