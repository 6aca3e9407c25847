"""Answers tab of a generate run: each prompt beside its answer, a page at a time, and how far it
is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs.outputs import generated_answers
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

ROWS: Final = 20
_LONGEST: Final = 4000  # characters of a text that is shown
_WHY: Final = {
    "stop": ("ended", "good"),
    "length": ("cut at its limit", "warn"),
    "aborted": ("aborted", "bad"),
    "error": ("error", "bad"),
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    run, after = facts.run, request.GET.get("after") or None
    body = run.spec.get("generate") or {}
    here = generated_answers.is_here(run)
    page = (
        generated_answers.page_of(run=run, after=after, limit=ROWS)
        if here
        else generated_answers.Page([], None)
    )
    done, of = generated_answers.counted(run) if here else (0, None)
    return {
        "rows": [row(each) for each in page.answers],
        "following": page.next,
        "after": after,
        "here": here,
        "done": f"{done:,}",
        "of": f"{of:,}" if of is not None else "",
        "part": f"{100 * done / of:.1f}" if of else "",
        "facts": [
            (name, value)
            for name, value in (
                ("Prompts", body.get("input")),
                ("Answers", str(generated_answers.places(run)[1])),
                ("At most", f"{body.get('max_new_tokens', 64)} tokens"),
                ("Temperature", body.get("temperature", 1.0)),
            )
            if value is not None
        ],
        "waits": run.state not in ENDED,
        "speed": formatting.quantity(facts.latest.get("inference/tokens_per_s"))
        if facts.latest
        else "",
        "source": facts.source(),
    }


def row(answer: generated_answers.Answer) -> dict[str, Any]:
    why, mood = _WHY.get(answer.finish_reason or "", (answer.finish_reason or "", ""))
    text = answer.text if answer.text is not None else _ids(answer.token_ids)
    return {
        "number": answer.number,
        "id": answer.id,
        "turns": turns(answer.asked),
        "text": text[:_LONGEST],
        "cut": len(text) > _LONGEST,
        "tokens": formatting.count(len(answer.token_ids), "token"),
        "why": why,
        "mood": mood,
        "in_ids": answer.text is None,
    }


def turns(asked: Any) -> list[dict[str, str]]:
    """`[{role, text}]` of a prompt, a conversation or ids; one without a role is a plain text."""
    if isinstance(asked, str):
        return [{"role": "", "text": asked[:_LONGEST]}]
    if isinstance(asked, Sequence) and asked and all(isinstance(each, dict) for each in asked):
        return [
            {"role": str(each.get("role", "")), "text": _text(each.get("content"))}
            for each in asked
        ]
    return [{"role": "", "text": _ids(asked)}] if isinstance(asked, list) else []


def _text(content: Any) -> str:
    return (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))[
        :_LONGEST
    ]


def _ids(ids: Sequence[Any]) -> str:
    return " ".join(map(str, ids[:400])) + (" …" if len(ids) > 400 else "")
