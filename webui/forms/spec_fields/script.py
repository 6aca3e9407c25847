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
        F(
            "script.environment.lock",
            _("Lock file"),
            "text",
            _("uv.lock, pylock.toml or requirements.txt in the working directory."),
            default=_("packages of the node"),
        ),
        F(
            "script.environment.modules",
            _("Modules"),
            "words",
            _("For module load, separated by commas, such as cuda/12.4."),
        ),
        F(
            "script.environment.python",
            _("Python of the modules"),
            "text",
            _("A program on the PATH that the modules set, such as python3.12."),
            default=_("Python of the node"),
        ),
        F(
            "script.environment.node_packages",
            _("Packages of the node"),
            "choice",
            _("Use the node's packages for anything the lock file does not pin, such as torch."),
            choices=(("", _("yes")), ("false", _("no, only packages of the lock file"))),
        ),
        F(
            "script.env",
            _("Environment variables"),
            "pairs",
            _("NAME=value, one per line."),
            wide=True,
        ),
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
