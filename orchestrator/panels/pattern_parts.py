"""Reads the text of a regular expression as a tree; errors name their position. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_DEEPEST: Final = 20  # groups within groups
_MOST_REPEATS: Final = 200
_CLASSES: Final = "dws"
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


class PatternError(ValueError):
    """A pattern that cannot be read: what is wrong, at which character (from 0), and a hint."""

    def __init__(self, message: str, at: int, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.at, self.hint = message, at, hint


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """One character: of `characters`, `ranges` or `classes` (d, w, s, upper case: not in it)."""

    characters: frozenset[str] = frozenset()
    ranges: tuple[tuple[str, str], ...] = ()
    classes: tuple[str, ...] = ()
    negated: bool = False

    def has(self, character: str, *, ignore_case: bool) -> bool:
        """Whether the set has the character."""
        has = self._has(character) or (ignore_case and self._has(character.swapcase()))
        return has != self.negated

    def _has(self, character: str) -> bool:
        return (
            character in self.characters
            or any(low <= character <= high for low, high in self.ranges)
            or any(_in_class(name, character) for name in self.classes)
        )


@dataclass(frozen=True, slots=True)
class Assertion:
    """A place: `^` begin, `$` end, `b` at the edge of a word, `B` not there."""

    kind: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Parts after each other; none: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of several parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `least` to `most` times; None: without a limit."""

    part: Node
    least: int
    most: int | None


Node = CharacterSet | Assertion | Sequence | Alternatives | Repeat


def parse(text: str) -> tuple[Node, bool]:
    """The tree of a pattern, and whether it ignores case (`(?i)` at its start).

    Raises PatternError.
    """
    ignore_case = text.startswith("(?i)")
    reader = _Reader(text, 4 if ignore_case else 0)
    tree = reader.alternatives(0)
    if reader.at < len(text):
        raise PatternError("this parenthesis closes nothing", reader.at, r"Write \) for a ')'.")
    return tree, ignore_case


def _in_class(name: str, character: str) -> bool:
    match name.lower():
        case "d":
            result = character.isdecimal()
        case "w":
            result = character.isalnum() or character == "_"
        case _:
            result = character.isspace()
    return result == name.islower()


class _Reader:
    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self) -> str:
        character = self.peek()
        self.at += 1
        return character

    def alternatives(self, depth: int) -> Node:
        parts = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            parts.append(self.sequence(depth))
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while (character := self.peek()) and character not in "|)":
            start = self.at
            if character in "*+?" or (character == "{" and self._counts() is not None):
                raise PatternError(
                    f"{character!r} has nothing to repeat",
                    start,
                    f"Use \\{character} for the character.",
                )
            parts.append(self.repeated(self.atom(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeated(self, part: Node) -> Node:
        """The part with the quantifier that follows it, if one does. Raises PatternError."""
        at = self.at
        match self.peek():
            case "*":
                least, most = 0, None
                self.at += 1
            case "+":
                least, most = 1, None
                self.at += 1
            case "?":
                least, most = 0, 1
                self.at += 1
            case "{" if (counts := self._counts()) is not None:
                least, most, self.at = counts
                if most is not None and most < least:
                    raise PatternError(f"{{{least},{most}}} ends below its start", at)
                if max(least, most or 0) > _MOST_REPEATS:
                    raise PatternError(f"more than {_MOST_REPEATS} repetitions", at)
            case _:
                return part
        if self.peek() == "?":  # as few as possible: the same names match
            self.at += 1
        if self.peek() == "+":
            raise PatternError("possessive repetitions are not supported", self.at, "Remove the +.")
        if self.peek() and self.peek() in "*+?":
            raise PatternError("a repetition is repeated", self.at, "Put the part in parentheses.")
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None, int] | None:
        """`{n}`, `{n,}`, `{,m}` or `{n,m}` with the place after it; None for other text."""
        end = self.text.find("}", self.at)
        inner = self.text[self.at + 1 : end] if end > 0 else ""
        low, comma, high = inner.partition(",")
        is_count = all(part.isascii() and part.isdecimal() for part in (low, high) if part)
        if not inner.strip(",") or not is_count or len(inner) > 9 or (not comma and not low):
            return None
        least = int(low or 0)
        return least, (int(high) if high else None if comma else least), end + 1

    def atom(self, depth: int) -> Node:
        start, character = self.at, self.take()
        match character:
            case "(":
                return self.group(start, depth + 1)
            case "[":
                return self.bracket(start)
            case ".":
                return CharacterSet(frozenset("\n"), negated=True)
            case "^" | "$":
                return Assertion(character)
            case "\\":
                return self.escape(start)
        return CharacterSet(frozenset(character))

    def group(self, start: int, depth: int) -> Node:
        if depth > _DEEPEST:
            raise PatternError("the groups are nested too deeply", start)
        if self.peek() == "?":
            if self.peek(2) == "?:":
                self.at += 2
            elif self.peek(3) == "?P<":
                end = self.text.find(">", self.at)
                if end < 0:
                    raise PatternError(
                        "the name of this group does not end", start, "Use (?P<name>…)."
                    )
                self.at = end + 1
            else:
                raise _unsupported_group(self.peek(3), start)
        tree = self.alternatives(depth)
        if self.peek() != ")":
            raise PatternError("this parenthesis is not closed", start, r"Add ')', or write \(.")
        self.at += 1
        return tree

    def escape(self, start: int) -> Node:
        character = self.take()
        if not character:
            raise PatternError("a backslash at the end escapes nothing", start, r"Use \\.")
        if character.lower() in _CLASSES:
            return CharacterSet(classes=(character,))
        if character in "bB":
            return Assertion(character)
        if character in "AZ":
            return Assertion("^" if character == "A" else "$")
        return CharacterSet(frozenset(self._escaped(character, start)))

    def _escaped(self, character: str, start: int) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isascii() and character.isdecimal() and character != "0":
            raise PatternError(
                "references to groups are not supported", start, "Write the part again."
            )
        if character.isascii() and character.isalnum():
            raise PatternError(f"\\{character} is not an escape", start, f"Use {character} alone.")
        return character

    def bracket(self, start: int) -> Node:
        """The set after `[`; a `]` in front is a member. Raises PatternError."""
        negated = self.peek() == "^"
        self.at += negated
        characters, ranges, classes = set[str](), [], []
        first = True
        while first or self.peek() != "]":
            if not self.peek():
                raise PatternError("this bracket is not closed", start, r"Add ']', or write \[.")
            first, at, low = False, self.at, self.member()
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                high = self.member()
                if len(low) > 1 or len(high) > 1 or high < low:
                    shown = self.text[at : self.at]
                    raise PatternError(f"{shown} is not a range", at, "Use for example a-z or 0-9.")
                ranges.append((low, high))
            elif len(low) > 1:
                classes.append(low[1])
            else:
                characters.add(low)
        self.at += 1
        return CharacterSet(frozenset(characters), tuple(ranges), tuple(classes), negated)

    def member(self) -> str:
        """One character, or a backslash and the letter of a class. Raises PatternError."""
        start, character = self.at, self.take()
        if character != "\\":
            return character
        escaped = self.take()
        if escaped and escaped.lower() in _CLASSES:
            return f"\\{escaped}"
        if not escaped:
            raise PatternError("a backslash at the end escapes nothing", start, r"Use \\.")
        return "\b" if escaped == "b" else self._escaped(escaped, start)


def _unsupported_group(begin: str, start: int) -> PatternError:
    if begin[1:2] in ("=", "!") or begin in ("?<=", "?<!"):
        message = "conditions on what comes before or after are not supported"
        return PatternError(message, start, "Match the whole name: ^…$.")
    if begin[1:2].isalpha():
        message = "only (?i) is supported, at the start of the pattern"
        return PatternError(message, start, "Use (?i)….")
    return PatternError(f"({begin} is not supported", start, "Use (…) or (?:…).")
