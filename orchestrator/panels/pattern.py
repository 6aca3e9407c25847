"""Regular expressions for names of metrics, matched in bounded time. Pure.

Python's `re` backtracks: `(a+)+$` takes longer than a request on a name of 40 characters. This is
Thompson's construction with a table of states that fills while names are matched, as in RE2: each
character of a name costs one look-up, whatever the pattern is. Some patterns need a new state for
each character; `matches` counts states and stops at a limit. Constructs that need backtracking are
refused with their position.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from orchestrator.panels.pattern_parts import (
    Alternatives,
    Assertion,
    CharacterSet,
    Node,
    PatternError,
    Repeat,
    Sequence,
    parse,
)

__all__ = ["LONGEST", "PatternError", "compiled", "matches"]

LONGEST: Final = 200  # characters of a pattern
MOST_STATES: Final = 600  # of the automaton, after repetitions are written out
MOST_WORK: Final = 200_000  # visited states per call of `matches`, about half a second
_MOST_CACHED: Final = 2000  # states of one pattern
_END: Final = ""  # the character after the last one

_State = tuple[frozenset[int], str]  # open states, and the kind of the character before


class _Known:
    """A state with what follows each character so far; `ends`: the pattern matched before it."""

    __slots__ = ("after", "ends", "state")

    def __init__(self, state: _State, *, ends: bool = False) -> None:
        self.state, self.ends = state, ends
        self.after: dict[str, _Known] = {}


class Pattern:
    """A compiled pattern; `fits` is true for a name with a part that matches."""

    def __init__(self, text: str) -> None:
        self._sets: list[CharacterSet | None] = []
        self._next: list[list[int]] = []
        self._assertions: list[str] = []
        self.work = 0
        tree, self._ignore_case = parse(text)
        self._final = self._state()
        self._first = self._add(tree, self._final)
        self._known: dict[_State, _Known] = {}
        self._begin = _Known((frozenset((self._first,)), ""))
        self._matched = _Known((frozenset(), ""), ends=True)

    def fits(self, name: str) -> bool:
        """Whether some part of the name matches."""
        known = self._begin
        for character in name:
            following = known.after.get(character)
            known = following if following is not None else self._follow(known, character)
            if known.ends:
                return True
        return (known.after.get(_END) or self._follow(known, _END)).ends

    def _follow(self, known: _Known, character: str) -> _Known:
        """The state after a character."""
        open_, before = known.state
        kind = _kind(character)
        reached = self._closure(open_, before, kind)
        if self._final in reached:
            known.after[character] = self._matched
            return self._matched
        sets = self._sets
        taken = {
            self._next[place][0]
            for place in reached
            if (wanted := sets[place]) is not None
            and character != _END
            and wanted.has(character, ignore_case=self._ignore_case)
        }
        state = (frozenset((*taken, self._first)), kind)  # a match may begin at each place
        if len(self._known) >= _MOST_CACHED:
            self._known.clear()
            self._begin.after.clear()
        following = self._known.setdefault(state, _Known(state))
        known.after[character] = following
        return following

    def _closure(self, open_: Iterable[int], before: str, after: str) -> set[int]:
        """All states that are reached without reading, between two kinds of characters."""
        reached, waiting = set[int](), list(open_)
        while waiting:
            place = waiting.pop()
            self.work += 1
            if place in reached:
                continue
            reached.add(place)
            if self._sets[place] is None and _holds(self._assertions[place], before, after):
                waiting.extend(self._next[place])
        return reached

    def _state(
        self, wanted: CharacterSet | None = None, following: Iterable[int] = (), check: str = ""
    ) -> int:
        if len(self._sets) >= MOST_STATES:
            raise PatternError("the pattern is too large", 0, "Use smaller numbers in {…}.")
        self._sets.append(wanted)
        self._next.append(list(following))
        self._assertions.append(check)
        return len(self._sets) - 1

    def _add(self, node: Node, then: int) -> int:
        """Add the states of a node in front of the state `then`; return the first one."""
        match node:
            case CharacterSet():
                return self._state(node, [then])
            case Assertion():
                return self._state(None, [then], node.kind)
            case Sequence():
                for part in reversed(node.parts):
                    then = self._add(part, then)
                return then
            case Alternatives():
                return self._state(None, [self._add(part, then) for part in node.parts])
            case Repeat():
                return self._add_repeat(node, then)

    def _add_repeat(self, node: Repeat, then: int) -> int:
        if node.most is None:
            loop = self._state(None)
            self._next[loop] = [self._add(node.part, loop), then]
            first = loop
        else:
            first = then
            for _ in range(node.most - node.least):
                first = self._state(None, [self._add(node.part, first), then])
        for _ in range(node.least):
            first = self._add(node.part, first)
        return first


def _kind(character: str) -> str:
    """`e` an edge of the name, `w` a character of a word, `o` another one."""
    if character == _END:
        return "e"
    return "w" if character.isalnum() or character == "_" else "o"


def _holds(check: str, before: str, after: str) -> bool:
    match check:
        case "^":
            return before == ""
        case "$":
            return after == "e"
        case "b":
            return (before == "w") != (after == "w")
        case "B":
            return (before == "w") == (after == "w")
    return True


@lru_cache(maxsize=256)
def compiled(text: str) -> Pattern:
    """The pattern. Raises PatternError with the position of what is wrong."""
    if len(text) > LONGEST:
        message = f"the pattern has {len(text)} characters, more than {LONGEST}"
        raise PatternError(message, LONGEST, "Use a shorter pattern.")
    return Pattern(text)


def matches(text: str, names: Iterable[str]) -> list[str]:
    """The names with a part that matches, in their order.

    Raises PatternError for a wrong pattern, and for one that takes more than `MOST_WORK`.
    """
    pattern, result = compiled(text), []
    limit = pattern.work + MOST_WORK
    for name in names:
        if pattern.fits(name):
            result.append(name)
        if pattern.work > limit:
            raise PatternError(
                "the pattern takes too long on these names",
                0,
                "Use fewer repetitions within others.",
            )
    return result
