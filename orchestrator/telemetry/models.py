"""Series in packed chunks, the newest points of each writer, its cursor, and log chunks. Packing is
in `chunks`.

A point is first appended to its writer's tail, all metrics of a rank together, one row a tick. Once
256 have gathered
they move into one chunk per metric. So a point is written to a chunk once, and a tick costs rows
per rank, not per
metric: 64 ranks x 30 metrics are 64 small rows a tick instead of 1920.
"""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from orchestrator.runs.models import Run


class Series(models.Model):
    """One metric of one rank of one attempt, as far as it lies in chunks; newer points are in the
    writer's tail.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="series", db_index=False)
    attempt = models.PositiveIntegerField()
    rank = models.PositiveIntegerField()
    name = models.CharField(max_length=120)
    points = models.BigIntegerField(default=0)
    chunks = models.PositiveIntegerField(default=0)  # rows at level 0
    # points in the last chunk while it has room, else 0
    open = models.PositiveIntegerField(default=0)
    last_seq = models.BigIntegerField(default=0)
    first_step = models.BigIntegerField(default=0)
    last_step = models.BigIntegerField(default=0)
    last_time = models.FloatField(default=0)  # Unix seconds
    non_finite = models.BigIntegerField(default=0)
    ordered = models.BooleanField(default=True)  # steps strictly ascending in order of arrival

    class Meta:
        verbose_name_plural = "series"
        constraints = [
            models.UniqueConstraint(fields=["run", "name", "attempt", "rank"], name="series_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id}.{self.attempt} r{self.rank} {self.name}"


class Chunk(models.Model):
    """Level 0: up to 256 points. Level n: the summaries of 256 full chunks of level n-1, written
    once.

    `summary` is the chunk's own line in the level above (`pyramid`), so that it can be read without
    the data. Data
    that retention has thinned away is empty.
    """

    series = models.ForeignKey(
        Series, on_delete=models.CASCADE, related_name="chunk_set", db_index=False
    )
    level = models.PositiveSmallIntegerField(default=0)
    index = models.PositiveIntegerField()
    last_time = models.FloatField()  # Unix seconds of the newest point, for retention
    summary = models.BinaryField()
    data = models.BinaryField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["series", "level", "index"], name="chunk_once")
        ]

    def __str__(self) -> str:
        return f"{self.series_id}/{self.level}/{self.index}"


class Cursor(models.Model):
    """What has arrived from one writer, as ranges of its own numbers: a repeat is dropped, a late
    one accepted.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="cursors", db_index=False)
    attempt = models.PositiveIntegerField()
    rank = models.IntegerField()
    stream = models.CharField(max_length=8)  # points | events | logs
    # the two below are JSON read by this room alone and rewritten every tick; as text no database
    # parses them again
    ranges = models.TextField(default="[]")  # [[first, last], ...], merged and ascending
    latest = models.TextField(default="{}")  # name → [step, value], of points
    last_seq = models.BigIntegerField(default=0)
    last_step = models.BigIntegerField(default=0)
    last_time = models.FloatField(default=0)  # Unix seconds
    tail_points = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "rank", "stream"], name="cursor_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id}.{self.attempt} r{self.rank} {self.stream}"


class Tail(models.Model):
    """Newest points of one writer, all metrics, not yet in chunks: a few rows in order of arrival
    (`store`).
    """

    cursor = models.ForeignKey(Cursor, on_delete=models.CASCADE, related_name="tail")
    count = models.PositiveIntegerField()
    data = models.BinaryField()

    def __str__(self) -> str:
        return f"{self.cursor_id}+{self.count}"


class LogChunk(models.Model):
    """Consecutive lines of one rank, joined by newlines; `first_seq` numbers the first of them."""

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="log_chunks", db_index=False
    )
    attempt = models.PositiveIntegerField()
    rank = models.IntegerField()  # -1: the supervisor's own words
    first_seq = models.BigIntegerField()
    lines = models.PositiveIntegerField()
    time = models.DateTimeField(default=timezone.now)
    text = models.TextField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "rank", "first_seq"], name="log_chunk_once"
            )
        ]
        indexes = [models.Index(fields=["time"], name="log_chunk_time")]

    def __str__(self) -> str:
        return f"{self.run_id}.{self.attempt} r{self.rank} lines {self.first_seq}+{self.lines}"
