"""Fields of trials of plans before a run."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section

_AUTOMATIC = ("plan", ("auto",))

AUTOTUNE = Section(
    "autotune",
    _("Autotune"),
    _("Try the plans predicted fastest for a few steps, then train with the fastest one."),
    (
        F(
            "autotune.top_k",
            _("Plans to try"),
            "int",
            _("2 to 16. Empty: the plan predicted fastest runs without trials."),
            default=_("none"),
            gates=True,
            when=_AUTOMATIC,
        ),
        F(
            "autotune.steps",
            _("Steps per trial"),
            "int",
            _("Timed steps; clearly slower plans stop earlier."),
            default="12",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.warmup_steps",
            _("Steps before timing"),
            "int",
            default="3",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.max_share",
            _("Share of the run"),
            "float",
            _("All trials together take at most this share of the time of the run's steps."),
            default="0.05",
            when=_AUTOMATIC,
        ),
        F(
            "autotune.max_seconds",
            _("Time for trials"),
            "float",
            _("Seconds, of all trials together."),
            default=_("by the share"),
            when=_AUTOMATIC,
        ),
    ),
    kinds=("train",),
    owns=("autotune",),
)
