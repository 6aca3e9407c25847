"""Chat tab: talk to a served model, and the same call by curl and by OpenAI's own client."""

from __future__ import annotations

import json
import shlex
from typing import Any

from django.http import HttpRequest

from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    standing = facts.standing
    assert standing is not None
    base = request.build_absolute_uri(f"/serve/{facts.run.pk}/v1")
    told = standing.serving
    model = told.model if told is not None else facts.run.model_name
    chats = told.chat if told is not None else True
    return {
        "standing": standing,
        "again": f"/runs/new/?like={facts.run.pk}",
        "base": base,
        "model": model,
        "chats": chats,
        "context": told.context if told is not None else None,
        "curl": curl(base, model, chats),
        "python": python(base, model, chats),
        "talk": {
            "url": f"/serve/{facts.run.pk}/v1",
            "model": model,
            "chat": chats,
            "phase": standing.phase,
            "phase_url": f"/runs/{facts.run.pk}/engine/phase/",
        },
        "source": facts.source(),
    }


def phase(facts: Facts) -> dict[str, Any]:
    """For a page that waits for the server."""
    standing = facts.standing
    return (
        {"phase": standing.phase, "says": standing.message}
        if standing is not None
        else {"phase": "ended", "says": ""}
    )


def curl(base: str, model: str, chats: bool) -> str:
    address = "chat/completions" if chats else "completions"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    if not chats:
        asked = {"prompt": "To be, or not", "max_tokens": 64}
    body = json.dumps({"model": model, **asked, "stream": True})
    return (
        f"curl -N {shlex.quote(f'{base}/{address}')} \\\n"
        '  -H "Authorization: Bearer $ORRERY_TOKEN" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(body)}"
    )


def python(base: str, model: str, chats: bool) -> str:
    lines = [
        "import os",
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url={json.dumps(base)}, api_key=os.environ["ORRERY_TOKEN"])',
    ]
    if chats:
        lines += [
            "answer = client.chat.completions.create(",
            f"    model={json.dumps(model)},",
            '    messages=[{"role": "user", "content": "Why is the sky blue?"}],',
            ")",
            "print(answer.choices[0].message.content)",
        ]
    else:
        lines += [
            (
                f'answer = client.completions.create(model={json.dumps(model)}, prompt="To be, or '
                'not", max_tokens=64)'
            ),
            "print(answer.choices[0].text)",
        ]
    return "\n".join(lines)
