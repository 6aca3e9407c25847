"""Examples as token ids: each text of an example is a document with the tokens to train.

Does not depend on files, order or sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.contracts.examples.example import Completion, Example
from workers.models.text.chat_format import ChatFormat, EncodedText, TrainOn


def encode_example(
    example: Example, chat: ChatFormat, *, train_on: TrainOn
) -> tuple[EncodedText, ...]:
    """One document per text. Tokens after the last trained one are cut off.

    Raises WeightsError for a text that the template refuses, or without a trained token.
    """
    return tuple(
        (
            chat.completion(text.prompt, text.answer, train_on=train_on)
            if isinstance(text, Completion)
            else chat.conversation(
                text.messages, answer=text.answer, train_on=train_on, tools=example.tools
            )
        ).trimmed()
        for text in example.texts
    )


def common_prompt(documents: Sequence[EncodedText]) -> bool:
    """Whether the documents of a pair have the same ids before their answers."""
    first, *others = (each.ids[: each.answer] for each in documents)
    return all(other == first for other in others)
