"""The data page: a file of examples as a model sees it, tokens colored by their loss weight."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from orchestrator.runs.submission.examples.example_preview import example_files, example_preview
from webui.charts.example_rows import picture_rows
from webui.presentation import formatting
from webui.views.access import PageRequest, page, require_role
from workers.contracts.specs.data import EXAMPLE_FORMATS

_FIELDS = ("path", "format", "tokenizer", "train_on", "template")
TRAIN_ON = ("assistant", "completion", "all")


@page
@require_GET
def data(request: PageRequest) -> HttpResponse:
    """Show the form, the data folders' files, and the preview of the named one."""
    require_role(request.user, Role.SUBMITTER, _("The data page"))
    values = {name: request.GET.get(name, "").strip() for name in _FIELDS}
    values["seq_len"] = request.GET.get("seq_len", "").strip() or "1024"
    packing = request.GET.get("packing", "yes") != "no"
    context: dict[str, Any] = {
        "values": values,
        "packing": packing,
        "formats": EXAMPLE_FORMATS,
        "train_on": TRAIN_ON,
        "files": example_files(),
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "roots": [str(root) for root in settings.DATA_ROOTS],
    }
    status = 200
    if values["path"]:
        wanted = {name: value for name, value in values.items() if value}
        try:
            preview = example_preview({**wanted, "packing": packing})
        except Refusal as refusal:
            context["errors"] = refusal.errors or [{"message": refusal.detail}]
            status = refusal.status
        else:
            context |= {
                "preview": preview,
                "sentence": sentence(preview),
                "histogram": {**(preview["histogram"] or {}), "seq_len": int(values["seq_len"])},
                "rows": picture_rows(preview["rows"], int(values["seq_len"])),
            }
    return render(request, "webui/data.html", context, status=status)


def sentence(preview: dict[str, Any]) -> str:
    """What matters most about the data, in one sentence."""
    statistics = preview["statistics"]
    count = preview["problem_count"]
    if count:
        return ngettext(
            "%(count)s line cannot be trained on; a run with this file would be refused.",
            "%(count)s lines cannot be trained on; a run with this file would be refused.",
            count,
        ) % {"count": count}
    if statistics is None:
        return _("No example of this file can be trained on.")
    text = _("%(samples)s examples, %(share)s of their tokens have loss.") % {
        "samples": formatting.quantity(statistics["samples"]),
        "share": formatting.percent(statistics["trained_tokens"] / max(1, statistics["tokens"])),
    }
    if not preview["complete"]:
        text += " " + _("This is the beginning of the file.")
    return text
