"""Describes the estimate of a produce run: requests, output tokens, time and cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from webui.presentation import formatting


def produce_facts(estimate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return `(name, value)` rows; empty without an estimate."""
    if estimate is None:
        return []
    requests = _("%(count)s, if the filters reject none") % {"count": f"{estimate['requests']:,}"}
    if estimate["scoring_requests"]:
        requests += _("; %(count)s more to score answers") % {
            "count": f"{estimate['scoring_requests']:,}"
        }
    tokens = _("at most %(count)s") % {"count": formatting.quantity(estimate["output_tokens"])}
    facts = [(_("Requests"), requests), (_("Output tokens"), tokens)]
    if estimate["time_s"] is None:
        facts.append((_("Time"), str(estimate["reason"])))
    else:
        text = _("at most %(time)s at %(rate)s tokens/s") % {
            "time": formatting.remaining(estimate["time_s"]),
            "rate": formatting.quantity(estimate["tokens_per_s"]),
        }
        facts.append((_("Time"), text))
    if estimate["cost_usd"] is not None:
        facts.append(
            (_("Cost"), _("at most %(usd)s USD") % {"usd": f"{estimate['cost_usd']:,.3g}"})
        )
    return facts
