"""Negative log-likelihood of texts, computed in overlapping windows.

Every token except a text's first counts once, with the context of its window (Hugging Face,
"Perplexity of fixed-length models"). Does not depend on lines or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.decoder import Decoder

BATCH_TOKENS = 4096
_LOGIT_ROWS = 512  # rows of logits at a time: a vocabulary of 128k in fp32 is 256 MiB


@dataclass(frozen=True, slots=True)
class Window:
    """`ids` begin at `start` of text number `text`; the last `scored` of them count."""

    text: int
    start: int
    ids: tuple[int, ...]
    scored: int


def split_windows(
    texts: Sequence[tuple[Sequence[int], int]], *, window: int, stride: int
) -> Iterator[Window]:
    """Windows of texts `(ids, first)`: ids from index `first` on count, at least from 1, since the
    first id has no context.

    The first window begins with its text; each later one counts `stride` ids, below `window`, or
    the rest.
    """
    for text, (ids, first) in enumerate(texts):
        counted = max(1, first)
        while counted < len(ids):
            end = min(len(ids), counted + max(stride, window - counted))
            start = max(0, end - window)
            yield Window(text, start, tuple(ids[start:end]), end - counted)
            counted = end


@torch.inference_mode()
def losses(
    decoder: Decoder,
    windows: Sequence[Window],
    *,
    batch_tokens: int = BATCH_TOKENS,
    through: Callable[[Tensor], Tensor] | None = None,
) -> list[float]:
    """The sum of each window's counted losses in nats, batched by about `batch_tokens`.

    `through` replaces the decoder's own if other ranks compute a part of it.
    """
    device = next(decoder.parameters()).device
    sums: list[float] = []
    rest, unbatched = list(windows), _length_matters(decoder)
    while rest:
        count = 1
        while (
            not unbatched
            and count < len(rest)
            and (count + 1) * max(len(w.ids) for w in rest[: count + 1]) <= batch_tokens
        ):
            count += 1
        batch, rest = rest[:count], rest[count:]
        sums += _batch_losses(decoder, through or decoder.through, batch, device)
    return sums


def _batch_losses(
    decoder: Decoder,
    through: Callable[[Tensor], Tensor],
    batch: Sequence[Window],
    device: torch.device,
) -> list[float]:
    longest = max(len(window.ids) for window in batch)
    # padding on the right: attention is causal
    ids = torch.tensor(
        [[*window.ids, *[0] * (longest - len(window.ids))] for window in batch], device=device
    )
    rows = [row for row, window in enumerate(batch) for _ in range(window.scored)]
    positions = [
        position
        for window in batch
        for position in range(len(window.ids) - window.scored, len(window.ids))
    ]
    row, position = torch.tensor(rows, device=device), torch.tensor(positions, device=device)
    hidden = through(ids)[row, position - 1]
    chunks = zip(
        torch.split(hidden, _LOGIT_ROWS), torch.split(ids[row, position], _LOGIT_ROWS), strict=True
    )
    losses_N = torch.cat(
        [
            functional.cross_entropy(decoder.logits(states).float(), targets, reduction="none")
            for states, targets in chunks
        ]
    ).double()
    sums: Tensor = torch.zeros(len(batch), dtype=torch.float64, device=device).index_add_(
        0, row, losses_N
    )
    return [float(total) for total in sums]


def _length_matters(decoder: Decoder) -> bool:
    """Whether padding changes results: dynamic rotary scaling depends on the sequence length."""
    scaling = decoder.spec.rope.scaling
    return decoder.spec.position == "rope" and scaling is not None and scaling.name == "dynamic"
