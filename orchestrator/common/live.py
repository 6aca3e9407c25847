"""Numbered live frames: written with the data in one transaction, published after its commit,
replayed on demand.

Knows topics and text; does not know what a frame says, who listens, or whether anybody does.
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

Body = Mapping[str, Any] | str  # a mapping, or the text of a JSON object that is sent as it stands

REPLAY_LIMIT = 2000  # frames; a longer way back is cheaper as a fresh snapshot
# after a failed publish: each further try would hold its caller for a connection timeout
_PAUSE_S = 1.0
_BATCH = 5000

_NEXT = (
    "INSERT INTO common_topic (name, epoch, head) VALUES (%s, %s, %s)"
    " ON CONFLICT (name) DO UPDATE SET head = common_topic.head + excluded.head RETURNING epoch, "
    "head"
)

_silent_until = 0.0


class Head(NamedTuple):
    """Where a topic stands: its epoch, the newest frame's number, and the oldest one still kept (0:
    none).
    """

    epoch: str
    seq: int
    oldest: int


class New(NamedTuple):
    """A frame to append."""

    topic: str
    type: str
    body: Body


def append(topic: str, type: str, body: Body) -> int:
    """Writes the topic's next frame inside the caller's transaction and publishes it after commit;
    returns its number.

    The row of the topic stays locked until that commit, so frames become visible in the order of
    their numbers. In one
    transaction append to a run's topic before `fleet`, and to runs by ascending id: that order
    cannot deadlock.
    A Redis that is away fails nothing: the frame is in the database and the web processes read it
    there.
    """
    return append_many([New(topic, type, body)])[0]


def append_many(frames: Sequence[New]) -> list[int]:
    """As `append` for several frames at once, one publish pipeline for all; numbers in the order
    given.
    """
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
    """The final text of a frame, as stored, published and sent.

    Numbers that are not finite become strings.
    """
    if not isinstance(body, str):
        body = dumps(body)
    head = f'{{"epoch":"{epoch}","seq":{seq},"type":"{type}"'
    rest = body.lstrip()[1:]
    return head + rest if rest.lstrip().startswith("}") else f"{head},{rest}"


def dumps(value: Any) -> str:
    """Compact JSON; NaN and infinities as the strings "NaN", "Infinity", "-Infinity", which JSON
    can carry.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_told(value), separators=(",", ":"), allow_nan=False, default=str)


def head(topic: str) -> Head:
    """Where the topic stands; a topic nobody wrote to yet has an empty epoch and number 0."""
    row = Topic.objects.filter(name=topic).values_list("epoch", "head").first()
    if row is None:
        return Head("", 0, 0)
    oldest = (
        Frame.objects.filter(topic_id=topic).order_by("seq").values_list("seq", flat=True).first()
    )
    return Head(row[0], row[1], oldest or 0)


def heads(topics: Iterable[str]) -> dict[str, tuple[str, int]]:
    """`{topic: (epoch, number of its newest frame)}` in one query, for those that exist."""
    rows = Topic.objects.filter(name__in=list(topics)).values_list("name", "epoch", "head")
    return {name: (epoch, newest) for name, epoch, newest in rows}


def frames_after(topic: str, after: int, limit: int = REPLAY_LIMIT) -> list[tuple[int, str]]:
    """Up to `limit` frames `(seq, text)` numbered above `after`, ascending.

    Pruned ones are simply not there.
    """
    rows = (
        Frame.objects.filter(topic_id=topic, seq__gt=after)
        .order_by("seq")
        .values_list("seq", "text")
    )
    return list(rows[:limit])


def prune(*, before: datetime) -> int:
    """Deletes frames created before that time, a few thousand a transaction; returns how many.

    Topics stay.
    """
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
    """Raises the topic's head by `count` under its row lock, making the topic when it is new:
    `(epoch, new head)`.
    """
    with connection.cursor() as cursor:
        cursor.execute(_NEXT, [topic, new_epoch(), count])
        row = cursor.fetchone()
    return row[0], row[1]


def _publish(frames: list[tuple[str, str]]) -> None:
    """Best effort.

    Subscribers notice a missed number by the next one, or by reading heads every few seconds.
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
            "%d live frames not published, pages read them from the database: %s",
            len(frames),
            error,
        )


def _told(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _told(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_told(item) for item in value]
    return value
