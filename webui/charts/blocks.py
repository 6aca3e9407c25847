"""KV cache blocks as a field of squares, and tiles of the cache's numbers. Pure functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.presentation import formatting
from workers.contracts.wire.serving_reports import EngineState

COLUMNS: Final = 64
MOST: Final = 4096  # squares: more blocks share them
KINDS: Final = {
    "1": ("held", gettext_noop("used by one request")),
    "s": ("shared", gettext_noop("shared by several requests")),
    "k": ("cached", gettext_noop("free, cached for reuse")),
    ".": ("free", gettext_noop("free")),
}
_GAP: Final = 0.14


@dataclass(frozen=True, slots=True)
class Field:
    """`paths` are `(kind, d)` in a box of `columns` x `rows`; `each` is the blocks per square."""

    columns: int
    rows: int
    paths: list[tuple[str, str]]
    each: int
    legend: list[dict[str, Any]]
    summary: str


def field(state: EngineState) -> Field:
    """Lay out the blocks; squares of one color share one path."""
    letters = state.map[: state.blocks]
    each = max(1, -(-len(letters) // MOST))
    squares = [_dominant(letters[at : at + each]) for at in range(0, len(letters), each)]
    columns = min(COLUMNS, max(1, len(squares)))
    paths: dict[str, list[str]] = {}
    size = 1 - _GAP
    for place, letter in enumerate(squares):
        x, y = place % columns, place // columns
        paths.setdefault(letter, []).append(
            f"M{x + _GAP / 2:g} {y + _GAP / 2:g}h{size:g}v{size:g}h-{size:g}z"
        )
    counts = Counter(letters)
    legend = [
        {"kind": kind, "label": _(label), "count": f"{counts.get(letter, 0):,}"}
        for letter, (kind, label) in KINDS.items()
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
        ", ".join(f"{item['count']} {item['label']}" for item in legend),
    )


def tile(title: str, value: str, hint: str) -> dict[str, str]:
    """Return a tile for `run/number_tiles.html`."""
    return {"title": title, "value": value, "hint": hint}


def waste(state: EngineState) -> float | None:
    """Return the share of unused token slots in blocks of running requests; None without any."""
    active = [row for row in state.requests if row.blocks and row.state in ("prefill", "decode")]
    room = sum(row.blocks for row in active) * state.block_size
    if not room:
        return None
    filled = sum(
        min(row.prompt_tokens + row.new_tokens, row.blocks * state.block_size) for row in active
    )
    return max(0.0, 1 - filled / room)


def numbers(
    state: EngineState, latest: dict[str, float], *, bytes_per_token: float | None
) -> list[dict[str, str]]:
    """Return tiles of block use, prefix hits and internal fragmentation."""
    size = bytes_per_token * state.block_size if bytes_per_token else None
    used = ""
    if size:
        used = _("%(used)s of %(total)s") % {
            "used": formatting.memory(state.used * size),
            "total": formatting.memory(state.blocks * size),
        }
    recent = latest.get("inference/prefix_hit_rate")
    prompt, cached = latest.get("inference/prompt_tokens"), latest.get("inference/shared_tokens")
    total = (
        cached / (prompt + cached)
        if prompt is not None and cached is not None and prompt + cached
        else None
    )
    hits = _("of all prompt tokens")
    if recent is not None:
        hits = _("recently %(share)s") % {"share": formatting.percent(recent)}
    return [
        tile(
            _("Blocks used"),
            _("%(used)s of %(total)s") % {"used": f"{state.used:,}", "total": f"{state.blocks:,}"},
            used,
        ),
        tile(
            _("Cache utilization"),
            formatting.percent(state.used / state.blocks if state.blocks else 0),
            _("%(count)s tokens per block") % {"count": state.block_size},
        ),
        tile(_("Prefix cache hit rate"), formatting.percent(total), hits),
        tile(
            _("Internal fragmentation"),
            formatting.percent(waste(state)),
            _("unused token slots in used blocks"),
        ),
    ]


def _dominant(letters: str) -> str:
    """The letter that a square shows: used blocks before free ones."""
    return next((letter for letter in KINDS if letter in letters), ".")
