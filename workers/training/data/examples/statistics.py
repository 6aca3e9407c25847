"""Statistics of encoded examples: counts, tokens, truncation and packing efficiency.

Does not depend on how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workers.training.data.examples.store import Store


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the rows of an epoch hold.

    `samples` are lines in use, `truncated` of them are longer than a row, `dropped` had no trained
    token left after that. `tokens` and `trained_tokens` are those in rows; `packing_efficiency` is
    the share of positions with tokens.
    """

    samples: int
    rows: int
    tokens: int
    trained_tokens: int
    longest: int
    truncated: int = 0
    truncated_tokens: int = 0
    dropped: int = 0
    resegmented: int = 0
    packing_efficiency: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for an event."""
        return asdict(self)


def measure(
    store: Store,
    used: Sequence[int],
    limits: Sequence[Sequence[int]],
    *,
    rows: int,
    seq_len: int,
    dropped: int,
) -> Statistics:
    """Statistics of the examples `used`, of which documents have `limits` tokens in rows."""
    tokens = trained = cut = truncated = longest = 0
    for example in used:
        documents, held = store.documents(example), limits[example]
        full = sum(stop - start for start, stop in documents)
        longest = max(longest, full)
        tokens += sum(held)
        cut += full - sum(held)
        truncated += full > sum(held)
        trained += sum(
            int(store.trained[start + 1 : start + length].sum())
            for (start, _), length in zip(documents, held, strict=True)
        )
    return Statistics(
        samples=len(used),
        rows=rows,
        tokens=tokens,
        trained_tokens=trained,
        longest=longest,
        truncated=truncated,
        truncated_tokens=cut,
        dropped=dropped,
        resegmented=store.resegmented,
        packing_efficiency=round(min(1.0, tokens / (rows * seq_len)), 4) if rows else 0.0,
    )
