"""Answers tab of a generate run: prompts with their answers, paged, and the progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from orchestrator.runs.outputs import generated_answers
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

ROWS: Final = 20
_LONGEST: Final = 4000  # characters shown per text
_FINISH_REASONS: Final = {
    "stop": (gettext_noop("complete"), "good"),
    "length": (gettext_noop("length limit"), "warn"),
    "aborted": (gettext_noop("aborted"), "bad"),
    "error": (gettext_noop("error"), "bad"),
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run, after = facts.run, request.GET.get("after") or None
    body = run.spec.get("generate") or {}
    here = generated_answers.is_available(run)
    page = (
        generated_answers.get_page(run=run, after=after, limit=ROWS)
        if here
        else generated_answers.Page([], None)
    )
    done, total = generated_answers.count_answers(run) if here else (0, None)
    return {
        "rows": [row(answer) for answer in page.answers],
        "following": page.next,
        "after": after,
        "here": here,
        "done": f"{done:,}",
        "total": f"{total:,}" if total is not None else "",
        "part": f"{100 * done / total:.1f}" if total else "",
        "facts": [
            (name, value)
            for name, value in (
                (_("Input"), body.get("input")),
                (_("Output"), str(generated_answers.file_paths(run)[1])),
                (
                    _("Max output tokens"),
                    body.get("max_new_tokens", 64),
                ),
                (_("Temperature"), body.get("temperature", 1.0)),
            )
            if value is not None
        ],
        "waiting": run.state not in ENDED,
        "speed": formatting.quantity(facts.latest.get("inference/tokens_per_s"))
        if facts.latest
        else "",
        "source": facts.source(),
    }


def row(answer: generated_answers.Answer) -> dict[str, Any]:
    """Return one answer with its prompt as the template shows it."""
    reason, mood = _FINISH_REASONS.get(answer.finish_reason or "", (answer.finish_reason or "", ""))
    text = answer.text if answer.text is not None else _ids(answer.token_ids)
    return {
        "number": answer.number,
        "id": answer.id,
        "messages": messages(answer.prompt),
        "text": text[:_LONGEST],
        "truncated": len(text) > _LONGEST,
        "tokens": ngettext("%(count)s token", "%(count)s tokens", len(answer.token_ids))
        % {"count": f"{len(answer.token_ids):,}"},
        "reason": _(reason) if reason else "",
        "mood": mood,
        "in_ids": answer.text is None,
    }


def messages(prompt: Any) -> list[dict[str, str]]:
    """Return `[{role, text}]` of a prompt, a conversation or token ids; plain text has no role."""
    if isinstance(prompt, str):
        return [{"role": "", "text": prompt[:_LONGEST]}]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(item, dict) for item in prompt):
        return [
            {"role": str(item.get("role", "")), "text": _text(item.get("content"))}
            for item in prompt
        ]
    return [{"role": "", "text": _ids(prompt)}] if isinstance(prompt, list) else []


def _text(content: Any) -> str:
    return (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))[
        :_LONGEST
    ]


def _ids(ids: Sequence[Any]) -> str:
    return " ".join(map(str, ids[:400])) + (" …" if len(ids) > 400 else "")
