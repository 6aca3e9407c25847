"""Results tab of an evaluate run: each metric with what it means, and the lines that went worst."""

from __future__ import annotations

import re
from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import evaluation_results
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED

_WORST: Final = 20
_LONGEST: Final = 600
# metric → (title, unit, which way is better, what it means)
MEANS: Final = {
    "loss": (
        "Loss",
        "nats/token",
        "lower",
        "the mean surprise of a token, given all before it in its window",
    ),
    "perplexity": (
        "Perplexity",
        "",
        "lower",
        "among how many equally likely tokens the model as good as hesitates",
    ),
    "bits_per_byte": (
        "Bits a byte",
        "bits",
        "lower",
        "the same surprise by bytes: comparable between tokenizers",
    ),
    "accuracy": (
        "Accuracy",
        "share",
        "higher",
        "questions whose right choice is the likeliest as a whole",
    ),
    "accuracy_norm": (
        "Accuracy by bytes",
        "share",
        "higher",
        "the same, likelihoods divided by each choice's length",
    ),
    "bleu": (
        "BLEU",
        "of 100",
        "higher",
        "runs of one to four words shared with references, over all answers",
    ),
    "chrf": (
        "chrF",
        "of 100",
        "higher",
        "runs of characters shared with references, over all answers",
    ),
    "rouge1": (
        "ROUGE-1",
        "share",
        "higher",
        "words shared with the nearest reference, F measure, mean over answers",
    ),
    "rouge2": ("ROUGE-2", "share", "higher", "pairs of words shared with the nearest reference"),
    "rougeL": (
        "ROUGE-L",
        "share",
        "higher",
        "the longest common sequence of words with the nearest reference",
    ),
    "exact_match": (
        "Exact match",
        "share",
        "higher",
        "answers that are one of their references to the letter",
    ),
}
_BY: Final = {
    "loss": "loss",
    "right": "right choice",
    "exact_match": "exact match",
    "rougeL": "ROUGE-L",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    told = facts.evaluated
    path = evaluation_results.lines_file(run=facts.run, told=told) if told is not None else None
    worst = evaluation_results.worst(path, limit=_WORST) if path is not None else []
    return {
        "rows": [row(name, value) for name, value in told.metrics.items()]
        if told is not None
        else [],
        "worst": [line(each) for each in worst],
        "worst_by": _BY.get(worst[0].by, worst[0].by) if worst else "",
        "facts": about(told) if told is not None else [],
        "answered": any(
            each.told.get("answer") is not None or each.by == "right" for each in worst
        ),
        "files": [(file, _plain(file.name)) for file in runs.artifacts_of(run=facts.run)[:20]],
        "waits": facts.run.state not in ENDED,
        "source": facts.source(),
    }


def _plain(name: str) -> str:
    """Artifacts of a node carry their attempt in front."""
    return re.sub(r"^attempt-\d+-", "", name)


def row(name: str, value: float) -> dict[str, str]:
    title, unit, better, means = MEANS.get(name, (name.replace("_", " "), "", "", ""))
    shown = formatting.percent(value) if unit == "share" else formatting.quantity(value, 4)
    return {
        "title": title,
        "value": shown,
        "unit": "" if unit == "share" else unit,
        "better": better,
        "means": means,
    }


def line(each: evaluation_results.Line) -> dict[str, str]:
    told = each.told
    shown = (
        formatting.quantity(each.value, 4)
        if each.by == "loss"
        else "wrong"
        if each.by == "right"
        else formatting.percent(each.value)
    )
    said = told.get("answer")
    if said is None and each.by == "right":
        said = f"chose {told.get('chosen')}"
    tokens = told.get("tokens")
    return {
        "id": str(each.id),
        "value": shown,
        "answer": str(said)[:_LONGEST] if said is not None else "",
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else "",
    }


def about(told: Any) -> list[tuple[str, str]]:
    found = [("Model", told.model), ("Lines", f"{told.lines:,}")]
    if told.quantize:
        found.append(("Weights", told.quantize))
    if told.tokens:
        found.append(("Tokens", formatting.quantity(told.tokens)))
    if told.input:
        found.append(("Input", told.input))
    if told.window:
        found.append(("Windows", f"{told.window:,} tokens, moving on by {told.stride:,}"))
    if told.seconds:
        found.append(("Took", formatting.duration(told.seconds)))
    return found
