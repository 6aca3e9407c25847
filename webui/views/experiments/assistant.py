"""From base model to assistant: an experiment's runs as five steps, each of which starts the next.

Each step's form opens with the weights of the step before. Does not submit runs itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.outputs import evaluation_results, lineage
from webui.forms.finetuning_examples import FINETUNING_EXAMPLES
from webui.tabs import before_after
from webui.tabs.lineage import evaluation_spec
from webui.views.access import PageRequest, has_role, page, redirect_with_message

_RUNS = 200
_NAMES = 100  # experiments of one name
_ENDED = ("finished",)
_SERVES = ("running", "finished")
GRPO_SPEC: dict[str, Any] = {
    "kind": "train",
    "data": {"path": "examples/reverse.jsonl", "format": "prompt_completion"},
    "plan": {"precision": "fp32", "micro_batch_size": 8, "global_batch_size": 16},
    "train": {
        "objective": "grpo",
        "steps": 20,
        "seq_len": 96,
        "optimizer": {"lr": 1e-5},
        "checkpoint": {"every_steps": 20},
        "clip_norm": 1.0,
        "grpo": {
            "group_size": 8,
            "prompts_per_step": 2,
            "rewards": [{"kind": "exact"}],
            "rollout": {"max_new_tokens": 32},
        },
    },
}


@dataclass(frozen=True, slots=True)
class FormOffer:
    """A form to open."""

    label: str
    url: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: its newest run, if any, and what can be started now.

    `waits` says for what; `result` is what the run found.
    """

    number: int
    title: str
    text: str
    run: Any | None
    offers: list[FormOffer]
    waits: str = ""
    result: str = ""

    @property
    def done(self) -> bool:
        """Whether its newest run has what the next step needs, or serves."""
        if self.run is None:
            return False
        return self.run.state in (_SERVES if self.run.kind == "serve" else _ENDED)


@page
@require_POST
def start(request: PageRequest) -> HttpResponse:
    """Create an experiment for the steps."""
    title = _("From base model to assistant")
    for number in range(1, _NAMES):
        name = title if number == 1 else f"{title} {number}"
        try:
            created = services.experiment_create(owner=request.user, name=name)
            break
        except Refusal:
            if number + 1 == _NAMES or not has_role(request.user, Role.SUBMITTER):
                raise
    return redirect_with_message(
        request, _("Experiment %(name)s created.") % {"name": created.name}, "assistant", created.pk
    )


@page
@require_GET
def assistant(request: PageRequest, id: int) -> HttpResponse:
    """Show the steps of an experiment."""
    item = selectors.experiment_get(user=request.user, id=id)
    runs = selectors.run_list(user=request.user, experiment=item.pk, limit=_RUNS)
    stages = stages_of(runs, item.name)
    done = sum(each.done for each in stages)
    current = next((each for each in stages if not each.done), None)
    context = {
        "item": item,
        "stages": stages,
        "done": done,
        "current": current,
        "may_create": has_role(request.user, Role.SUBMITTER),
    }
    return render(request, "webui/assistant.html", context)


def stages_of(runs: Sequence[Any], experiment: str) -> list[Stage]:
    """The four runs after the base model, from an experiment's runs, newest first."""
    tuned = _newest(runs, "sft")
    aligned = _newest(runs, "dpo", "grpo", "ppo")
    tuned_weights, aligned_weights = _weights(tuned), _weights(aligned)
    last, weights = (aligned, aligned_weights) if aligned_weights else (tuned, tuned_weights)
    evaluated = next((run for run in runs if run.kind == "evaluate"), None)
    serving = [run for run in runs if run.kind == "serve"]
    served = next((run for run in serving if run.state == "running"), None) or next(
        iter(serving), None
    )

    def offer(label: str, name: str, spec: dict[str, Any]) -> FormOffer:
        query = {"name": name, "experiment": experiment, "spec": json.dumps(spec)}
        return FormOffer(label, f"{reverse('run-new')}?{urlencode(query)}")

    sft = FINETUNING_EXAMPLES["sft"][1]
    lora = FINETUNING_EXAMPLES["lora"][1]
    first = [offer(_("Fine-tune"), "sft", sft), offer(_("Fine-tune with LoRA"), "sft-lora", lora)]
    second, third, fourth = [], [], []
    if tuned_weights:
        dpo = _from(FINETUNING_EXAMPLES["dpo"][1], tuned_weights)
        grpo = _from(GRPO_SPEC, tuned_weights)
        second = [
            offer(_("DPO on preferences"), "dpo", dpo),
            offer(_("GRPO on rewards"), "grpo", grpo),
        ]
    if weights and last is not None:
        before = tuned_weights if last is aligned else ""
        compared = _evaluation(last.spec if tuned is None else tuned.spec, weights, last)
        compared["evaluate"]["baseline"] = {"path": before} if before else _base(last)
        third = [offer(_("Evaluate"), "evaluate", compared)]
        fourth = [offer(_("Serve"), "serve", _serve(weights))]
        if before:
            fourth.append(offer(_("Serve step 1"), "serve-sft", _serve(before)))
        if sum(run.state == "running" for run in serving) > 1:
            fourth.append(FormOffer(_("Chat side by side"), reverse("model-comparisons")))
    results = None if evaluated is None else evaluation_results.evaluated(run=evaluated)
    waits = _("Starts from the weights of step 1, once they are stored.")
    return [
        Stage(
            1,
            _("Supervised fine-tuning"),
            _("A base model learns to answer in conversations."),
            tuned,
            first,
        ),
        Stage(
            2,
            _("Preferences or rewards"),
            _("DPO learns from pairs of answers, GRPO from rewards of its own answers."),
            aligned,
            second,
            "" if second else waits,
        ),
        Stage(
            3,
            _("Evaluation"),
            _("Compares the newest weights with the earlier ones on the same examples."),
            evaluated,
            third,
            "" if third else waits,
            before_after.sentence(results) if results and results.baseline else "",
        ),
        Stage(
            4,
            _("Serving"),
            _("The assistant answers in the chat of its run and by an OpenAI-compatible API."),
            served,
            fourth,
            "" if fourth else waits,
        ),
    ]


def _newest(runs: Sequence[Any], *objectives: str) -> Any | None:
    """The newest training run with one of the objectives: a finished one with weights first, then
    any finished one.
    """
    tuned = [run for run in runs if (run.spec.get("train") or {}).get("objective") in objectives]
    ended = [run for run in tuned if run.state in _ENDED]
    return next((run for run in ended if _weights(run)), next(iter([*ended, *tuned]), None))


def _weights(run: Any | None) -> str:
    """The path of a run's newest checkpoint, "" without one."""
    newest = None if run is None else lineage.newest_checkpoint(run=run)
    return "" if newest is None else newest.path


def _serve(path: str) -> dict[str, Any]:
    return {"kind": "serve", "model": {"path": path}, "serve": {}}


def _evaluation(tuned: dict[str, Any], weights: str, last: Any) -> dict[str, Any]:
    """On the data of fine-tuning; after rewards on their prompts, with the share of right answers,
    if a reward compares with those.
    """
    train = last.spec.get("train") or {}
    policy = train.get("grpo") or train.get("ppo")
    if not policy:
        return evaluation_spec(tuned, weights)
    compared = evaluation_spec(last.spec, weights)
    kinds = {each.get("kind") for each in policy.get("rewards") or ()}
    if "exact" in kinds:
        tokens = (policy.get("rollout") or {}).get("max_new_tokens", 128)
        compared["evaluate"] |= {"metrics": ["loss", "exact_match"], "max_new_tokens": tokens}
    return compared


def _from(spec: dict[str, Any], path: str) -> dict[str, Any]:
    return {**spec, "train": {**spec["train"], "init_from": {"path": path}}}


def _base(run: Any) -> Any:
    return (run.spec.get("train") or {}).get("init_from")
