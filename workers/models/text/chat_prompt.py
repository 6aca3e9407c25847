"""A conversation as the ids of a prompt: the one function for training, rollouts and serving.

The template writes all special tokens, so the tokenizer adds none. Does not depend on tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.models.text.chat_templates import render

Messages = Sequence[Mapping[str, Any]]


def encode_chat(
    template: str,
    special: Mapping[str, str],
    messages: Messages,
    *,
    encode: Callable[[str], list[int]],
    tools: Sequence[Any] = (),
    where: str,
) -> list[int]:
    """Ids of the messages up to the start of the next answer.

    `encode` adds no special tokens; `special` are the texts of those that templates name. Raises
    WeightsError if the template refuses the messages.
    """
    return encode(chat_text(template, special, messages, tools=tools, answer=True, where=where))


def chat_text(
    template: str,
    special: Mapping[str, str],
    messages: Messages,
    *,
    tools: Sequence[Any] = (),
    answer: bool,
    where: str,
) -> str:
    """The messages in the template's format, with `answer` up to the start of the next answer."""
    names: dict[str, Any] = {**special, "tools": list(tools) or None}
    names = {**names, "messages": messages, "add_generation_prompt": answer}
    return render(template, names, where=where)
