"""What a panel shows, as typed JSON that dashboards and reports store. Does not depend on Django.

Version 1. A later version reads documents of this one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from orchestrator.panels.pattern import PatternError, compiled
from workers.contracts.base import Contract, Refused

VERSION: Final = 1
MOST_METRICS: Final = 50  # of one panel
MOST_MATCHES: Final = 50  # of a pattern
MOST_RUNS: Final = 100  # of one panel
MOST_COLUMNS: Final = 30  # of a table
LONGEST_TEXT: Final = 20_000
_MOST_ID: Final = 18  # digits

Kind = Literal[
    "line", "bar", "scatter", "histogram", "heatmap", "image", "text", "table", "markdown"
]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
Axis = Literal["step", "time", "tokens", "flops"]
Aggregate = Literal["last", "min", "max", "mean"]
Size = Literal["small", "medium", "large"]


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Id = Annotated[
    str, BeforeValidator(_as_text), Field(pattern=r"^[0-9]+$", min_length=1, max_length=_MOST_ID)
]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[float | None, Field(ge=-1e300, le=1e300)]


class RunsSource(Contract):
    """Whose data a panel shows: exactly one of the first four; the newest `limit` runs of it."""

    runs: Annotated[list[Id], Field(max_length=MOST_RUNS, description="these runs")] = []
    experiment: Annotated[Id | None, Field(description="runs of this experiment")] = None
    team: Annotated[Id | None, Field(description="runs of the members of this team")] = None
    query: Annotated[
        str | None, Field(max_length=2000, description="the query language of the runs table")
    ] = None
    limit: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 10

    @model_validator(mode="after")
    def _one(self) -> Self:
        chosen = [
            name
            for name in ("runs", "experiment", "team", "query")
            if getattr(self, name) not in (None, [])
        ]
        if len(chosen) != 1:
            given = " and ".join(chosen) if chosen else "none of them"
            raise Refused(
                f"a source has exactly one of runs, experiment, team and query, not {given}",
                'Use for example {"experiment": "3"}.',
            )
        return self


class PanelSpec(Contract):
    """One panel of a dashboard or report.

    `metrics` names metrics, or media of the kinds image, text, histogram and table. With `pattern`
    instead, each matching name makes a panel, or all make one with `combine`.
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$", description="unique on its page")]
    kind: Kind
    title: Annotated[str, Field(max_length=200, description="default: the metric's name")] = ""
    metrics: Annotated[list[Name], Field(max_length=MOST_METRICS)] = []
    pattern: Annotated[
        str, Field(max_length=200, description="a regular expression that names contain")
    ] = ""
    combine: Annotated[bool, Field(description="all matches of the pattern in one panel")] = False
    runs: Annotated[RunsSource | None, Field(description="default: those of the page")] = None
    x: Annotated[Axis, Field(description="of lines and heat maps")] = "step"
    x_metric: Annotated[
        str, Field(max_length=200, description="of scatter: a column of the runs table")
    ] = ""
    columns: Annotated[
        list[Name],
        Field(max_length=MOST_COLUMNS, description="of table: columns of the runs table"),
    ] = []
    aggregate: Annotated[
        Aggregate, Field(description="of bar, scatter, histogram and table: the value per run")
    ] = "last"
    smoothing: Annotated[float, Field(ge=0, le=0.999, description="weight of the average")] = 0.0
    x_log: bool = False
    y_log: bool = False
    x_min: Number = None
    x_max: Number = None
    y_min: Number = None
    y_max: Number = None
    bins: Annotated[int, Field(ge=2, le=200, description="of histogram")] = 30
    step: Annotated[
        int | None, Field(ge=0, le=2**62, description="of media: not after this step")
    ] = None
    text: Annotated[str, Field(max_length=LONGEST_TEXT, description="of markdown")] = ""
    size: Annotated[Size, Field(description="one, two or all columns of the page")] = "small"
    pinned: Annotated[bool, Field(description="first on the page, and on its subject's page")] = (
        False
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "markdown":
            return self
        if self.pattern:
            self._check_pattern()
        elif not self.metrics and not (self.kind == "table" and self.columns):
            raise Refused(
                f"a panel of kind {self.kind} shows no metric",
                "Add metrics or a pattern.",
                field="metrics",
            )
        if self.kind == "scatter" and not self.x_metric:
            raise Refused(
                "a scatter panel has no x axis", "Set a metric or parameter.", field="x_metric"
            )
        for axis in ("x", "y"):
            self._check_limits(axis)
        return self

    def _check_pattern(self) -> None:
        if self.metrics:
            message = "a panel has metrics or a pattern, not both"
            raise Refused(message, "Remove one of them.", field="pattern")
        try:
            compiled(self.pattern)
        except PatternError as error:
            message = f"at character {error.at + 1} of {self.pattern!r}: {error.message}"
            raise Refused(message, error.hint, field="pattern") from None

    def _check_limits(self, axis: str) -> None:
        low, high = getattr(self, f"{axis}_min"), getattr(self, f"{axis}_max")
        if low is not None and high is not None and low >= high:
            message = f"the {axis} axis ends at {high:g}, which is not above its start {low:g}"
            raise Refused(message, f"Use a number above {low:g}.", field=f"{axis}_max")
        if getattr(self, f"{axis}_log") and any(
            end is not None and end <= 0 for end in (low, high)
        ):
            name = f"{axis}_min" if low is not None and low <= 0 else f"{axis}_max"
            message = "a logarithmic axis has only positive limits"
            raise Refused(message, "Use a number above 0, or a linear axis.", field=name)

    def to_document(self) -> dict[str, Any]:
        """JSON data without values that are defaults; `id` and `kind` always."""
        return self.model_dump(mode="json", exclude_defaults=True)
