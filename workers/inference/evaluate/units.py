"""Units of likelihood evaluation: an item's token windows, and its result line from their losses.

Depends on the model's tokenizer only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.inference.evaluate.items import EvaluationItem
from workers.inference.evaluate.likelihood import Window, split_windows
from workers.inference.model_loading import LoadedModel
from workers.runtime.exit_codes import UserError


@dataclass(frozen=True, slots=True)
class Unit:
    """The windows of one result line; `row` is the line without its likelihood."""

    row: Mapping[str, Any]
    windows: tuple[Window, ...]
    item: EvaluationItem

    @property
    def tokens(self) -> int:
        """Tokens to compute, including context."""
        return sum(len(window.ids) for window in self.windows)

    def score(self, sums: Sequence[float]) -> dict[str, Any]:
        """`{tokens, nll}`, and for a question the likeliest choice, in total and per byte."""
        scores: dict[str, Any] = {
            "tokens": sum(window.scored for window in self.windows),
            "nll": math.fsum(sums),
        }
        choices = self.item.choices
        if choices:
            nll = [0.0] * len(choices)
            for window, loss in zip(self.windows, sums, strict=True):
                nll[window.text] += loss
            # per byte, so that a longer choice is not penalized for its length
            per_byte = [loss / len(text.encode()) for loss, text in zip(nll, choices, strict=True)]
            chosen, chosen_norm = nll.index(min(nll)), per_byte.index(min(per_byte))
            scores |= {
                "choices_nll": nll,
                "chosen": chosen,
                "right": float(chosen == self.item.right),
                "right_norm": float(chosen_norm == self.item.right),
            }
        return scores


def build_units(
    loaded: LoadedModel,
    items: Sequence[EvaluationItem],
    rows: Sequence[Mapping[str, Any]],
    *,
    window: int,
    stride: int,
    max_tokens: int | None,
) -> list[Unit]:
    """One unit per item; for a single document without an answer, one per window.

    At most `max_tokens` tokens of documents are included. Raises UserError.
    """
    per_window = len(items) == 1 and items[0].text is not None and "answer" not in rows[0]
    left, units = max_tokens, []
    for item, row in zip(items, rows, strict=True):
        texts = _texts(loaded, item)
        if left is not None and item.text is not None:
            if left < 2 and "answer" not in row:
                break
            texts = [(ids[: max(0, left)], first) for ids, first in texts]
            left -= sum(len(ids) for ids, _ in texts)
        for ids, _ in texts:
            _check(ids, item, vocab=loaded.spec.vocab)
        windows = tuple(split_windows(texts, window=window, stride=stride))
        if per_window:
            for number, part in enumerate(windows):
                window_row = {
                    "id": number,
                    "start": part.start + len(part.ids) - part.scored,
                    "bytes": _scored_bytes(loaded, [part]),
                }
                units.append(Unit(window_row, (part,), item))
        else:
            units.append(Unit({**row, "bytes": _scored_bytes(loaded, windows)}, windows, item))
    return units


def _scored_bytes(loaded: LoadedModel, windows: Sequence[Window]) -> int:
    """Bytes of the scored text; 0 without a tokenizer."""
    if loaded.tokenizer is None:
        return 0
    return sum(
        len(loaded.tokenizer.decode(window.ids[-window.scored :]).encode())
        for window in windows
        if window.scored
    )


def _texts(loaded: LoadedModel, item: EvaluationItem) -> list[tuple[list[int], int]]:
    """Ids and the index of the first one that counts: a full text, or each choice or the reference
    after its prompt.
    """
    prompt, after = item.prompt, item.choices or item.references[:1]
    if item.text is None and prompt is not None and prompt.form == "token_ids" and not after:
        return [(list(prompt.value), 0)]
    if loaded.tokenizer is None:
        raise UserError(
            "evaluate.input: text requires a tokenizer, but the model has no tokenizer; give "
            "token_ids"
        )
    if prompt is None:
        return [(loaded.tokenizer.encode(item.text or ""), 0)]
    try:
        before = prompt.tokens(loaded.tokenizer)
    except ValueError as error:
        raise UserError(f"evaluate.input line {prompt.number}: {error}") from None
    if not after:
        return [(before, 0)]
    return [
        ([*before, *loaded.tokenizer.encode(text, special=False)], len(before)) for text in after
    ]


def _check(ids: Sequence[int], item: EvaluationItem, *, vocab: int) -> None:
    wrong = next((id for id in ids if not 0 <= id < vocab), None)
    if wrong is not None:
        raise UserError(
            f"evaluate.input: id {item.id!r} has the token id {wrong}; the vocabulary is 0 to "
            f"{vocab - 1}"
        )
