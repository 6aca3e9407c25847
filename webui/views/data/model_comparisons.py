"""Side-by-side chat pages: choose two served models, chat and vote, see win rates."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import invalid
from orchestrator.reviews import comparisons, reviewed_files, votes
from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import endpoint
from webui.presentation import formatting
from webui.views.access import PageRequest, has_role, page, redirect_with_message
from webui.views.data.reviews import written
from webui.views.list_with_form import list_with_form

SHOWN = 100
TURNS = 50


@page
@require_http_methods(["GET", "POST"])
def model_comparisons(request: PageRequest) -> HttpResponse:
    """List comparisons and win rates; POST starts a comparison."""

    def content() -> dict[str, Any]:
        serving = _serving(request.user)
        return {
            "title": _("Side-by-side chat"),
            "sentence": _(
                "Two served models answer the same message; you choose the better answer before "
                "you learn which model gave it. Votes become preference data."
            ),
            "data_tab": "comparisons",
            "rows": [
                (row, " · ".join(votes.labels(row)))
                for row in votes.comparisons_visible_to(user=request.user).order_by("-pk")[:SHOWN]
            ],
            "pairs": [pair_row(pair) for pair in votes.table(user=request.user)],
            "serving": serving,
            # by default the first two models
            "chosen": [value for group in serving for value, _name in group["models"]][:2],
            "may_compare": has_role(request.user, Role.SUBMITTER),
        }

    return list_with_form(
        request,
        "webui/data/model_comparisons.html",
        create=_start,
        address="model-comparison",
        content=content,
    )


@page
@require_GET
def model_comparison(request: PageRequest, id: int) -> HttpResponse:
    """Show the chat of a comparison, driven by the page's script, and its votes."""
    row = votes.comparison_get(user=request.user, id=id)
    turns = list(comparisons.turn_rows(comparison=row)[:TURNS])
    context = {
        "title": " · ".join(votes.labels(row)),
        "sentence": _(
            "The order of the two models is random for each message and shown after your vote."
        ),
        "data_tab": "comparisons",
        "comparison": row,
        "pairs": [pair_row(pair) for pair in votes.table(user=request.user, comparison=row)],
        "turns": [_turn(turn) for turn in turns if turn.choice],
        "may_compare": has_role(request.user, Role.SUBMITTER),
        "config": {"url": f"/api/v1/model-comparisons/{row.pk}"},
    }
    return render(request, "webui/data/model_comparison.html", context)


@page
@require_POST
def model_comparison_write(request: PageRequest, id: int) -> HttpResponse:
    """Write the votes to a reviewed file of preference pairs."""
    row = votes.comparison_get(user=request.user, id=id)
    made = reviewed_files.votes_write(
        comparison=row, by=request.user, lines=votes.preference_lines(row)
    )
    return redirect_with_message(request, written(made), "model-comparison", row.pk)


def pair_row(pair: votes.PairVotes) -> dict[str, Any]:
    """Return a pair's votes as the table shows them."""
    trials = pair.wins + pair.losses + pair.ties + pair.both_bad
    low, high = pair.low or 0.0, pair.high or 0.0
    return {
        "pair": pair,
        "votes": f"{trials:,}",
        "ties": pair.ties + pair.both_bad,
        "rate": formatting.percent(pair.win_rate) if pair.win_rate is not None else "",
        "interval": f"{formatting.percent(low)} – {formatting.percent(high)}",
        "low": f"{100 * low:.2f}",
        "width": f"{100 * (high - low):.2f}",
        "at": f"{100 * (pair.win_rate or 0.0):.2f}",
        "clear": low > 0.5 or high < 0.5,
    }


def _serving(user: Any) -> list[dict[str, Any]]:
    """Serve runs that answer messages: each with its models as `(value, name)`, adapters last."""
    groups = []
    for run in runs.run_list(user=user, kind="serve", state="running", limit=SHOWN):
        status = endpoint.status(run=run)
        if status.phase != "serving" or status.serving is None or not status.serving.chat:
            continue
        own, *adapters = comparisons.served_models(run=run, status=status)
        # weights of a run are served as "6" or "step-00000060", which does not identify a model
        named = own if not own.rpartition("-")[2].isdecimal() else f"{run.name} ({own})"
        models = [(str(run.pk), named), *((f"{run.pk}:{name}", name) for name in adapters)]
        groups.append({"run": run, "models": models})
    return groups


def _start(request: PageRequest) -> Any:
    ids, models = list[int](), list[str | None]()
    for name in ("left", "right"):
        text, _colon, model = request.POST.get(name, "").strip().partition(":")
        if not (text.isascii() and text.isdecimal() and 0 < len(text) < 19):
            raise invalid(name, _("choose a served model"))
        ids.append(int(text))
        models.append(model or None)
    values = {}
    for name, default in (("temperature", 0.7), ("top_p", 1.0), ("max_tokens", 512.0)):
        text = request.POST.get(name, "").strip()
        try:
            values[name] = float(text) if text else default
        except ValueError:
            raise invalid(name, _("%(value)s is not a number") % {"value": text[:40]}) from None
    if not (0 <= values["temperature"] <= 10 and 0 < values["top_p"] <= 1):
        raise invalid(
            "temperature",
            _("the sampling is out of range"),
            _("Use a temperature from 0 to 10, and a top p above 0 and up to 1."),
        )
    if not 1 <= values["max_tokens"] <= comparisons.MOST_TOKENS:
        raise invalid("max_tokens", _("out of range"), f"Use 1 to {comparisons.MOST_TOKENS}.")
    return comparisons.comparison_create(
        by=request.user,
        run_ids=ids,
        models=models,
        temperature=values["temperature"],
        top_p=values["top_p"],
        max_tokens=int(values["max_tokens"]),
        system=request.POST.get("system", "")[: comparisons.MOST_TEXT],
    )


def _turn(turn: Any) -> dict[str, Any]:
    shown = votes.shown_labels(turn)
    better = {"a": shown[0], "b": shown[1], "tie": _("tie"), "both_bad": _("both bad")}
    return {
        "text": turn.messages[-1]["content"],
        "answers": [
            (shown[place], turn.answers[place], turn.choice == "ab"[place]) for place in (0, 1)
        ],
        "better": better[turn.choice],
        "by": turn.by,
        "voted": turn.voted,
    }
