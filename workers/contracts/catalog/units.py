"""Units of bytes, and sizes and durations as text. Standard library only."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_gib(size_bytes: float, decimals: int = 1) -> str:
    """`1.5 GiB`."""
    return f"{size_bytes / GIB:.{decimals}f} GiB"


def format_time(seconds: float) -> str:
    """Three significant digits in one unit, ms to days: `12.3 ms`, `1.5 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.1f} days"
