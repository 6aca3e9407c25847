"""A paged cache as a field of squares, one a block or a few, and its numbers beside it.

Pure; one path a colour.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting
from workers.contracts.wire.serving_reports import EngineState

COLUMNS: Final = 64
MOST: Final = 4096  # squares: more blocks share them
KINDS: Final = {
    "1": ("held", "held by one request"),
    "s": ("shared", "shared by several requests"),
    "k": ("kept", "free, kept to be found again"),
    ".": ("free", "free"),
}
_GAP: Final = 0.14


@dataclass(frozen=True, slots=True)
class Field:
    """`paths` are `(kind, d)` in a box of `columns` x `rows`; `each` is how many blocks a square
    stands for.
    """

    columns: int
    rows: int
    paths: list[tuple[str, str]]
    each: int
    legend: list[dict[str, Any]]
    summary: str


def field(state: EngineState) -> Field:
    told = state.map[: state.blocks]
    each = max(1, -(-len(told) // MOST))
    squares = [_most(told[at : at + each]) for at in range(0, len(told), each)]
    columns = min(COLUMNS, max(1, len(squares)))
    paths: dict[str, list[str]] = {}
    size = 1 - _GAP
    for place, letter in enumerate(squares):
        x, y = place % columns, place // columns
        paths.setdefault(letter, []).append(
            f"M{x + _GAP / 2:g} {y + _GAP / 2:g}h{size:g}v{size:g}h-{size:g}z"
        )
    counts = Counter(told)
    legend = [
        {"kind": kind, "says": says, "count": f"{counts.get(letter, 0):,}"}
        for letter, (kind, says) in KINDS.items()
    ]
    return Field(
        columns,
        max(1, -(-len(squares) // columns)),
        [
            (KINDS[letter][0], "".join(parts))
            for letter, parts in sorted(paths.items())
            if letter in KINDS
        ],
        each,
        legend,
        ", ".join(f"{item['count']} {item['says']}" for item in legend),
    )


def tile(title: str, value: str, hint: str) -> dict[str, str]:
    return {"title": title, "value": value, "hint": hint}


def waste(state: EngineState) -> float | None:
    """The share of positions in held blocks that no token fills: the ends of last blocks.

    None while none is held.
    """
    held = [each for each in state.requests if each.blocks and each.state in ("prefill", "decode")]
    room = sum(each.blocks for each in held) * state.block_size
    if not room:
        return None
    filled = sum(
        min(each.prompt_tokens + each.new_tokens, each.blocks * state.block_size) for each in held
    )
    return max(0.0, 1 - filled / room)


def numbers(
    state: EngineState, latest: dict[str, float], *, bytes_per_token: float | None
) -> list[dict[str, str]]:
    """Tiles beside the field: `{title, value, hint}`."""
    lost = waste(state)
    size = bytes_per_token * state.block_size if bytes_per_token else None
    held = (
        f"{formatting.memory(state.used * size)} of {formatting.memory(state.blocks * size)}"
        if size
        else ""
    )
    hit = latest.get("inference/prefix_hit_rate")
    prompt, shared = latest.get("inference/prompt_tokens"), latest.get("inference/shared_tokens")
    whole = (
        shared / (prompt + shared)
        if prompt is not None and shared is not None and prompt + shared
        else None
    )
    return [
        tile("Blocks used", f"{state.used:,} of {state.blocks:,}", held),
        tile(
            "Used",
            formatting.percent(state.used / state.blocks if state.blocks else 0),
            f"{state.block_size} tokens a block",
        ),
        tile(
            "Prefix hits",
            formatting.percent(whole),
            f"lately {formatting.percent(hit)}" if hit is not None else "of all prompt tokens",
        ),
        tile("Waste", formatting.percent(lost), "room in held blocks that no token fills"),
    ]


def _most(letters: str) -> str:
    """The letter that a square shows: held ones before free ones, so that nothing in use is hidden."""
    return next((letter for letter in KINDS if letter in letters), ".")
