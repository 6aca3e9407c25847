"""The query language of the runs table: text to a tree, with the position of every error.

    lr > 1e-4 and val_loss < 2 and model = "llama-15m"
    min(val_loss) < 1.9 or (state in (failed, cancelled) and not tag = sweep)

Operators: = != < <= > >= ~ (contains, ignoring case), `in (…)`; `and`, `or`, `not`, parentheses.
A metric is its last value, or that of `min()`, `max()`, `mean()`. Pure; does not know names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

AGGREGATES: Final = ("last", "min", "max", "mean", "median")
OPERATORS: Final = ("=", "!=", "<", "<=", ">", ">=", "~")
LONGEST: Final = 2000  # characters of a query
_MOST_PARTS: Final = 50  # comparisons
_DEEPEST: Final = 20  # nested parentheses
_WORDS: Final = ("and", "or", "not", "in")

_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<quoted>"[^"]*"|'[^']*')
    | (?P<name>`[^`]*`)
    | (?P<op><=|>=|!=|==|=|<|>|~)
    | (?P<mark>[(),])
    | (?P<word>[^\s"'`<>=!~(),]+)
    )""",
    re.VERBOSE,
)


class QueryError(ValueError):
    """A query that cannot be read; `at` is the position of the problem in the text."""

    def __init__(self, message: str, at: int, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.at, self.hint = message, at, hint


@dataclass(frozen=True, slots=True)
class Token:
    """`kind` is quoted, name, op, mark, word or end; `text` is without quotes."""

    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Value:
    """A literal; `quoted` text is never a number."""

    text: str
    quoted: bool
    at: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`aggregate(name) operator values`; one value, or several of the operator `in`."""

    name: str
    aggregate: str  # "" if none is written
    operator: str
    values: tuple[Value, ...]
    at: int  # of the name


@dataclass(frozen=True, slots=True)
class Group:
    """Parts joined by `and` or `or`; `not` has one part."""

    word: str
    parts: tuple[Node, ...]


Node = Comparison | Group


def parse(text: str) -> Node | None:
    """The tree of a query; None if it is empty. Raises QueryError."""
    if len(text) > LONGEST:
        raise QueryError(f"a query has at most {LONGEST} characters", LONGEST)
    tokens = _tokens(text)
    if tokens[0].kind == "end":
        return None
    parser = _Parser(tokens)
    tree = parser.any_of(0)
    rest = parser.token
    if rest.kind != "end":
        raise QueryError(
            f"{rest.text!r} is not expected here", rest.at, "Join comparisons by and, or."
        )
    return tree


def _tokens(text: str) -> list[Token]:
    tokens, at = list[Token](), 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            if text[at] in "\"'`":
                raise QueryError("this quote is not closed", at)
            raise QueryError(f"{text[at]!r} is not expected here", at, "Use = != < <= > >= ~ in.")
        kind = str(match.lastgroup)
        value = match.group(kind)
        start = match.start(kind)
        if kind in ("quoted", "name"):
            value = value[1:-1]
        tokens.append(Token(kind, "=" if value == "==" and kind == "op" else value, start))
        at = match.end()
    return [*tokens, Token("end", "the end", end)]


class _Parser:
    """Recursive descent: or, and, not, comparison."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.place, self.count = tokens, 0, 0

    @property
    def token(self) -> Token:
        return self.tokens[self.place]

    def take(self) -> Token:
        token = self.token
        self.place += token.kind != "end"
        return token

    def is_word(self, word: str) -> bool:
        return self.token.kind == "word" and self.token.text.lower() == word

    def is_mark(self, mark: str) -> bool:
        return self.token.kind == "mark" and self.token.text == mark

    def any_of(self, depth: int) -> Node:
        parts = [self.all_of(depth)]
        while self.is_word("or"):
            self.take()
            parts.append(self.all_of(depth))
        return parts[0] if len(parts) == 1 else Group("or", tuple(parts))

    def all_of(self, depth: int) -> Node:
        parts = [self.one(depth)]
        while self.is_word("and"):
            self.take()
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else Group("and", tuple(parts))

    def one(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise QueryError("the parentheses are nested too deeply", self.token.at)
        if self.is_word("not"):
            self.take()
            return Group("not", (self.one(depth + 1),))
        if self.is_mark("("):
            opened = self.take()
            inner = self.any_of(depth + 1)
            if not self.is_mark(")"):
                raise QueryError("this parenthesis is not closed", opened.at)
            self.take()
            return inner
        return self.comparison()

    def comparison(self) -> Comparison:
        self.count += 1
        if self.count > _MOST_PARTS:
            raise QueryError(f"a query has at most {_MOST_PARTS} comparisons", self.token.at)
        name = self.take()
        if name.kind not in ("word", "name") or name.text.lower() in _WORDS:
            shown = name.text if name.kind == "end" else repr(name.text)
            raise QueryError(
                f"a name is expected, not {shown}", name.at, "Write for example val_loss < 2."
            )
        aggregate = ""
        if self.is_mark("("):
            if name.text not in AGGREGATES:
                hint = "Use last, min, max or mean."
                raise QueryError(f"{name.text!r} is not an aggregate", name.at, hint)
            aggregate = name.text
            self.take()
            name = self.take()
            if name.kind not in ("word", "name"):
                raise QueryError("the name of a metric is expected", name.at)
            if not self.is_mark(")"):
                raise QueryError('")" is expected after the name', self.token.at)
            self.take()
        if self.is_word("in"):
            self.take()
            return Comparison(name.text, aggregate, "in", self.listed(), name.at)
        operator = self.take()
        if operator.kind != "op":
            raise QueryError(
                f"an operator is expected after {name.text!r}",
                operator.at,
                "Use = != < <= > >= ~ in.",
            )
        return Comparison(name.text, aggregate, operator.text, (self.value(),), name.at)

    def listed(self) -> tuple[Value, ...]:
        if not self.is_mark("("):
            hint = "Write for example state in (failed, cancelled)."
            raise QueryError('"(" is expected after "in"', self.token.at, hint)
        self.take()
        values = [self.value()]
        while self.is_mark(","):
            self.take()
            values.append(self.value())
        if not self.is_mark(")"):
            raise QueryError('"," or ")" is expected', self.token.at)
        self.take()
        return tuple(values)

    def value(self) -> Value:
        token = self.take()
        if token.kind == "quoted":
            return Value(token.text, True, token.at)
        if token.kind in ("word", "name") and token.text.lower() not in _WORDS:
            return Value(token.text, False, token.at)
        raise QueryError("a value is expected", token.at, 'Use a number, a word or "text".')
