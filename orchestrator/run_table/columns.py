"""The columns of the runs table: what a name means, and how columns are written in a URL.

`min(val_loss)` is a column of a metric, `train.optimizer.lr` of a spec, `state` of a run. A short
name of a spec value (`lr`) is allowed if only one path ends with it. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from orchestrator.run_table.language import AGGREGATES, QueryError

# columns of a run: name → type
RUN_COLUMNS: Final = {
    "id": "number",
    "name": "text",
    "state": "text",
    "kind": "text",
    "model": "text",
    "owner": "text",
    "experiment": "text",
    "tag": "text",
    "pool": "text",
    "notes": "text",
    "exit": "text",
    "devices": "number",
    "priority": "number",
    "attempt": "number",
    "created": "time",
    "started": "time",
    "ended": "time",
    "duration": "duration",
    "age": "duration",
}
# those without an order of their own: several values, or none that a database can sort by
UNSORTABLE: Final = frozenset(("tag", "notes", "exit", "duration"))
_WRITTEN: Final = re.compile(r"^(last|min|max|mean|median)\((.+)\)$")


@dataclass(frozen=True, slots=True)
class Column:
    """`source` is run, metric or config; `key` writes the column in URLs and exports."""

    source: str
    name: str
    aggregate: str = ""
    type: str = "number"

    @property
    def key(self) -> str:
        """The column as it is written."""
        if self.source == "metric" and self.aggregate != "last":
            return f"{self.aggregate}({self.name})"
        return self.name


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """The metrics and spec values of the runs that a user may see."""

    metrics: frozenset[str] = frozenset()
    config: frozenset[str] = frozenset()

    def column(self, name: str, aggregate: str = "", at: int = 0) -> Column:
        """The column of a name. Raises QueryError with the nearest name for an unknown one."""
        prefix, _, rest = name.partition(".")
        if prefix == "metric" and rest in self.metrics:
            return Column("metric", rest, aggregate or "last")
        if prefix == "config" and name not in self.config and (path := self.path(rest, at)):
            return _of_config(path, aggregate, at)
        if name in RUN_COLUMNS and not aggregate:
            return Column("run", name, "", RUN_COLUMNS[name])
        if name in self.metrics:
            return Column("metric", name, aggregate or "last")
        if path := self.path(name, at):
            return _of_config(path, aggregate, at)
        near = self.nearest(name)
        raise QueryError(f"no run has a value {name!r}", at, f"Use {near!r}." if near else "")

    def path(self, name: str, at: int) -> str:
        """The path of a spec value by its full or last name; empty without one.

        Raises QueryError if several paths end with the name.
        """
        if name in self.config:
            return name
        ends = sorted(path for path in self.config if path.endswith(f".{name}"))
        if len(ends) > 1:
            raise QueryError(
                f"{name!r} may be {', '.join(ends[:-1])} or {ends[-1]}", at, f"Write {ends[0]}."
            )
        return ends[0] if ends else ""

    def nearest(self, name: str) -> str:
        """The known name that is most like this one; or empty."""
        short = {path.rpartition(".")[2] for path in self.config}
        known = sorted({*RUN_COLUMNS, *self.metrics, *self.config, *short})
        return next(iter(difflib.get_close_matches(name, known, 1, 0.6)), "")


def _of_config(path: str, aggregate: str, at: int) -> Column:
    if aggregate:
        raise QueryError(
            f"{path!r} has one value per run, so {aggregate}() does not apply", at, f"Write {path}."
        )
    return Column("config", path, "", "any")


def read_column(text: str, names: ColumnNames) -> Column:
    """The column that a URL writes as `min(loss)`. Raises QueryError."""
    match = _WRITTEN.match(text.strip())
    if match:
        return names.column(match[2].strip(), match[1])
    return names.column(text.strip())


def read_columns(text: str, names: ColumnNames) -> tuple[list[Column], list[str]]:
    """The columns of a comma-separated list, and the entries that no run has."""
    columns, unknown = list[Column](), list[str]()
    for part in dict.fromkeys(part.strip() for part in text.split(",") if part.strip()):
        try:
            columns.append(read_column(part, names))
        except QueryError:
            unknown.append(part)
    return columns, unknown


def completions(names: ColumnNames) -> list[dict[str, str]]:
    """`[{name, source, type}]` of every name, for completion in a query."""
    known: list[tuple[Collection[str], str]] = [(RUN_COLUMNS, "run"), (names.metrics, "metric")]
    rows = [
        {"name": name, "source": source, "type": RUN_COLUMNS.get(name, "number")}
        for some, source in known
        for name in (some if source == "run" else sorted(some))
    ]
    return rows + [
        {"name": name, "source": "config", "type": "any"} for name in sorted(names.config)
    ]


__all__ = [
    "AGGREGATES",
    "RUN_COLUMNS",
    "UNSORTABLE",
    "Column",
    "ColumnNames",
    "completions",
    "read_column",
    "read_columns",
]
