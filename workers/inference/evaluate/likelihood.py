"""How likely a model finds texts: the negative logarithm of each token's probability, read in
windows that overlap.

Knows ids; does not know lines or files. Every token but a text's first counts once, with as much
before it as its
window holds (Hugging Face, "Perplexity of fixed-length models").
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
    """The first of `ids` stands at `start` of its text; the last `scored` of them count."""

    text: int
    start: int
    ids: tuple[int, ...]
    scored: int


def windows_of(
    texts: Sequence[tuple[Sequence[int], int]], *, window: int, stride: int
) -> Iterator[Window]:
    """Of texts `(ids, first)`: ids from place `first` on count, 0 meaning 1, since nothing is
    before a text's first.

    The first window of a text begins with it; each later one counts `stride` ids, below `window`,
    or what is left.
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
    """The sum of each window's counted losses, in nats; windows are read together, about
    `batch_tokens` at a time.

    `through` stands in for the decoder's own where other ranks compute a part of it."""
    device = next(decoder.parameters()).device
    found: list[float] = []
    rest, alone = list(windows), _length_matters(decoder)
    while rest:
        count = 1
        while (
            not alone
            and count < len(rest)
            and (count + 1) * max(len(e.ids) for e in rest[: count + 1]) <= batch_tokens
        ):
            count += 1
        batch, rest = rest[:count], rest[count:]
        found += _batch(decoder, through or decoder.through, batch, device)
    return found


def _batch(
    decoder: Decoder,
    through: Callable[[Tensor], Tensor],
    batch: Sequence[Window],
    device: torch.device,
) -> list[float]:
    longest = max(len(each.ids) for each in batch)
    # what fills up stands behind: a token sees those before it alone
    ids = torch.tensor(
        [[*each.ids, *[0] * (longest - len(each.ids))] for each in batch], device=device
    )
    rows = [row for row, each in enumerate(batch) for _ in range(each.scored)]
    places = [
        place for each in batch for place in range(len(each.ids) - each.scored, len(each.ids))
    ]
    row, place = torch.tensor(rows, device=device), torch.tensor(places, device=device)
    hidden = through(ids)[row, place - 1]
    parts = zip(
        torch.split(hidden, _LOGIT_ROWS), torch.split(ids[row, place], _LOGIT_ROWS), strict=True
    )
    lost = torch.cat(
        [
            functional.cross_entropy(decoder.logits(some).float(), wanted, reduction="none")
            for some, wanted in parts
        ]
    ).double()
    sums: Tensor = torch.zeros(len(batch), dtype=torch.float64, device=device).index_add_(
        0, row, lost
    )
    return [float(each) for each in sums]


def _length_matters(decoder: Decoder) -> bool:
    """Dynamic rotary scaling turns by the length of what is read, so what fills up would change it."""
    scaling = decoder.spec.rope.scaling
    return decoder.spec.position == "rope" and scaling is not None and scaling.name == "dynamic"
