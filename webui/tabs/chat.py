"""Chat tab of a serve run, called Score for a reward model: a form, and the same call in code."""

from __future__ import annotations

import json
import shlex
from typing import Any

from django.http import HttpRequest

from webui.presentation.run_facts import Facts


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    status = facts.endpoint
    assert status is not None
    base = request.build_absolute_uri(f"/serve/{facts.run.pk}/v1")
    serving = status.serving
    model = serving.model if serving is not None else facts.run.model_name
    has_template = serving.chat if serving is not None else True
    scores = facts.scores
    return {
        "endpoint": status,
        "restart_url": f"/runs/new/?like={facts.run.pk}",
        "base": base,
        "model": model,
        "has_template": has_template,
        "scores": scores,
        "context": serving.context if serving is not None else None,
        "curl": score_curl(base, model) if scores else curl(base, model, has_template),
        "python": score_python(base, model) if scores else python(base, model, has_template),
        "chat": {
            "url": f"/serve/{facts.run.pk}/v1",
            "model": model,
            "chat": has_template,
            "scores": scores,
            "phase": status.phase,
            "phase_url": f"/runs/{facts.run.pk}/engine/phase/",
        },
        "source": facts.source(),
    }


def phase(facts: Facts) -> dict[str, Any]:
    """Return `{phase, message}` for a page that waits for the server."""
    status = facts.endpoint
    if status is None:
        return {"phase": "ended", "message": ""}
    return {"phase": status.phase, "message": status.message}


_SCORED = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Scattering."},
]


def score_curl(base: str, model: str) -> str:
    """Return a curl command for a reward model's score of a conversation."""
    return _curl(f"{base}/pooling", {"model": model, "messages": _SCORED})


def score_python(base: str, model: str) -> str:
    """Return the same call in Python: OpenAI's client has no scores."""
    messages = "".join(f"    {json.dumps(message)},\n" for message in _SCORED)
    return "\n".join(
        (
            "import os",
            "import httpx",
            "",
            f"messages = [\n{messages}]",
            "answer = httpx.post(",
            f"    {json.dumps(f'{base}/pooling')},",
            '    headers={"Authorization": f"Bearer {os.environ[\'ORRERY_TOKEN\']}"},',
            f'    json={{"model": {json.dumps(model)}, "messages": messages}},',
            ")",
            'print(answer.json()["data"][0]["data"][0])',
        )
    )


def curl(base: str, model: str, has_template: bool) -> str:
    """Return a curl command: chat completions if the model has a chat template."""
    path = "chat/completions" if has_template else "completions"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    if not has_template:
        prompt = {"prompt": "To be, or not", "max_tokens": 64}
    return _curl(f"{base}/{path}", {"model": model, **prompt, "stream": True})


def _curl(url: str, body: dict[str, Any]) -> str:
    return (
        f"curl -N {shlex.quote(url)} \\\n"
        '  -H "Authorization: Bearer $ORRERY_TOKEN" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def python(base: str, model: str, has_template: bool) -> str:
    """Return the same call with OpenAI's Python client."""
    lines = [
        "import os",
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url={json.dumps(base)}, api_key=os.environ["ORRERY_TOKEN"])',
    ]
    if has_template:
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
