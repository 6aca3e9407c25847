"""Lines of results to be: what is judged of each item as ids in windows, and what the losses of
these say of it.

Knows ids and texts; does not know the model beyond its tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.inference.evaluate.likelihood import Window, windows_of
from workers.inference.evaluate.lines import Item
from workers.inference.model_loading import LoadedModel
from workers.runtime.exits import UserError


@dataclass(frozen=True, slots=True)
class Unit:
    """`row` is what is known of the line before its likelihood."""

    row: Mapping[str, Any]
    windows: tuple[Window, ...]
    item: Item

    @property
    def tokens(self) -> int:
        return sum(len(each.ids) for each in self.windows)

    def judged(self, sums: Sequence[float]) -> dict[str, Any]:
        """`{tokens, nll}`, and of a question which choice is likeliest, by the whole of it and by
        its bytes.
        """
        told: dict[str, Any] = {
            "tokens": sum(each.scored for each in self.windows),
            "nll": math.fsum(sums),
        }
        choices = self.item.choices
        if choices:
            lost = [0.0] * len(choices)
            for window, each in zip(self.windows, sums, strict=True):
                lost[window.text] += each
            # by bytes, so that a longer choice is not less likely for being longer
            by_byte = [each / len(text.encode()) for each, text in zip(lost, choices, strict=True)]
            chosen, by_bytes = lost.index(min(lost)), by_byte.index(min(by_byte))
            right, right_norm = float(chosen == self.item.right), float(by_bytes == self.item.right)
            told |= {
                "choices_nll": lost,
                "chosen": chosen,
                "right": right,
                "right_norm": right_norm,
            }
        return told


def units_of(
    loaded: LoadedModel,
    items: Sequence[Item],
    rows: Sequence[Mapping[str, Any]],
    *,
    window: int,
    stride: int,
    most: int | None,
) -> list[Unit]:
    """One an item; where there is a single document and nothing else to tell of it, one a window.

    `most` bounds the tokens of documents, those beyond it are left out. Raises UserError.
    """
    apart = len(items) == 1 and items[0].text is not None and "answer" not in rows[0]
    left, found = most, []
    for item, row in zip(items, rows, strict=True):
        texts = _texts(loaded, item)
        if left is not None and item.text is not None:
            if left < 2 and "answer" not in row:
                break
            texts = [(ids[: max(0, left)], first) for ids, first in texts]
            left -= sum(len(ids) for ids, _ in texts)
        for ids, _ in texts:
            _check(ids, item, vocab=loaded.spec.vocab)
        windows = tuple(windows_of(texts, window=window, stride=stride))
        if apart:
            for number, each in enumerate(windows):
                told = {
                    "id": number,
                    "start": each.start + len(each.ids) - each.scored,
                    "bytes": _bytes(loaded, [each]),
                }
                found.append(Unit(told, (each,), item))
        else:
            found.append(Unit({**row, "bytes": _bytes(loaded, windows)}, windows, item))
    return found


def _bytes(loaded: LoadedModel, windows: Sequence[Window]) -> int:
    """Of the text that counts, 0 where ids alone are known."""
    if loaded.tokenizer is None:
        return 0
    return sum(
        len(loaded.tokenizer.decode(each.ids[-each.scored :]).encode())
        for each in windows
        if each.scored
    )


def _texts(loaded: LoadedModel, item: Item) -> list[tuple[list[int], int]]:
    """Ids and where what counts begins: of a text all of it, of a question each choice or the
    reference after it.
    """
    asks, after = item.asks, item.choices or item.references[:1]
    if item.text is None and asks is not None and asks.form == "token_ids" and not after:
        return [(list(asks.given), 0)]
    if loaded.tokenizer is None:
        raise UserError(
            "evaluate.input: it is text, and the model came without a tokenizer; give token_ids"
        )
    if asks is None:
        return [(loaded.tokenizer.encode(item.text or ""), 0)]
    try:
        before = asks.tokens(loaded.tokenizer)
    except ValueError as error:
        raise UserError(f"evaluate.input line {asks.number}: {error}") from None
    if not after:
        return [(before, 0)]
    return [([*before, *loaded.tokenizer.encode(each, special=False)], len(before)) for each in after]


def _check(ids: Sequence[int], item: Item, *, vocab: int) -> None:
    wrong = next((each for each in ids if not 0 <= each < vocab), None)
    if wrong is not None:
        raise UserError(
            f"evaluate.input: id {item.id!r} has the token id {wrong}; the model knows 0 to "
            f"{vocab - 1}"
        )
