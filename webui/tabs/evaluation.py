"""Results tab of an evaluate run: metrics with their meaning, and the lowest-scoring examples."""

from __future__ import annotations

import re
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from orchestrator.accounts.roles import Role
from orchestrator.reviews import answer_votes
from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import evaluation_results
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from webui.tabs import before_after
from webui.tabs.evaluation_metrics import METRICS
from webui.views.access import has_role
from workers.contracts.wire.serving_reports import Wins

_WORST: Final = 20
_LONGEST: Final = 600
_RANKED_BY: Final = {
    "loss": gettext_noop("loss"),
    "right": gettext_noop("correctness"),
    "exact_match": gettext_noop("exact match"),
    "rougeL": "ROUGE-L",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    results = facts.evaluated
    worst: list[evaluation_results.Line] = []
    votes = people_votes(facts, request) if results is not None else None
    # the table shows answers after training, which would show a voter which one is which
    hidden = votes["state"].open_ids if votes is not None and votes["may_vote"] else ()
    if results is not None:
        worst = evaluation_results.worst(run=facts.run, evaluation=results, limit=_WORST) or []
    shown = [example(entry, hide_answer=entry.id in hidden) for entry in worst]
    return {
        "rows": [
            row(name, value, results.intervals.get(name)) for name, value in results.metrics.items()
        ]
        if results is not None
        else [],
        "comparison": before_after.comparison(results) if results is not None else None,
        "votes": votes,
        "worst": shown,
        "hides_answers": any(entry.id in hidden for entry in worst),
        "worst_by": _(_RANKED_BY.get(worst[0].by, worst[0].by)) if worst else "",
        "facts": describe(results) if results is not None else [],
        "answered": any(each["answer"] for each in shown),
        "files": [(file, _short_name(file.name)) for file in runs.artifacts_of(run=facts.run)[:20]],
        "waiting": facts.run.state not in ENDED,
        "source": facts.source(),
    }


def people_votes(facts: Facts, request: HttpRequest) -> dict[str, Any] | None:
    """Return the win rate by people and the viewer's next pair; None without answers to compare."""
    user: Any = request.user
    state = answer_votes.vote_state(run=facts.run, user=user)
    if not state.is_available or not state.pairs:
        return None
    wins = state.wins or Wins()
    return {
        "state": state,
        "low": f"{100 * wins.low:.2f}",
        "width": f"{100 * (wins.high - wins.low):.2f}",
        "at": f"{100 * wins.rate:.2f}",
        "judged": before_after.judged(state.wins) if state.wins is not None else None,
        "may_vote": has_role(user, Role.SUBMITTER),
        "voters": ngettext("%(count)s person", "%(count)s people", state.voters)
        % {"count": state.voters},
    }


def _short_name(name: str) -> str:
    """Remove the attempt prefix of a node's artifact."""
    return re.sub(r"^attempt-\d+-", "", name)


def row(name: str, value: float, interval: tuple[float, float] | None) -> dict[str, str]:
    """Return a metric with its 95% interval and its meaning."""
    title, unit, better, meaning = METRICS.get(name, (name.replace("_", " "), "", "", ""))
    shown = formatting.percent(value) if unit == "share" else formatting.quantity(value, 4)
    return {
        "title": _(title),
        "value": shown,
        "interval": before_after.interval_text(unit, interval) if interval else "",
        "unit": "" if unit == "share" or not unit else _(unit),
        "better": _(better) if better else "",
        "meaning": _(meaning) if meaning else "",
    }


def example(entry: evaluation_results.Line, *, hide_answer: bool = False) -> dict[str, str]:
    """Return one evaluated example, perhaps without its answer."""
    data = entry.row
    shown = (
        formatting.quantity(entry.value, 4)
        if entry.by == "loss"
        else _("wrong")
        if entry.by == "right"
        else formatting.percent(entry.value)
    )
    answer = data.get("answer")
    if answer is None and entry.by == "right":
        answer = _("chose %(choice)s") % {"choice": data.get("chosen")}
    tokens = data.get("tokens")
    return {
        "id": str(entry.id),
        "value": shown,
        "answer": str(answer)[:_LONGEST] if answer is not None and not hide_answer else "",
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else "",
    }


def describe(results: Any) -> list[tuple[str, str]]:
    """Return `(name, value)` pairs of how the run was evaluated."""
    pairs = [(_("Model"), results.model), (_("Examples"), f"{results.lines:,}")]
    if results.quantize:
        pairs.append((_("Weights"), results.quantize))
    if results.tokens:
        pairs.append((_("Tokens"), formatting.quantity(results.tokens)))
    if results.input:
        pairs.append((_("Input"), results.input))
    if results.window:
        pairs.append(
            (
                _("Window"),
                _("%(size)s tokens, stride %(stride)s")
                % {"size": f"{results.window:,}", "stride": f"{results.stride:,}"},
            )
        )
    if results.seconds:
        pairs.append((_("Duration"), formatting.duration(results.seconds)))
    return pairs
