"""The characters of a templated conversation that the model generates in each of its turns.

By the template's `{% generation %}` marks, or else by rendering prefixes. Does not depend on
tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.models.errors import WeightsError
from workers.models.text.chat_templates import CLOSE, OPEN, marks_generation, render

_Messages = Sequence[Mapping[str, Any]]
_Span = tuple[int, int]


def answer_spans(
    template: str,
    names: Mapping[str, Any],
    messages: _Messages,
    turns: Sequence[int],
    *,
    where: str,
) -> tuple[str, list[_Span]]:
    """The rendered conversation, and the characters of each of the assistant's `turns` in it.

    A span begins where the model's prompt ends and includes what the template puts after the
    answer, as the stop token. Raises WeightsError if the template refuses the messages, drops an
    answer, or renders a prefix of the conversation differently than the whole.
    """
    text, spans = (
        _by_marks(template, names, messages, turns, where)
        if marks_generation(template)
        else _by_prefixes(template, names, messages, turns, where)
    )
    for turn, (start, stop) in zip(turns, spans, strict=True):
        content = str(messages[turn].get("content") or "").strip()
        if content not in text[start:stop]:
            raise WeightsError(
                f"{where}: its chat template drops text of the answer in message {turn}; give a "
                "template that keeps every answer"
            )
    return text, spans


def _by_marks(
    template: str,
    names: Mapping[str, Any],
    messages: _Messages,
    turns: Sequence[int],
    where: str,
) -> tuple[str, list[_Span]]:
    full = {**names, "messages": messages, "add_generation_prompt": False}
    marked = render(template, full, where=where, marked=True)
    text, spans = "", list[_Span]()
    for piece in marked.split(OPEN):
        generated, mark, rest = piece.partition(CLOSE)
        if mark:
            spans.append((len(text), len(text) + len(generated)))
        text += generated + rest
    if text != render(template, full, where=where):
        raise WeightsError(f"{where}: its chat template changes text by its generation marks")
    answers = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
    if len(spans) != len(answers):
        raise WeightsError(
            f"{where}: its chat template marks {len(spans)} generated spans for {len(answers)} "
            "answers; mark each turn of the assistant once"
        )
    by_turn = dict(zip(answers, spans, strict=True))
    if turns:
        last = {**full, "messages": messages[: turns[-1]], "add_generation_prompt": True}
        if text[: by_turn[turns[-1]][0]] != render(template, last, where=where):
            raise WeightsError(
                f"{where}: its chat template puts another text before the answer in message "
                f"{turns[-1]} than add_generation_prompt does; start the mark where the prompt ends"
            )
    return text, [by_turn[turn] for turn in turns]


def _by_prefixes(
    template: str,
    names: Mapping[str, Any],
    messages: _Messages,
    turns: Sequence[int],
    where: str,
) -> tuple[str, list[_Span]]:
    def rendered(count: int, *, answer: bool) -> str:
        full = {**names, "messages": messages[:count], "add_generation_prompt": answer}
        return render(template, full, where=where)

    text, spans = rendered(len(messages), answer=False), list[_Span]()
    for turn in turns:
        before, after = rendered(turn, answer=True), rendered(turn + 1, answer=False)
        if not text.startswith(before):
            raise WeightsError(
                f"{where}: its chat template renders the prompt of message {turn} differently "
                "than the whole conversation; mark answers by {% generation %}"
            )
        common = len(after) if text.startswith(after) else len(after.rstrip())
        if not text.startswith(after[:common]):
            raise WeightsError(
                f"{where}: its chat template renders message {turn} differently when more "
                "messages follow; mark answers by {% generation %}"
            )
        spans.append((len(before), common))
    return text, spans
