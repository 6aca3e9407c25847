"""Live topics and their numbered frames: a topic is a name, a frame is text."""

from __future__ import annotations

import secrets

from django.db import models


def new_epoch() -> str:
    """A random epoch for a new topic."""
    return secrets.token_hex(4)


class Topic(models.Model):
    """One ordered stream of frames, `run:12` or `fleet`; `head` numbers its newest frame."""

    name = models.CharField(max_length=80, primary_key=True)
    epoch = models.CharField(max_length=16, default=new_epoch)
    head = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}@{self.head}"


class Frame(models.Model):
    """One committed frame, stored as the text that sockets send; a replay sends the same bytes."""

    topic = models.ForeignKey(
        Topic, on_delete=models.CASCADE, related_name="frames", db_index=False
    )
    seq = models.BigIntegerField()
    text = models.TextField()
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["topic", "seq"], name="frame_topic_seq")]
        indexes = [models.Index(fields=["created"], name="frame_created")]

    def __str__(self) -> str:
        return f"{self.topic_id}#{self.seq}"


class WaitingFrame(models.Model):
    """A committed frame of a topic that many transactions write, before it has its number."""

    topic = models.CharField(max_length=80)
    type = models.CharField(max_length=40)
    body = models.TextField()

    def __str__(self) -> str:
        return f"{self.topic} {self.type}"
