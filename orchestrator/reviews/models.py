"""Reviews of files with their decisions, and comparisons of two served models with their votes."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class Review(models.Model):
    """A copy of a file of examples that people decide about, line by line."""

    name = models.CharField(max_length=160)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="reviews"
    )
    created = models.DateTimeField(default=timezone.now)
    source = models.CharField(max_length=4096)  # the file that was copied
    run = models.BigIntegerField(null=True)  # the produce run that wrote it
    format = models.CharField(max_length=24)  # contracts ExampleFormat
    lines = models.PositiveIntegerField()
    sha256 = models.CharField(max_length=64)  # of the copy
    index = models.BinaryField()  # offset of each line, uint64, deflated

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


class LineReview(models.Model):
    """The current decision about a line; a line without one has no row, or an empty decision."""

    class Decision(models.TextChoices):
        """What happens to the line. `swap`: of a pair, the rejected answer is the better one."""

        UNDECIDED = "", "undecided"
        KEEP = "keep", "keep"
        DROP = "drop", "drop"
        SWAP = "swap", "swap"

    review = models.ForeignKey(Review, on_delete=models.CASCADE, related_name="decisions")
    line = models.PositiveIntegerField()  # from 1
    version = models.PositiveIntegerField(default=1)  # every change raises it
    decision = models.CharField(max_length=4, choices=Decision.choices, blank=True)
    rating = models.PositiveSmallIntegerField(null=True)  # 1 to 5
    edited = models.JSONField(null=True)  # the line's new content; null: as it was
    note = models.CharField(max_length=2000, blank=True)
    by = models.CharField(max_length=150)  # username of the last change
    time = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["review", "line"], name="line_review_once")]
        indexes = [models.Index(fields=["review", "decision", "line"], name="line_review_decision")]

    def __str__(self) -> str:
        return f"{self.review_id}:{self.line} {self.decision}"


class LineChange(models.Model):
    """One change of a line, never altered: who, when, and what it then was."""

    review = models.ForeignKey(Review, on_delete=models.CASCADE, related_name="changes")
    line = models.PositiveIntegerField()
    version = models.PositiveIntegerField()
    by = models.CharField(max_length=150)
    time = models.DateTimeField()
    content = models.JSONField()  # decision, rating, edited, note

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["review", "line", "version"], name="line_change_once")
        ]

    def __str__(self) -> str:
        return f"{self.review_id}:{self.line}@{self.version}"


class Claim(models.Model):
    """A line that a person is looking at, so that others get the next one."""

    review = models.ForeignKey(Review, on_delete=models.CASCADE, related_name="claims")
    line = models.PositiveIntegerField()
    by = models.CharField(max_length=150)
    until = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["review", "by"], name="claim_one_each")]

    def __str__(self) -> str:
        return f"{self.review_id}:{self.line} {self.by}"


class ModelComparison(models.Model):
    """Two served models that answer the same messages side by side."""

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="model_comparisons"
    )
    created = models.DateTimeField(default=timezone.now)
    runs = models.JSONField()  # the ids of the two serve runs
    model_ids = models.JSONField()
    sampling = models.JSONField(default=dict)  # temperature, top_p, max_tokens, system

    def __str__(self) -> str:
        return f"{self.id} {' / '.join(map(str, self.model_ids))}"


class ComparisonTurn(models.Model):
    """One message with both answers. Which model is shown as `a` is drawn by chance per turn."""

    class Choice(models.TextChoices):
        """The vote."""

        NONE = "", "no vote"
        A = "a", "a"
        B = "b", "b"
        TIE = "tie", "tie"
        BOTH_BAD = "both_bad", "both bad"

    comparison = models.ForeignKey(ModelComparison, on_delete=models.CASCADE, related_name="turns")
    conversation = models.PositiveIntegerField()
    messages = models.JSONField()  # the prompt: what both models answered
    answers = models.JSONField()  # as shown: [a, b]
    first_model = models.PositiveSmallIntegerField()  # 0 or 1: which model is `a`
    choice = models.CharField(max_length=8, choices=Choice.choices, blank=True)
    by = models.CharField(max_length=150)
    created = models.DateTimeField(default=timezone.now)
    voted = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["comparison", "conversation", "id"], name="turn_conversation")
        ]

    def __str__(self) -> str:
        return f"{self.comparison_id}.{self.id} {self.choice}"


class ReviewedFile(models.Model):
    """A file that decisions or votes were written to."""

    review = models.ForeignKey(
        Review, null=True, on_delete=models.SET_NULL, related_name="reviewed_files"
    )
    comparison = models.ForeignKey(
        ModelComparison, null=True, on_delete=models.SET_NULL, related_name="reviewed_files"
    )
    path = models.CharField(max_length=4096, unique=True)
    format = models.CharField(max_length=24)
    lines = models.PositiveIntegerField()
    bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)
    by = models.CharField(max_length=150)
    created = models.DateTimeField(default=timezone.now)
    options = models.JSONField(default=dict)

    class Meta:
        db_table = "reviews_dataset"

    def __str__(self) -> str:
        return self.path


class AnswerVote(models.Model):
    """A person's choice between an example's answers before and after training, made blindly."""

    class Outcome(models.TextChoices):
        """The choice: `win` is the answer after training."""

        WIN = "win", "win"
        LOSS = "loss", "loss"
        TIE = "tie", "tie"

    run = models.ForeignKey("runs.Run", on_delete=models.CASCADE, related_name="answer_votes")
    example = models.PositiveIntegerField()  # row of results.jsonl, from 0
    outcome = models.CharField(max_length=4, choices=Outcome.choices)
    by = models.CharField(max_length=150)
    time = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "example", "by"], name="answer_vote_once")
        ]

    def __str__(self) -> str:
        return f"{self.run_id}:{self.example} {self.outcome}"
