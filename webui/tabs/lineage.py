"""Lineage tab: from data and weights to the runs that use what this run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.runs.outputs import evaluation_results, lineage
from orchestrator.runs.store import copies
from webui.charts.lineage import picture, table
from webui.presentation.run_facts import Facts
from webui.tabs import before_after

# words of `lineage.Edge.use`
USES: Final = {
    "model": gettext_noop("model"),
    "initial_weights": gettext_noop("initial weights"),
    "reference": gettext_noop("reference"),
    "teacher": gettext_noop("teacher"),
    "reward_model": gettext_noop("reward model"),
    "value_model": gettext_noop("value model"),
    "adapter": gettext_noop("adapter"),
    "baseline": gettext_noop("baseline"),
    "data": gettext_noop("data"),
    "validation_data": gettext_noop("validation data"),
    "prompts": gettext_noop("prompts"),
    "draft": gettext_noop("draft"),
    "seeds": gettext_noop("seeds"),
    "server": gettext_noop("server"),
    "judge": gettext_noop("judge"),
    "references": gettext_noop("references"),
    "excluded": gettext_noop("excluded text"),
    "produced": gettext_noop("produced"),
    "fork": gettext_noop("fork"),
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    graph = lineage.lineage_of(run=facts.run, user=facts.user)
    drawn = picture(graph)
    newest = lineage.newest_checkpoint(run=facts.run)
    return {
        "picture": drawn,
        "arrows": [{"arrow": each, "text": edge_text(each.edge)} for each in drawn.arrows],
        "table": [{**row, "text": edge_text(row["edge"])} for row in table(graph)],
        "complete": graph.complete,
        "alone": len(graph.nodes) == 1,
        "checkpoint": newest,
        "copies": list(copies.of_run(run=facts.run)[:50]),
        "evaluations": evaluations(graph),
        "next": next_runs(facts.run.spec, newest.path, facts.run.name) if newest else [],
        "source": facts.source(),
    }


def evaluations(graph: lineage.Lineage) -> list[dict[str, Any]]:
    """Return `{run, comparison}` of finished evaluations that compare this run's checkpoints."""
    rows = []
    for node in graph.nodes.values():
        if node.run is None or node.run.kind != "evaluate" or node.level != 1:
            continue
        results = evaluation_results.evaluated(run=node.run)
        compared = before_after.comparison(results) if results is not None else None
        if compared is not None:
            rows.append({"run": node.run, "comparison": compared})
    return rows[::-1][:4]


def edge_text(edge: lineage.Edge) -> str:
    """Return what an edge says, with the checkpoint's step."""
    text = _(USES.get(edge.use, edge.use))
    return text + (_(", step %(step)s") % {"step": f"{edge.step:,}"} if edge.step else "")


def next_runs(spec: dict[str, Any], path: str, name: str) -> list[dict[str, str]]:
    """Return `{label, description, url}` of forms for runs that use a checkpoint."""
    train = spec.get("train") or {}
    adapter = train.get("adapter")
    weights = {"path": path}
    offered: list[tuple[str, str, str, dict[str, Any]]] = [
        (
            _("Serve"),
            _("Serve the adapter merged into its base") if adapter else _("Serve the weights"),
            _("serve %(name)s") % {"name": name},
            {"kind": "serve", "model": weights, "serve": {}},
        )
    ]
    if train.get("init_from"):
        offered.append(
            (
                _("Evaluate before and after"),
                _("Compare with the initial weights on the same examples"),
                _("evaluate %(name)s") % {"name": name},
                evaluation_spec(spec, path),
            )
        )
    if adapter:
        folder = str(Path(settings.ENV.home) / path)
        command = ["-m", "workers.models.convert", folder, "merged", "--to", "hf"]
        offered.append(
            (
                _("Merge"),
                _("Write the base with the adapter merged, and report the rounding error"),
                _("merge %(name)s") % {"name": name},
                {"kind": "script", "script": {"command": command}, "resources": {"devices": 1}},
            )
        )
    further = {key: value for key, value in train.items() if key != "freeze"}
    more = {**spec, "train": {**further, "init_from": weights}}
    offered.append(
        (
            _("Train further"),
            _("A new run that starts from these weights"),
            _("%(name)s further") % {"name": name},
            more,
        )
    )
    return [
        {
            "label": label,
            "description": description,
            "url": f"{reverse('run-new')}?"
            + urlencode({"name": title[:160], "spec": json.dumps(run)}),
        }
        for label, description, title, run in offered
    ]


def evaluation_spec(spec: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an evaluation of a fine-tuned checkpoint against the weights it started from."""
    train = spec.get("train") or {}
    return {
        "kind": "evaluate",
        "model": {"path": path},
        "data": spec.get("data") or {},
        "evaluate": {"metrics": ["loss", "perplexity"], "baseline": train.get("init_from")},
    }
