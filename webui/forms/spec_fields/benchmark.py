"""Fields of a benchmark."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section
from workers.contracts.specs.benchmarks.techniques import TECHNIQUES

BENCHMARK = Section(
    "benchmark",
    _("Benchmark"),
    _("Same model and batch, one technique changed at a time."),
    (
        F(
            "benchmark.techniques",
            _("Techniques"),
            "words",
            _("Default: all. Techniques that the plan does not support are listed as skipped."),
            choices=tuple(TECHNIQUES.items()),
            default=_("all"),
            wide=True,
        ),
        F(
            "benchmark.steps",
            _("Timed steps"),
            "int",
            _("Per variant, over all rounds."),
            default="20",
        ),
        F("benchmark.seq_len", _("Sequence length"), "int", _("Tokens."), default="128"),
        F(
            "benchmark.warmup_steps",
            _("Warmup steps"),
            "int",
            _("Per round, not timed."),
            default="2",
        ),
        F(
            "benchmark.repeats",
            _("Rounds"),
            "int",
            _("Variants alternate, so drift affects all equally."),
            default="3",
        ),
        F("benchmark.seed", _("Seed"), "int", default="0"),
    ),
    kinds=("benchmark",),
)
