"""Lines tab of a produce run: the funnel of its filters, and lines with their provenance, live."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.runs.outputs import produce_servers, produced_lines
from orchestrator.runs.outputs.produce_estimate import estimate_produce
from webui.forms.forecast_produce import produce_facts
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from webui.tabs.answers import messages
from workers.contracts import RunSpec

ROWS: Final = 10
FILTER_TITLES: Final = {
    "empty": gettext_noop("empty answer"),
    "unchanged": gettext_noop("unchanged instruction"),
    "length": gettext_noop("length"),
    "complete": gettext_noop("cut at the token limit"),
    "refusal": gettext_noop("refusal"),
    "language": gettext_noop("script"),
    "rouge_l": gettext_noop("too similar (ROUGE-L)"),
    "ngram": gettext_noop("in the evaluation set"),
    "regex": gettext_noop("no match of the pattern"),
    "exact": gettext_noop("not the known answer"),
    "number": gettext_noop("not the known number"),
    "judge": gettext_noop("judge's score"),
    "reward": gettext_noop("reward"),
    "tie": gettext_noop("equal scores"),
}
_NOT_SHOWN: Final = frozenset({"rejected_by", "detail", "score", "scores", "steps", "seed_prompt"})


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    run = facts.run
    which: produced_lines.Which = (
        "rejected" if request.GET.get("lines") == "rejected" else "accepted"
    )
    after = request.GET.get("after") or None
    here = produced_lines.is_available(run=run, which=which)
    page = (
        produced_lines.get_page(run=run, which=which, after=after, limit=ROWS)
        if here
        else produced_lines.Page([], None)
    )
    progress = produced_lines.progress(run=run, latest=facts.latest)
    return {
        "progress_tiles": tiles(progress),
        "expected": produce_facts(_estimate(facts)),
        "funnel": funnel(progress),
        "rows": [row(line.content) for line in page.lines],
        "which": which,
        "following": page.next,
        "after": after,
        "here": here,
        "waiting": run.state not in ENDED,
        "reviewable": here and which == "accepted",
        "path": str(produced_lines.file_path(run=run, which="accepted")),
        "source": facts.source(),
    }


def _estimate(facts: Facts) -> dict[str, Any] | None:
    """Return the estimate of the run as its form showed it."""
    body = RunSpec.from_dict(facts.run.spec).produce
    if body is None:
        return None
    server = produce_servers.visible_server(body.server.run, facts.run.owner)
    return asdict(estimate_produce(body, server))


def tiles(progress: produced_lines.Progress | None) -> list[tuple[str, str, str]]:
    """Return `(title, value, unit)` of the totals that are known."""
    if progress is None:
        return []
    accepted = f"{progress.accepted:,} / {progress.wanted:,}"
    values = [
        (_("Accepted"), accepted, _("lines")),
        (_("Rejected"), f"{progress.rejected:,}", _("lines")),
    ]
    if progress.lines_per_s is not None:
        values.append((_("Speed"), formatting.quantity(progress.lines_per_s), _("lines/s")))
    if progress.prompt_tokens is not None:
        values.append((_("Prompt"), formatting.quantity(progress.prompt_tokens), _("tokens")))
    if progress.completion_tokens is not None:
        shown = formatting.quantity(progress.completion_tokens)
        values.append((_("Output"), shown, _("tokens")))
    if progress.cost_usd is not None:
        values.append((_("Cost"), f"{progress.cost_usd:,.3g}", "USD"))
        if progress.accepted:
            each = progress.cost_usd / progress.accepted
            values.append((_("Cost per line"), f"{each:,.2g}", "USD"))
    return values


def funnel(progress: produced_lines.Progress | None) -> list[dict[str, Any]]:
    """Return the bars from all candidates to the accepted lines; empty before the first."""
    if progress is None or not progress.candidates:
        return []
    most = max(progress.candidates, progress.accepted)
    bars = [_bar(_("candidates"), progress.candidates, 0, most)]
    bars += [
        _bar(filter_title(stage.kind), stage.left, stage.rejected, most)
        for stage in progress.stages
    ]
    return [*bars, _bar(_("accepted lines"), progress.accepted, 0, most)]


def filter_title(kind: str) -> str:
    """Return the readable name of a filter."""
    return _(FILTER_TITLES.get(kind, kind))


def row(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line as the template shows it."""
    origin = content.get("provenance")
    origin = origin if isinstance(origin, dict) else {}
    rejected_by = origin.get("rejected_by")
    return {
        "unit": origin.get("unit"),
        "task": str(content.get("task_type") or "").replace("_", " "),
        "texts": _texts(content),
        "rejected_by": filter_title(str(rejected_by)) if rejected_by else "",
        "detail": str(origin.get("detail") or ""),
        "scores": [
            (name.replace("_", " "), formatting.quantity(value))
            for name, value in {**_numbers(origin.get("scores")), **_best(origin)}.items()
        ],
        "seed": str(origin.get("seed_prompt") or ""),
        "steps": [
            (str(step.get("operation", "")).replace("_", " "), str(step.get("instruction", "")))
            for step in origin.get("steps") or []
            if isinstance(step, dict)
        ],
        "origin": [
            (name.replace("_", " "), _plain(value))
            for name, value in origin.items()
            if name not in _NOT_SHOWN and value not in (None, [], {})
        ],
    }


def _texts(content: Mapping[str, Any]) -> list[dict[str, str]]:
    """Messages; of a pair the prompt, then both answers under their names."""
    if "chosen" not in content:
        return messages(content.get("messages"))
    texts = messages(content.get("prompt"))
    for name, title in (("chosen", _("chosen")), ("rejected", _("rejected"))):
        texts += [{**each, "role": title} for each in messages(content.get(name))]
    return texts


def _numbers(value: Any) -> dict[str, float]:
    return (
        {name: each for name, each in value.items() if isinstance(each, int | float)}
        if isinstance(value, dict)
        else {}
    )


def _best(origin: Mapping[str, Any]) -> dict[str, float]:
    score = origin.get("score")
    name = str(origin.get("scored_by") or "score")
    return {name: score} if isinstance(score, int | float) else {}


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {each}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join("–" if each is None else str(each) for each in value)
    return value if isinstance(value, str) else json.dumps(value)


def _bar(title: str, left: int, rejected: int, most: int) -> dict[str, Any]:
    return {
        "title": title,
        "left": f"{left:,}",
        "rejected": f"{rejected:,}" if rejected else "",
        "part": f"{100 * left / most:.2f}",
        "lost": f"{100 * rejected / most:.2f}",
        "share": formatting.percent(left / most),
    }
