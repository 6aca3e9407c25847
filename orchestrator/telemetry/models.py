"""Tables of packed series, each writer's tail and cursor, and log chunks; see `packing.chunks`.

A point is first appended to its writer's tail, all metrics of a rank together, one row per tick.
Every 256 points move to one chunk per metric. So a point is written to a chunk once, and a tick
costs rows per rank, not per metric: 64 ranks × 30 metrics are 64 small rows instead of 1920.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from orchestrator.runs.models import Run


class Series(models.Model):
    """The chunks of one metric of one rank and attempt; the writer's tail has newer points."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="series", db_index=False)
    attempt = models.PositiveIntegerField()
    rank = models.PositiveIntegerField()
    name = models.CharField(max_length=120)
    points = models.BigIntegerField(default=0)
    chunks = models.PositiveIntegerField(default=0)  # rows at level 0
    # points in the last chunk if it is not full, else 0
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
    """Level 0: up to 256 points. Level n: the summaries of 256 full chunks of level n-1.

    `summary` is the chunk's row in the level above (`pyramid`), readable without the data.
    Retention empties `data`.
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
    """Sequence numbers that have arrived from one writer: repeats are dropped, gaps can fill."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="cursors", db_index=False)
    attempt = models.PositiveIntegerField()
    rank = models.IntegerField()
    stream = models.CharField(max_length=8)  # points | events | logs
    # the next two are JSON that only this package reads and every tick rewrites; stored as text,
    # which databases do not parse
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
    """Newest points of one writer, all metrics, not in chunks yet; rows in order of arrival."""

    cursor = models.ForeignKey(Cursor, on_delete=models.CASCADE, related_name="tail")
    count = models.PositiveIntegerField()
    data = models.BinaryField()

    def __str__(self) -> str:
        return f"{self.cursor_id}+{self.count}"


class MetricSummary(models.Model):
    """One metric of a run in a few numbers, over the points that a chart without `rank` shows.

    Numbers that are not finite are left out; a metric without a finite number has nulls.
    """

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="metric_summaries", db_index=False
    )
    name = models.CharField(max_length=120)
    last = models.FloatField(null=True)
    min = models.FloatField(null=True)
    max = models.FloatField(null=True)
    mean = models.FloatField(null=True)
    # over all points; of a long run over the means of its chunks, weighted by their points
    median = models.FloatField(null=True)
    points = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="metric_summary_once")]
        indexes = [
            models.Index(fields=["name", "last", "run"], name="metric_summary_last"),
            models.Index(fields=["name", "min", "run"], name="metric_summary_min"),
            models.Index(fields=["name", "max", "run"], name="metric_summary_max"),
            models.Index(fields=["name", "mean", "run"], name="metric_summary_mean"),
            models.Index(fields=["name", "median", "run"], name="metric_summary_median"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.name}={self.last}"


class MetricName(models.Model):
    """A metric that an owner's runs have, for completion without reading all summaries."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False
    )
    name = models.CharField(max_length=120)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="metric_name_once")]

    def __str__(self) -> str:
        return self.name


class StaleSummary(models.Model):
    """A run with points that its metric summaries lack; `taken` while they are computed."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, related_name="+")
    since = models.DateTimeField(default=timezone.now)
    taken = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["since"], name="stale_summary_since")]

    def __str__(self) -> str:
        return str(self.run_id)


class LogChunk(models.Model):
    """Consecutive lines of one rank, joined by newlines; `first_seq` numbers the first."""

    run = models.ForeignKey(
        Run, on_delete=models.CASCADE, related_name="log_chunks", db_index=False
    )
    attempt = models.PositiveIntegerField()
    rank = models.IntegerField()  # -1: the supervisor
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
