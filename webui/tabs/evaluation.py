"""Results tab of an evaluate run: metrics with their meaning, and the lowest-scoring examples."""

from __future__ import annotations

import re
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import evaluation_results
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

_WORST: Final = 20
_LONGEST: Final = 600
# metric → (title, unit, lower or higher is better, meaning)
METRICS: Final = {
    "loss": (
        gettext_noop("Loss"),
        "nats/token",
        gettext_noop("lower"),
        gettext_noop("mean negative log-likelihood per token, given its window"),
    ),
    "perplexity": (
        gettext_noop("Perplexity"),
        "",
        gettext_noop("lower"),
        gettext_noop("exp(loss): the effective number of equally likely next tokens"),
    ),
    "bits_per_byte": (
        gettext_noop("Bits per byte"),
        "bits",
        gettext_noop("lower"),
        gettext_noop("loss per byte of text: comparable between tokenizers"),
    ),
    "accuracy": (
        gettext_noop("Accuracy"),
        "share",
        gettext_noop("higher"),
        gettext_noop("questions whose correct choice has the highest likelihood"),
    ),
    "accuracy_norm": (
        gettext_noop("Normalized accuracy"),
        "share",
        gettext_noop("higher"),
        gettext_noop("accuracy with likelihoods divided by each choice's length"),
    ),
    "bleu": (
        "BLEU",
        gettext_noop("of 100"),
        gettext_noop("higher"),
        gettext_noop("n-grams of one to four words shared with the references, over all answers"),
    ),
    "chrf": (
        "chrF",
        gettext_noop("of 100"),
        gettext_noop("higher"),
        gettext_noop("character n-grams shared with the references, over all answers"),
    ),
    "rouge1": (
        "ROUGE-1",
        "share",
        gettext_noop("higher"),
        gettext_noop("words shared with the nearest reference, mean F1 over answers"),
    ),
    "rouge2": (
        "ROUGE-2",
        "share",
        gettext_noop("higher"),
        gettext_noop("word pairs shared with the nearest reference"),
    ),
    "rougeL": (
        "ROUGE-L",
        "share",
        gettext_noop("higher"),
        gettext_noop("longest common word sequence with the nearest reference"),
    ),
    "exact_match": (
        gettext_noop("Exact match"),
        "share",
        gettext_noop("higher"),
        gettext_noop("answers identical to one of their references"),
    ),
}
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
    path = (
        evaluation_results.lines_file(run=facts.run, evaluation=results)
        if results is not None
        else None
    )
    worst = evaluation_results.worst(path, limit=_WORST) if path is not None else []
    return {
        "rows": [row(name, value) for name, value in results.metrics.items()]
        if results is not None
        else [],
        "worst": [example(entry) for entry in worst],
        "worst_by": _(_RANKED_BY.get(worst[0].by, worst[0].by)) if worst else "",
        "facts": describe(results) if results is not None else [],
        "answered": any(
            entry.row.get("answer") is not None or entry.by == "right" for entry in worst
        ),
        "files": [(file, _short_name(file.name)) for file in runs.artifacts_of(run=facts.run)[:20]],
        "waiting": facts.run.state not in ENDED,
        "source": facts.source(),
    }


def _short_name(name: str) -> str:
    """Remove the attempt prefix of a node's artifact."""
    return re.sub(r"^attempt-\d+-", "", name)


def row(name: str, value: float) -> dict[str, str]:
    """Return a metric with its meaning."""
    title, unit, better, meaning = METRICS.get(name, (name.replace("_", " "), "", "", ""))
    shown = formatting.percent(value) if unit == "share" else formatting.quantity(value, 4)
    return {
        "title": _(title),
        "value": shown,
        "unit": "" if unit == "share" or not unit else _(unit),
        "better": _(better) if better else "",
        "meaning": _(meaning) if meaning else "",
    }


def example(entry: evaluation_results.Line) -> dict[str, str]:
    """Return one evaluated example."""
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
        "answer": str(answer)[:_LONGEST] if answer is not None else "",
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
