"""Rollouts of a reinforcement learning run: one iteration's answers with rewards, by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from orchestrator.runs.outputs.rollouts import rollout_steps, rollouts_at
from webui.presentation.run_facts import Facts
from workers.contracts.wire.rollouts import SampledAnswer, SampledGroup


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as shown; `share` is the length of its advantage bar, from 0 to 100."""

    text: str
    tokens: int
    reward: str
    parts: str
    advantage: str
    sign: str
    share: int
    failure: str
    colored: SafeString
    versions: str


def expected(facts: Facts) -> bool:
    """Whether the run samples answers."""
    return (facts.run.spec.get("train") or {}).get("objective") in ("grpo", "ppo")


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """The answers of the step `at` (default: the newest), and the steps to choose from."""
    steps = rollout_steps(run=facts.run)
    wanted = request.GET.get("at", "")
    index = len(steps) - 1
    if wanted.isdecimal() and len(wanted) < 10:
        index = min(int(wanted), index)
    row = rollouts_at(event=steps[index][0]) if steps else None
    if row is None:
        return {"steps": [], "summary": _("The first answers follow when an iteration is sampled.")}
    shown = row.content
    return {
        "steps": steps,
        "index": index,
        "last": len(steps) - 1,
        "newest": index == len(steps) - 1,
        "step": f"{shown.step:,}",
        "weight_version": f"{shown.weight_version:,}",
        "colored": any(each.pieces for group in shown.groups for each in group.answers),
        "groups": [_group(each) for each in shown.groups],
    }


def _group(group: SampledGroup) -> dict[str, Any]:
    largest = max((abs(each.advantage) for each in group.answers), default=0.0) or 1.0
    ordered = sorted(group.answers, key=lambda each: -each.reward)
    return {
        "prompt": group.prompt,
        "expected": group.expected,
        "learned": group.learned,
        "answers": [_answer(each, largest) for each in ordered],
    }


def _answer(each: SampledAnswer, largest: float) -> Answer:
    return Answer(
        text=each.text,
        tokens=each.tokens,
        reward=f"{each.reward:.3g}",
        parts=", ".join(f"{name} {value:.3g}" for name, value in each.rewards.items()),
        advantage=f"{each.advantage:+.2f}" if each.advantage else "0",
        sign=_sign(each.advantage),
        share=round(100 * abs(each.advantage) / largest),
        failure=each.failure,
        colored=_colored(each),
        versions=_versions(each),
    )


def _colored(answer: SampledAnswer) -> SafeString:
    """Its tokens, each colored by its advantage; empty if they have none of their own."""
    largest = max((abs(each.advantage) for each in answer.pieces), default=0.0) or 1.0
    return format_html_join(
        "",
        '<span class="token {}" style="--strength: {}%" title="{}">{}</span>',
        (
            (
                _sign(each.advantage),
                round(100 * abs(each.advantage) / largest),
                f"{each.advantage:+.2f}",
                each.text,
            )
            for each in answer.pieces
        ),
    )


def _versions(answer: SampledAnswer) -> str:
    """The range of versions, if there are several."""
    if answer.first_version == answer.last_version:
        return ""
    return f"{answer.first_version:,} – {answer.last_version:,}"


def _sign(advantage: float) -> str:
    return "good" if advantage > 0 else "bad" if advantage < 0 else "zero"
