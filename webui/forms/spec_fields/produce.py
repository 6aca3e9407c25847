"""Fields of data production."""

from __future__ import annotations

from typing import get_args

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section, SpecField
from workers.contracts.specs.finetuning.produce import TaskType


def _server(name: str, run_label: str, url_label: str) -> tuple[SpecField, ...]:
    """The fields of a server."""
    return (
        F(
            f"produce.{name}.run",
            run_label,
            "int",
            _("ID of a serve run that you can see. This run waits until that server is ready."),
            default=_("none"),
        ),
        F(
            f"produce.{name}.url",
            url_label,
            "text",
            _("Instead of a run: an OpenAI-compatible address up to /v1."),
            default="http://HOST:PORT/v1",
            double=True,
        ),
        F(
            f"produce.{name}.model",
            _("Model id"),
            "text",
            _("As the server lists it."),
            default=_("the run's model"),
        ),
        F(
            f"produce.{name}.key_env",
            _("Key variable"),
            "text",
            _("The node's environment variable with the API key of a URL."),
            default=_("none"),
        ),
        F(
            f"produce.{name}.usd_per_million_prompt_tokens",
            _("Price of prompt tokens"),
            "float",
            _("USD per million."),
            default=_("unknown"),
        ),
        F(
            f"produce.{name}.usd_per_million_completion_tokens",
            _("Price of output tokens"),
            "float",
            _("USD per million."),
            default=_("unknown"),
        ),
    )


_SERVER = _server("server", _("Server: run"), _("Server: URL"))
_JUDGE = _server("judge", _("Judge: run"), _("Judge: URL"))

PRODUCE = Section(
    "produce",
    _("Data production"),
    _("A served model writes examples; filters reject some."),
    (
        *_SERVER[:3],
        F(
            "produce.method",
            _("Method"),
            "choice",
            _("How prompts and answers are generated."),
            choices=(
                ("", _("new instructions (Self-Instruct)")),
                ("evol", _("harder instructions (Evol-Instruct)")),
                ("answer", _("answer the seed prompts")),
                ("best_of_n", _("best of several answers (rejection sampling)")),
            ),
            default="",
            double=True,
        ),
        F(
            "produce.tasks",
            _("Tasks"),
            "weighted",
            _("Task types; math:2 counts twice."),
            choices=tuple((name, name.replace("_", " ")) for name in get_args(TaskType)),
            wide=True,
        ),
        F(
            "produce.seeds",
            _("Seed prompts"),
            "text",
            _("JSON lines with prompt, perhaps task_type and answer. New instructions need none."),
            default=_("none"),
            double=True,
        ),
        F("produce.count", _("Lines"), "int", _("Accepted lines to write."), default="100"),
        F(
            "produce.output",
            _("Output file"),
            "text",
            _("A name in the run's folder, or a path in a data root."),
            default="produced.jsonl",
        ),
        F(
            "produce.filters",
            _("Filters"),
            "filters",
            _(
                "One per line, in order: rouge_l, length, complete, refusal, language, ngram, "
                "regex, exact, number, judge or reward, with options such as threshold=0.7, "
                "max_chars=4000, script=latin, against=held_out.jsonl, n=13. none: no filter."
            ),
            default=_("length, complete, refusal, rouge_l"),
            wide=True,
        ),
    ),
    kinds=("produce",),
    more_title=_("Sampling, scores, judge and prices"),
    more=(
        *_SERVER[3:],
        F(
            "produce.samples",
            _("Answers per prompt"),
            "int",
            _("For the best of several answers."),
            default="4",
        ),
        F(
            "produce.score.kind",
            _("Best by"),
            "choice",
            choices=(
                ("judge", _("judge: 0 to 10")),
                ("reward", _("reward model")),
                ("regex", _("pattern")),
                ("exact", _("known answer")),
                ("number", _("known number")),
            ),
            default="judge",
        ),
        F("produce.score.pattern", _("Pattern"), "text", _("A regular expression.")),
        F("produce.score.tolerance", _("Tolerance"), "float", default="1e-6"),
        F(
            "produce.writes",
            _("Writes"),
            "choice",
            choices=(
                ("messages", _("the best answer")),
                ("preference", _("the best and the worst as a pair")),
            ),
            default="messages",
        ),
        F("produce.rounds", _("Evolution steps"), "int", default="1"),
        F("produce.turns", _("Questions of a dialogue"), "int", default="2"),
        F("produce.system", _("System prompt"), "long", _("For answers."), wide=True),
        F("produce.temperature", _("Temperature"), "float", default="0.9"),
        F("produce.top_p", _("Top p"), "float", default="1"),
        F("produce.max_new_tokens", _("Max output tokens"), "int", default="512"),
        F("produce.concurrency", _("Concurrent requests"), "int", default="8"),
        F("produce.seed", _("Seed"), "int", default="0"),
        *_JUDGE,
    ),
)
