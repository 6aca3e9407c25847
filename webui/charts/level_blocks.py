"""Neighboring cells of one level as one block, so that a row of a heat map has few shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def level_blocks(levels: Sequence[str | None]) -> list[tuple[int, int, str]]:
    """Blocks `(left, width, level)` of a row, in cells; a cell without a level (None) has none."""
    blocks: list[tuple[int, int, str]] = []
    for at, name in enumerate(levels):
        if name is None:
            continue
        if blocks and blocks[-1][2] == name and sum(blocks[-1][:2]) == at:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + 1, name)
        else:
            blocks.append((at, 1, name))
    return blocks
