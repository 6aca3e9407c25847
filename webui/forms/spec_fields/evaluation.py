"""Fields of the evaluation that follows a fine-tuning run."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section
from workers.contracts.specs.inference_support import EVALUATION_METRICS

EVALUATION = Section(
    "evaluation",
    _("Evaluation before and after"),
    _("After the last step a second run compares the last checkpoint with the initial weights."),
    (
        F(
            "train.evaluate.metrics",
            _("Metrics"),
            "words",
            _("Leave empty for no evaluation."),
            choices=tuple((name, name) for name in EVALUATION_METRICS),
            default=_("no evaluation"),
            gates=True,
            wide=True,
        ),
        F(
            "train.evaluate.input",
            _("Examples"),
            "text",
            _("JSON Lines or text; default: the held-out part of the data."),
            double=True,
        ),
        F("train.evaluate.max_new_tokens", _("Max output tokens"), "int", default="64"),
    ),
    kinds=("train",),
    more_title=_("References and judge"),
    more=(
        F(
            "train.evaluate.references",
            _("References"),
            "text",
            _("A JSON Lines file, if the examples have no references."),
            double=True,
        ),
        F(
            "train.evaluate.judge_by",
            _("Judged by"),
            "choice",
            _("A chat model picks the better answer; a reward model scores each one."),
            choices=(
                ("choice", _("a chat model that chooses")),
                ("reward", _("a reward model that scores")),
            ),
            default="choice",
        ),
        F(
            "train.evaluate.judge.run",
            _("Judge: run"),
            "int",
            _("ID of a serve run that you can see. This run waits until that server is ready."),
            default=_("none"),
        ),
        F(
            "train.evaluate.judge.url",
            _("Judge: URL"),
            "text",
            _("Instead of a run: an OpenAI-compatible address up to /v1."),
            default=_("none"),
            double=True,
        ),
        F("train.evaluate.judge.model", _("Model of the judge"), "text", _("Its model id.")),
        F(
            "train.evaluate.judge.key_env",
            _("Key variable of the judge"),
            "text",
            _("The node's environment variable with the API key."),
        ),
    ),
)
