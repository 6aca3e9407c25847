"""The registry of terms: every number of the planner is a named function of other numbers.

One registry computes columns for millions of plans and the explain tree of one plan, so that the
two agree. Does not depend on models, plans or devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# shapes: (n,) a value per plan; (S, n) a value per pipeline stage and plan; () one for all plans
Column: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Term:
    """A number computed from `inputs`.

    `formula` uses their names, `source` cites paper and equation.
    """

    name: str
    unit: str
    formula: str
    source: str
    inputs: tuple[str, ...]
    function: Callable[..., Column]


@dataclass(frozen=True, slots=True)
class Input:
    """A number that is an input column, not computed."""

    name: str
    unit: str
    source: str


class UnknownTerm(KeyError):
    """A name that is neither a column nor a term: a bug in the planner."""


class Registry:
    """Terms by name.

    A term's inputs are its function's parameters: names of other terms or of input columns.
    """

    def __init__(self) -> None:
        self.terms: dict[str, Term] = {}
        self.inputs: dict[str, Input] = {}

    def term(
        self, unit: str, formula: str, source: str = ""
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers the decorated function under its own name."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            name = function.__name__.rstrip("_")
            if name in self.terms:
                raise ValueError(f"term {name} is defined twice")
            inputs = tuple(inspect.signature(function).parameters)
            self.terms[name] = Term(name, unit, formula, source, inputs, function)
            return function

        return register

    def declare_inputs(self, unit: str, source: str, *names: str) -> None:
        """Declares input columns for the explain tree."""
        for name in names:
            self.inputs[name] = Input(name, unit, source)


TERMS = Registry()
term = TERMS.term
declare_inputs = TERMS.declare_inputs


class Table:
    """Plans as a struct of arrays: input columns, and terms that are computed once on first access.

    `columns` hold `()`, `(n,)` or `(S, n)` arrays. Accessing a name computes only what it needs.
    """

    def __init__(self, columns: Mapping[str, Any], n: int, registry: Registry = TERMS) -> None:
        self.n = n
        self.registry = registry
        self._inputs = frozenset(columns)
        self._values: dict[str, Column] = {
            name: np.asarray(value) for name, value in columns.items()
        }

    def __getitem__(self, name: str) -> Column:
        value = self._values.get(name)
        if value is None:
            term = self.registry.terms.get(name)
            if term is None:
                raise UnknownTerm(f"{name} is neither a column of this table nor a term")
            value = np.asarray(term.function(*[self[each] for each in term.inputs]))
            self._values[name] = value
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self.registry.terms

    def is_input(self, name: str) -> bool:
        """Whether it is an input column; these take precedence over a term of the same name."""
        return name in self._inputs

    def column(self, name: str) -> Column:
        """The value broadcast to `(n,)`, or `(S, n)` if it has stages."""
        value = self[name]
        return (
            np.broadcast_to(value, (*value.shape[:-1], self.n))
            if value.ndim
            else np.broadcast_to(value, (self.n,))
        )

    def take(self, rows: Any) -> Table:
        """The table with the chosen rows (a mask or indices); computed values are reused."""
        n = int(np.arange(self.n)[rows].size)
        taken = Table({}, n, self.registry)
        taken._inputs = self._inputs
        taken._values = {
            name: value[..., rows]
            if value.ndim and value.shape[-1] == self.n and self.n != 1
            else value
            for name, value in self._values.items()
        }
        if self.n == 1 and n != 1:
            raise IndexError("a table of one plan has one row")
        return taken

    def row(self, index: int) -> Table:
        """One plan's input columns, without computed terms."""
        inputs = {name: self._values[name] for name in self._inputs}
        return (
            Table(inputs, self.n, self.registry).take([index])
            if self.n != 1
            else Table(inputs, 1, self.registry)
        )

    def with_columns(self, columns: Mapping[str, Any]) -> Table:
        """The input columns with some replaced or added, without computed terms."""
        inputs = {name: self._values[name] for name in self._inputs}
        return Table({**inputs, **columns}, self.n, self.registry)


@dataclass(frozen=True)
class Explained:
    """A number and its origin: `{name, value, unit, formula, inputs, source}`."""

    name: str
    value: float | list[float]
    unit: str
    formula: str
    source: str
    inputs: list[Explained] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "formula": self.formula,
            "source": self.source,
            "inputs": [each.to_dict() for each in self.inputs],
        }


def explain(
    table: Table, name: str, *, row: int = 0, stage: int | None = None, depth: int = 12
) -> Explained:
    """The tree under one number of one plan.

    Values per stage are those of `stage`, or of all stages if None. A term that occurs twice is
    shown twice, because users open one branch at a time; `depth` limits the tree.
    """
    value = _value_at(table[name], table.n, row, stage)
    term = table.registry.terms.get(name)
    if term is None or name in table._inputs:
        column = table.registry.inputs.get(name, Input(name, "", "given"))
        return Explained(name, value, column.unit, "given", column.source)
    inputs = (
        [explain(table, each, row=row, stage=stage, depth=depth - 1) for each in term.inputs]
        if depth > 0
        else []
    )
    return Explained(name, value, term.unit, term.formula, term.source, inputs)


def leaves(registry: Registry, names: Iterable[str]) -> set[str]:
    """The input columns that the terms depend on."""
    columns: set[str] = set()
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in registry.terms:
            pending += registry.terms[name].inputs
        else:
            columns.add(name)
    return columns


def _value_at(value: Column, n: int, row: int, stage: int | None) -> float | list[float]:
    if value.ndim and value.shape[-1] == n and n != 1:
        value = value[..., row]
    elif value.ndim:
        value = value[..., 0]
    if value.ndim == 0:
        return float(value)
    if value.size == 1:
        return float(value[0])
    return (
        float(value[stage])
        if stage is not None and stage < value.size
        else [float(each) for each in value]
    )
