"""Conversations that a chat template cannot render are refused when the run is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import services
from orchestrator.runs.submission.examples import template_problems

pytestmark = pytest.mark.django_db
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
PAIR = {
    "prompt": CHAT[:1],
    "chosen": CHAT[1:],
    "rejected": [{"role": "assistant", "content": "No"}],
}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"


def problems(
    owner: User, folder: Path, lines: list[Any], *, format: str = "messages", **train: Any
) -> list[dict[str, str]]:
    """What a submission is refused for; empty if the run is queued."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    body = {"steps": 1, "seq_len": 64, "objective": "sft", **train}
    data = {"path": str(path), "format": format, "tokenizer": "bytes"}
    spec = {"kind": "train", "model": "llama-tiny", "data": data, "train": body}
    try:
        services.run_submit(owner=owner, name="x", spec=spec)
    except Refusal as refusal:
        return refusal.errors
    return []


@pytest.mark.parametrize(
    ("lines", "train", "field", "message"),
    [
        (
            [{"messages": CHAT}],
            {"sft": {"template": "{% for m in messages %}{{ m.role }}{% endfor %}"}},
            "train.sft.template",
            "line 1: bytes: its chat template drops text of the answer in message 1",
        ),
        (
            [{"messages": CHAT}],
            {"sft": {"template": "{% for m in messages %}"}},
            "train.sft.template",
            "its chat template is invalid",
        ),
        (
            [{"messages": CHAT}],
            {"sft": {"template": TURNS + PROMPT}},
            "train.sft.template",
            "ends message 1 without a stop token",
        ),
        (
            [{"messages": CHAT}, {"messages": [CHAT[0], {**CHAT[1], "content": "a\x04b"}]}],
            {},
            "data.path",
            "chats.jsonl, line 2: the text spells the control token",
        ),
        (
            [{"messages": [{**CHAT[0], "content": "Hi" * 100}, CHAT[1]]}],
            {},
            "data.path",
            "all 1 examples are longer than a sequence before their first trained token",
        ),
        (
            [PAIR],
            {
                "objective": "dpo",
                "dpo": {
                    "template": "{{ messages[-1].content[:1] }}"
                    + TURNS
                    + "{{ eos_token }}"
                    + PROMPT
                },
            },
            "train.dpo.template",
            "chat template",
        ),
    ],
)
def test_what_a_template_cannot_render_is_refused_with_its_line(
    lines: list[Any],
    train: dict[str, Any],
    field: str,
    message: str,
    owner: User,
    data_root: Path,
) -> None:
    format = "preference" if lines == [PAIR] else "messages"
    [problem] = problems(owner, data_root, lines, format=format, **train)
    assert problem["field"] == field and message in problem["message"], problem
    assert problem["hint"]


def test_conversations_that_render_are_accepted(owner: User, data_root: Path) -> None:
    assert problems(owner, data_root, [{"messages": CHAT}]) == []
    assert problems(owner, data_root, [PAIR], format="preference", objective="dpo") == []


def test_a_run_is_accepted_if_its_lines_cannot_be_checked_here(
    owner: User, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(request: Any) -> Any:
        raise Refusal("busy", "Try again", 503, "Two previews are in progress.")

    monkeypatch.setattr(template_problems, "preview_of_checked_paths", busy)
    assert problems(owner, data_root, [{"messages": [*CHAT, *CHAT]}]) == []
