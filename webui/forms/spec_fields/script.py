"""Fields of the user's own program."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section

SCRIPT = Section(
    "script",
    _("Program"),
    _("Program that torchrun starts on every rank."),
    (
        F(
            "script.command",
            _("Command"),
            "argv",
            _("Script and arguments after torchrun's own, for example train.py --lr 3e-4"),
            wide=True,
        ),
        F(
            "script.workdir",
            _("Working directory"),
            "text",
            _("On every node; default: the run's directory."),
        ),
        F("script.env", _("Environment"), "pairs", _("NAME=value, one per line."), wide=True),
        F(
            "script.secrets",
            _("Secrets"),
            "pairs",
            _("NAME=value, one per line. Encrypted; never shown after the submit."),
            wide=True,
        ),
    ),
    kinds=("script",),
)
