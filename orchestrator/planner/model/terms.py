"""The registry of terms: every number of the planner is a named function of other numbers.

One registry feeds the vector path (a column for millions of plans) and the explain tree (one plan,
every formula), so
the two cannot disagree. Knows no model, plan or device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Legend of shapes: (n,) a value per plan; (S, n) a value per pipeline stage and plan; () the same
# for all plans.
Column: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Term:
    """`formula` is what a person reads, in the names of `inputs`; `source` says where it is from
    (paper, equation).
    """

    name: str
    unit: str
    formula: str
    source: str
    inputs: tuple[str, ...]
    function: Callable[..., Column]


@dataclass(frozen=True, slots=True)
class Input:
    """A number that is given, not computed."""

    name: str
    unit: str
    source: str


class UnknownTerm(KeyError):
    """A name that is neither a column nor a term: a mistake in the planner itself."""


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

    def given(self, unit: str, source: str, *names: str) -> None:
        """Declares input columns, so that the explain tree can say what they are."""
        for name in names:
            self.inputs[name] = Input(name, unit, source)


TERMS = Registry()
term = TERMS.term
given = TERMS.given


class Table:
    """Plans as a struct of arrays: given columns, and terms computed once each when first asked
    for.

    `columns` hold `()`, `(n,)` or `(S, n)` arrays. Asking for a name computes what it needs and
    nothing else.
    """

    def __init__(self, columns: Mapping[str, Any], n: int, registry: Registry = TERMS) -> None:
        self.n = n
        self.registry = registry
        self._given = frozenset(columns)
        self._values: dict[str, Column] = {
            name: np.asarray(value) for name, value in columns.items()
        }

    def __getitem__(self, name: str) -> Column:
        found = self._values.get(name)
        if found is None:
            term = self.registry.terms.get(name)
            if term is None:
                raise UnknownTerm(f"{name} is neither a column of this table nor a term")
            found = np.asarray(term.function(*[self[each] for each in term.inputs]))
            self._values[name] = found
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self.registry.terms

    def is_given(self, name: str) -> bool:
        """Whether it is one of the given columns, which stand before a term of the same name."""
        return name in self._given

    def column(self, name: str) -> Column:
        """The value spread to a full `(n,)` column (`(S, n)` where it has stages)."""
        value = self[name]
        return (
            np.broadcast_to(value, (*value.shape[:-1], self.n))
            if value.ndim
            else np.broadcast_to(value, (self.n,))
        )

    def take(self, rows: Any) -> Table:
        """The same table with the chosen rows (a mask or indices); values computed so far are kept."""
        n = int(np.arange(self.n)[rows].size)
        taken = Table({}, n, self.registry)
        taken._given = self._given
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
        """One plan's given columns alone, its terms to be computed afresh."""
        given = {name: self._values[name] for name in self._given}
        return (
            Table(given, self.n, self.registry).take([index])
            if self.n != 1
            else Table(given, 1, self.registry)
        )

    def with_columns(self, columns: Mapping[str, Any]) -> Table:
        """The given columns with some replaced or added; terms are computed afresh."""
        given = {name: self._values[name] for name in self._given}
        return Table({**given, **columns}, self.n, self.registry)


@dataclass(frozen=True)
class Explained:
    """A number with where it comes from: `{name, value, unit, formula, inputs, source}`, as
    INTERFACES section 4.
    """

    name: str
    value: float | list[float]
    unit: str
    formula: str
    source: str
    inputs: list[Explained] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
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
    """The tree under one number of one plan. Values per stage are shown at `stage`, or for all
    stages when None.

    A branch that stands elsewhere in the tree is shown again, because a person opens one branch at
    a time; `depth`
    bounds it.
    """
    value = _shown(table[name], table.n, row, stage)
    term = table.registry.terms.get(name)
    if term is None or name in table._given:
        about = table.registry.inputs.get(name, Input(name, "", "given"))
        return Explained(name, value, about.unit, "given", about.source)
    inputs = (
        [explain(table, each, row=row, stage=stage, depth=depth - 1) for each in term.inputs]
        if depth > 0
        else []
    )
    return Explained(name, value, term.unit, term.formula, term.source, inputs)


def leaves(registry: Registry, names: Iterable[str]) -> set[str]:
    """The input columns that the terms rest on."""
    found: set[str] = set()
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in registry.terms:
            waiting += registry.terms[name].inputs
        else:
            found.add(name)
    return found


def _shown(value: Column, n: int, row: int, stage: int | None) -> float | list[float]:
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
