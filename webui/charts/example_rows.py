"""A picture of packed sequences: documents as bars, and the share that has loss. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WIDTH = 1000.0  # of the drawing, in its own units


def picture_rows(rows: Sequence[Sequence[dict[str, int]]], seq_len: int) -> list[dict[str, Any]]:
    """Each sequence's documents as positions in a drawing of width 1000, and its share in use."""
    drawn = []
    for row in rows:
        at, bars = 0, []
        for document in row:
            tokens, trained = document["tokens"], document["trained"]
            bars.append(
                {
                    "x": round(_WIDTH * at / seq_len, 2),
                    "width": round(max(1.0, _WIDTH * tokens / seq_len - 1), 2),
                    "trained_x": round(_WIDTH * (at + tokens - trained) / seq_len, 2),
                    "trained_width": round(max(0.5, _WIDTH * trained / seq_len - 1), 2),
                    "line": document["line"],
                    "tokens": tokens,
                    "trained": trained,
                }
            )
            at += tokens
        drawn.append({"bars": bars, "share": min(1.0, at / seq_len)})
    return drawn
